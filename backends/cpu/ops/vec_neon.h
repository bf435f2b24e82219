// Four float lanes: Advanced SIMD of ARMv8-A. See vec_scalar.h for the contract of each function.
#pragma once

#include <arm_neon.h>

#define TRIVET_VEC
#include "vec_scalar.h"

namespace {

struct Vec {
  static constexpr int kWidth = 4;
  static constexpr int kBlock = 4;
  static constexpr bool kLoadsHalf = true;
  float32x4_t v;

  static Vec set(float x) { return {vdupq_n_f32(x)}; }
  static Vec load(const float* p) { return {vld1q_f32(p)}; }
  static Vec load(const Half* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))))};
  }
  static Vec load(const BFloat16* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16))};
  }
  void store(float* p) const { vst1q_f32(p, v); }
  void store(Half* p) const { vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  void store(BFloat16* p) const {
    float lanes[4];
    vst1q_f32(lanes, v);
    for (int i = 0; i < 4; ++i) from_float(lanes[i], p + i);
  }
};

inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
// Comparison and selection: vmaxq_f32 would return the NaN, whichever side it is on.
inline Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.v), vcltq_f32(x.v, limit.v)))};
}
inline Vec exp2_of_biased(Vec y) {
  return {vreinterpretq_f32_u32(vshlq_n_u32(vaddq_u32(vreinterpretq_u32_f32(y.v), vdupq_n_u32(127)), 23))};
}
inline Vec keep_lanes(Vec x, int begin, int end, float fill) {
  const int32_t numbers[4] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(numbers);
  const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(begin)), vcltq_s32(lane, vdupq_n_s32(end)));
  return {vbslq_f32(inside, x.v, vdupq_n_f32(fill))};
}
inline bool any_not_less(Vec x, Vec limit) { return vminvq_u32(vcltq_f32(x.v, limit.v)) == 0; }
inline float reduce_max(Vec x) {
  const Vec pairs = max(x, {vextq_f32(x.v, x.v, 2)});
  return vgetq_lane_f32(max(pairs, {vextq_f32(pairs.v, pairs.v, 1)}).v, 0);
}
inline float reduce_add(Vec x) {
  const float32x2_t pairs = vadd_f32(vget_low_f32(x.v), vget_high_f32(x.v));
  return vget_lane_f32(pairs, 0) + vget_lane_f32(pairs, 1);
}

}  // namespace
