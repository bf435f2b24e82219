#include "weight_formats.h"

#include "../../common/ort_op.h"
#include "scalar_math.h"

namespace trivet {
namespace {

void dequantize_f32(const uint8_t* p, int64_t n, float* out) { std::memcpy(out, p, static_cast<size_t>(n) * 4); }

void dequantize_f16(const uint8_t* p, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = load_half(p + 2 * i);
}

void dequantize_bf16(const uint8_t* p, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = bfloat16_to_float(load_as<uint16_t>(p + 2 * i));
}

// d, 16 bytes: element i in the low nibble of byte i, element i + 16 in the high one.
void dequantize_q4_0(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 32; b++, p += 18, out += 32) {
    const float d = load_half(p);
    for (int i = 0; i < 16; i++) {
      out[i] = static_cast<float>((p[2 + i] & 15) - 8) * d;
      out[i + 16] = static_cast<float>((p[2 + i] >> 4) - 8) * d;
    }
  }
}

// d, m, 16 bytes.
void dequantize_q4_1(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 32; b++, p += 20, out += 32) {
    const float d = load_half(p);
    const float m = load_half(p + 2);
    for (int i = 0; i < 16; i++) {
      out[i] = static_cast<float>(p[4 + i] & 15) * d + m;
      out[i + 16] = static_cast<float>(p[4 + i] >> 4) * d + m;
    }
  }
}

// d, 32 fifth bits, 16 bytes.
void dequantize_q5_0(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 32; b++, p += 22, out += 32) {
    const float d = load_half(p);
    const uint32_t high = load_as<uint32_t>(p + 2);
    for (int i = 0; i < 16; i++) {
      const int low = static_cast<int>((p[6 + i] & 15) | ((high >> i & 1) << 4));
      const int upper = static_cast<int>((p[6 + i] >> 4) | ((high >> (i + 16) & 1) << 4));
      out[i] = static_cast<float>(low - 16) * d;
      out[i + 16] = static_cast<float>(upper - 16) * d;
    }
  }
}

// d, m, 32 fifth bits, 16 bytes.
void dequantize_q5_1(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 32; b++, p += 24, out += 32) {
    const float d = load_half(p);
    const float m = load_half(p + 2);
    const uint32_t high = load_as<uint32_t>(p + 4);
    for (int i = 0; i < 16; i++) {
      const int low = static_cast<int>((p[8 + i] & 15) | ((high >> i & 1) << 4));
      const int upper = static_cast<int>((p[8 + i] >> 4) | ((high >> (i + 16) & 1) << 4));
      out[i] = static_cast<float>(low) * d + m;
      out[i + 16] = static_cast<float>(upper) * d + m;
    }
  }
}

// d, 32 signed bytes.
void dequantize_q8_0(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 32; b++, p += 34, out += 32) {
    const float d = load_half(p);
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(static_cast<int8_t>(p[2 + i])) * d;
  }
}

// d, dmin, 12 bytes of scales and minima, 128 bytes: nibbles of sub-blocks 2j (low) and 2j + 1 (high) in bytes 32j...
void dequantize_q4_k(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 256; b++, p += 144) {
    const float d = load_half(p);
    const float dmin = load_half(p + 2);
    for (int j = 0; j < 8; j++, out += 32) {
      int scale;
      int minimum;
      unpack_scale_min(p + 4, j, &scale, &minimum);
      const float ds = d * static_cast<float>(scale);
      const float dm = dmin * static_cast<float>(minimum);
      const uint8_t* q = p + 16 + j / 2 * 32;
      for (int i = 0; i < 32; i++) out[i] = ds * static_cast<float>((q[i] >> (j % 2 * 4)) & 15) - dm;
    }
  }
}

// As q4_k, with 32 bytes of fifth bits (bit j of byte i: element i of sub-block j) before the nibbles.
void dequantize_q5_k(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 256; b++, p += 176) {
    const float d = load_half(p);
    const float dmin = load_half(p + 2);
    for (int j = 0; j < 8; j++, out += 32) {
      int scale;
      int minimum;
      unpack_scale_min(p + 4, j, &scale, &minimum);
      const float ds = d * static_cast<float>(scale);
      const float dm = dmin * static_cast<float>(minimum);
      const uint8_t* q = p + 48 + j / 2 * 32;
      for (int i = 0; i < 32; i++) {
        const int value = ((q[i] >> (j % 2 * 4)) & 15) | ((p[16 + i] >> j & 1) << 4);
        out[i] = ds * static_cast<float>(value) - dm;
      }
    }
  }
}

// 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales (one per 16 elements), d.
void dequantize_q6_k(const uint8_t* p, int64_t n, float* out) {
  for (int64_t b = 0; b < n / 256; b++, p += 210) {
    const float d = load_half(p + 208);
    for (int j = 0; j < 8; j++, out += 32) {
      const uint8_t* low = p + j / 4 * 64 + j % 2 * 32;
      const uint8_t* high = p + 128 + j / 4 * 32;
      for (int half = 0; half < 2; half++) {
        const float ds = d * static_cast<float>(static_cast<int8_t>(p[192 + 2 * j + half]));
        for (int i = 16 * half; i < 16 * (half + 1); i++) {
          const int value = ((low[i] >> (j % 4 / 2 * 4)) & 15) | ((high[i] >> (j % 4 * 2) & 3) << 4);
          out[i] = ds * static_cast<float>(value - 32);
        }
      }
    }
  }
}

constexpr WeightFormat with(Format format, int zero_point, void (*dequantize)(const uint8_t*, int64_t, float*)) {
  return {kFormatSpecs[static_cast<int>(format)], zero_point, dequantize};
}

constexpr WeightFormat kFormats[] = {
    // in the order of Format
    with(Format::kF32, 0, dequantize_f32),    with(Format::kF16, 0, dequantize_f16),
    with(Format::kBF16, 0, dequantize_bf16),  with(Format::kQ4_0, 8, dequantize_q4_0),
    with(Format::kQ4_1, 0, dequantize_q4_1),  with(Format::kQ5_0, 16, dequantize_q5_0),
    with(Format::kQ5_1, 0, dequantize_q5_1),  with(Format::kQ8_0, 128, dequantize_q8_0),
    with(Format::kQ4_K, 0, dequantize_q4_k),  with(Format::kQ5_K, 0, dequantize_q5_k),
    with(Format::kQ6_K, 32, dequantize_q6_k),
};

}  // namespace

const WeightFormat& weight_format(Format format) { return kFormats[static_cast<int>(format)]; }

}  // namespace trivet
