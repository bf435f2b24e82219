// Four float lanes, SSE2 only: every x86-64 has it. See vec_scalar.h for the contract of each function.
#pragma once

#include <emmintrin.h>

#define TRIVET_VEC
#include "vec_scalar.h"

namespace {

struct Vec {
  static constexpr int kWidth = 4;
  static constexpr int kBlock = 2;
  static constexpr bool kLoadsHalf = false;
  __m128 v;

  static Vec set(float x) { return {_mm_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm_loadu_ps(p)}; }
  static Vec load(const Half* p) {
    return {_mm_setr_ps(to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3]))};
  }
  static Vec load(const BFloat16* p) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), x))};
  }
  void store(float* p) const { _mm_storeu_ps(p, v); }
  template <class T>
  void store(T* p) const {
    float lanes[4];
    _mm_storeu_ps(lanes, v);
    for (int i = 0; i < 4; ++i) from_float(lanes[i], p + i);
  }
};

inline Vec add(Vec a, Vec b) { return {_mm_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm_div_ps(a.v, b.v)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {_mm_add_ps(_mm_mul_ps(a.v, b.v), c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm_min_ps(a.v, b.v)}; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return {_mm_andnot_ps(_mm_cmplt_ps(x.v, limit.v), y.v)}; }
inline Vec exp2_of_biased(Vec y) {
  return {_mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(_mm_castps_si128(y.v), _mm_set1_epi32(127)), 23))};
}
inline Vec keep_lanes(Vec x, int begin, int end, float fill) {
  const __m128i lane = _mm_setr_epi32(0, 1, 2, 3);
  const __m128i outside =
      _mm_or_si128(_mm_cmpgt_epi32(_mm_set1_epi32(begin), lane), _mm_cmpgt_epi32(lane, _mm_set1_epi32(end - 1)));
  const __m128 mask = _mm_castsi128_ps(outside);
  return {_mm_or_ps(_mm_andnot_ps(mask, x.v), _mm_and_ps(mask, _mm_set1_ps(fill)))};
}
inline bool any_not_less(Vec x, Vec limit) { return _mm_movemask_ps(_mm_cmpnlt_ps(x.v, limit.v)) != 0; }
inline float reduce_max(Vec x) {
  const __m128 pairs = _mm_max_ps(x.v, _mm_movehl_ps(x.v, x.v));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
inline float reduce_add(Vec x) {
  const __m128 pairs = _mm_add_ps(x.v, _mm_movehl_ps(x.v, x.v));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}

}  // namespace
