// Sixteen float lanes: AVX-512 F, BW, DQ, VL. See vec_scalar.h for the contract of each function.
#pragma once

#include <immintrin.h>

#define TRIVET_VEC
#include "vec_scalar.h"

namespace {

struct Vec {
  static constexpr int kWidth = 16;
  static constexpr int kBlock = 4;
  static constexpr bool kLoadsHalf = true;
  __m512 v;

  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  static Vec load(const BFloat16* p) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(Half* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store(BFloat16* p) const {
    float lanes[16];
    _mm512_storeu_ps(lanes, v);
    for (int i = 0; i < 16; ++i) from_float(lanes[i], p + i);
  }
};

inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), y.v)};
}
inline Vec exp2_of_biased(Vec y) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(y.v), _mm512_set1_epi32(127)), 23))};
}
inline Vec keep_lanes(Vec x, int begin, int end, float fill) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 inside =
      _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), inside, x.v)};
}
inline bool any_not_less(Vec x, Vec limit) { return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ) != 0; }
inline float reduce_max(Vec x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 pairs = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
inline float reduce_add(Vec x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 pairs = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}

}  // namespace
