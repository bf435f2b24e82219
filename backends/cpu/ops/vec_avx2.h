// Eight float lanes: AVX2, FMA and F16C. See vec_scalar.h for the contract of each function.
#pragma once

#include <immintrin.h>

#define TRIVET_VEC
#include "vec_scalar.h"

namespace {

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr int kBlock = 2;
  static constexpr bool kLoadsHalf = true;
  __m256 v;

  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
  static Vec load(const BFloat16* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(Half* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store(BFloat16* p) const {
    float lanes[8];
    _mm256_storeu_ps(lanes, v);
    for (int i = 0; i < 8; ++i) from_float(lanes[i], p + i);
  }
};

inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ), y.v)};
}
inline Vec exp2_of_biased(Vec y) {
  return {
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(y.v), _mm256_set1_epi32(127)), 23))};
}
inline Vec keep_lanes(Vec x, int begin, int end, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
                                          _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(end - 1)));
  return {_mm256_blendv_ps(x.v, _mm256_set1_ps(fill), _mm256_castsi256_ps(outside))};
}
inline bool any_not_less(Vec x, Vec limit) { return _mm256_movemask_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_NLT_UQ)) != 0; }
inline float reduce_max(Vec x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 pairs = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
inline float reduce_add(Vec x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 pairs = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}

}  // namespace
