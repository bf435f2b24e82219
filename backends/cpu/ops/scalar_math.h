// Scalar conversions, shared by plain C++ code. Everything has internal linkage, so a copy compiled for a wider tier
// never replaces the baseline's.
#pragma once

#include <cstdint>
#include <cstring>

namespace trivet {
namespace {

template <class T>
[[maybe_unused]] inline T load_as(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

[[maybe_unused]] inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[maybe_unused]] inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// IEEE binary16 -> binary32, exact, subnormals, infinities and NaN included.
[[maybe_unused]] inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  if ((half & 0x7C00u) == 0x7C00u) return float_of_bits(sign | 0x7F800000u | magnitude);
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals.
  return float_of_bits(bits_of_float(float_of_bits(magnitude) * 0x1p112f) | sign);
}

[[maybe_unused]] inline float bfloat16_to_float(uint16_t value) {
  return float_of_bits(static_cast<uint32_t>(value) << 16);
}

[[maybe_unused]] inline float load_half(const uint8_t* p) { return half_to_float(load_as<uint16_t>(p)); }

// Scale (low) and minimum (high) of sub-block j of a q4_k or q5_k block, 6 bits each, from its 12 scale bytes.
[[maybe_unused]] inline void unpack_scale_min(const uint8_t* s, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *minimum = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

}  // namespace
}  // namespace trivet
