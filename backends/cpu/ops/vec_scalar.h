// One-lane vector: the reference implementation of the interface that the other vec_*.h offer.
// Everything is in an unnamed namespace so that no code compiled for one instruction set can be linked into another.
#pragma once

#include <cmath>
#include <cstring>

#include "kv_types.h"

namespace {

using trivet::BFloat16;
using trivet::Half;

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | (magnitude > 0x7c00u ? 0x400000u : 0u));
  }
  // Shifted into place the exponent is 112 too small; multiplying by 2^112 also normalises the subnormals.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

inline void from_float(float x, float* out) { *out = x; }

inline void from_float(float x, BFloat16* out) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u & 0x7fffffffu) > 0x7f800000u ? (u | 0x400000u) : u + 0x7fffu + ((u >> 16) & 1u);
  out->bits = static_cast<uint16_t>(rounded >> 16);
}

inline void from_float(float x, Half* out) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the bottom
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

#ifndef TRIVET_VEC
#define TRIVET_VEC

struct Vec {
  static constexpr int kWidth = 1;
  static constexpr int kBlock = 4;           // vectors per row of a register tile
  static constexpr bool kLoadsHalf = false;  // a load of Half is one instruction
  float v;

  static Vec set(float x) { return {x}; }
  template <class T>
  static Vec load(const T* p) {
    return {to_float(*p)};
  }
  template <class T>
  void store(T* p) const {
    from_float(v, p);
  }
};

inline Vec add(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec div(Vec a, Vec b) { return {a.v / b.v}; }
// a * b + c, fused where the instruction set has it.
inline Vec mul_add(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
// b when either is NaN.
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
// Lanes where x < limit become 0, others (and NaN) keep y.
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return {x.v < limit.v ? 0.0f : y.v}; }
// 2^n for y = n + 1.5 * 2^23, n an integer in [-126, 127].
inline Vec exp2_of_biased(Vec y) { return {bits_float((float_bits(y.v) + 127u) << 23)}; }
// Lanes outside [begin, end) become `fill`.
inline Vec keep_lanes(Vec x, int begin, int end, float fill) { return {begin <= 0 && 0 < end ? x.v : fill}; }
// Whether some lane is not < limit (NaN included).
inline bool any_not_less(Vec x, Vec limit) { return !(x.v < limit.v); }
inline float reduce_max(Vec x) { return x.v; }
// Sums by halves: lane i with lane i + width / 2, and so on.
inline float reduce_add(Vec x) { return x.v; }

#endif

}  // namespace
