// The weight formats of backends/contract/formats.py on the device. A block format is read in runs of 32 consecutive weights:
// eight words of four signed bytes, a scale per 16 of them and a constant that is added to each weight.
#pragma once

#include "device.cuh"

namespace trivet::cuda {

struct Run32 {
  int q[8];
  float scale[2];
  float minimum;
};

template <Format F>
inline constexpr bool kHasMinimum = F == Format::kQ4_1 || F == Format::kQ5_1 || F == Format::kQ4_K || F == Format::kQ5_K;
template <Format F>
inline constexpr bool kHasHalves = F == Format::kQ6_K;  // two scales per run

__device__ __forceinline__ float half_at(const uint8_t* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}

// Words of an address that is only 2-byte aligned, from aligned words; may read up to 3 bytes beyond the last word, within
// the allocation (arena.h pads).
template <int N>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t (&out)[N]) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const unsigned shift = static_cast<unsigned>(address & 2) * 8;
  uint32_t raw[N + 1];
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = __ldg(words + i);
  raw[N] = shift != 0 ? __ldg(words + N) : 0;
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = __funnelshift_r(raw[i], raw[i + 1], shift);
}

// Bits [4 i, 4 i + 4) of `bits`, each moved to bit 4 of a byte.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits, int i) {
  const uint32_t nibble = bits >> (4 * i) & 15u;
  return (nibble * 0x00204081u & 0x01010101u) << 4;
}

template <Format F>
struct BlockReader;

// 32-element blocks with nibbles: d [, m] [, 32 fifth bits], 16 bytes.
template <bool kMinimum, bool kFive, int kZero>
struct NibbleReader {
  static constexpr int kHeader = kMinimum ? 4 : 2;
  static constexpr int kBytes = kHeader + (kFive ? 4 : 0) + 16;
  static __device__ __forceinline__ Run32 read(const uint8_t* row, int run) {
    const uint8_t* p = row + static_cast<int64_t>(run) * kBytes;
    Run32 r;
    r.scale[0] = r.scale[1] = half_at(p);
    r.minimum = kMinimum ? half_at(p + 2) : 0.0f;
    constexpr int kWords = kFive ? 5 : 4;
    uint32_t words[kWords];
    load_words(p + kHeader, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = words[i + (kFive ? 1 : 0)];
      uint32_t low = w & 0x0F0F0F0Fu, high = w >> 4 & 0x0F0F0F0Fu;
      if (kFive) {
        low |= fifth_bits(words[0], i);
        high |= fifth_bits(words[0], i + 4);
      }
      constexpr uint32_t kZeros = static_cast<uint32_t>(kZero) * 0x01010101u;
      r.q[i] = static_cast<int>(kZero != 0 ? __vsub4(low, kZeros) : low);
      r.q[i + 4] = static_cast<int>(kZero != 0 ? __vsub4(high, kZeros) : high);
    }
    return r;
  }
};
template <>
struct BlockReader<Format::kQ4_0> : NibbleReader<false, false, 8> {};
template <>
struct BlockReader<Format::kQ4_1> : NibbleReader<true, false, 0> {};
template <>
struct BlockReader<Format::kQ5_0> : NibbleReader<false, true, 16> {};
template <>
struct BlockReader<Format::kQ5_1> : NibbleReader<true, true, 0> {};

template <>
struct BlockReader<Format::kQ8_0> {
  static __device__ __forceinline__ Run32 read(const uint8_t* row, int run) {
    const uint8_t* p = row + static_cast<int64_t>(run) * 34;
    Run32 r;
    r.scale[0] = r.scale[1] = half_at(p);
    r.minimum = 0.0f;
    uint32_t words[8];
    load_words(p + 2, words);
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = static_cast<int>(words[i]);
    return r;
  }
};

// d, dmin, 12 bytes of 6-bit scales and minima [, 32 bytes of fifth bits], 128 bytes of nibbles; all 16-byte aligned.
template <bool kFive>
struct KReader {
  static constexpr int kBytes = kFive ? 176 : 144;
  static __device__ __forceinline__ Run32 read(const uint8_t* row, int run) {
    const uint8_t* p = row + static_cast<int64_t>(run >> 3) * kBytes;
    const int j = run & 7;
    const uint4 head = __ldg(reinterpret_cast<const uint4*>(p));
    const uint4* quants = reinterpret_cast<const uint4*>(p + (kFive ? 48 : 16)) + (j >> 1) * 2;
    const uint4 a = __ldg(quants), b = __ldg(quants + 1);
    const float d = __low2float(*reinterpret_cast<const __half2*>(&head.x));
    const float dmin = __high2float(*reinterpret_cast<const __half2*>(&head.x));
    const int shift = (j & 3) * 8;
    uint32_t scale, minimum;
    if (j < 4) {
      scale = head.y >> shift & 63u;
      minimum = head.z >> shift & 63u;
    } else {
      const uint32_t low = head.w >> shift & 255u;
      scale = (low & 15u) | (head.y >> (shift + 6) & 3u) << 4;
      minimum = low >> 4 | (head.z >> (shift + 6) & 3u) << 4;
    }
    Run32 r;
    r.scale[0] = r.scale[1] = d * static_cast<float>(scale);
    r.minimum = -(dmin * static_cast<float>(minimum));
    const int nibble = (j & 1) * 4;
    const uint32_t raw[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = static_cast<int>(raw[i] >> nibble & 0x0F0F0F0Fu);
    if (kFive) {
      const uint4* fifths = reinterpret_cast<const uint4*>(p + 16);
      const uint4 e = __ldg(fifths), f = __ldg(fifths + 1);
      const uint32_t bits[8] = {e.x, e.y, e.z, e.w, f.x, f.y, f.z, f.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) r.q[i] |= static_cast<int>((bits[i] >> j & 0x01010101u) << 4);
    }
    return r;
  }
};
template <>
struct BlockReader<Format::kQ4_K> : KReader<false> {};
template <>
struct BlockReader<Format::kQ5_K> : KReader<true> {};

// 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, d; 2-byte aligned.
template <>
struct BlockReader<Format::kQ6_K> {
  static __device__ __forceinline__ Run32 read(const uint8_t* row, int run) {
    const uint8_t* p = row + static_cast<int64_t>(run >> 3) * 210;
    const int j = run & 7;
    uint32_t low[8], high[8];
    load_words(p + (j >> 2) * 64 + (j & 1) * 32, low);
    load_words(p + 128 + (j >> 2) * 32, high);
    const int nibble = (j >> 1 & 1) * 4, pair = (j & 3) * 2;
    Run32 r;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t value = (low[i] >> nibble & 0x0F0F0F0Fu) | (high[i] >> pair & 0x03030303u) << 4;
      r.q[i] = static_cast<int>(__vsub4(value, 0x20202020u));
    }
    const uint16_t scales = *reinterpret_cast<const uint16_t*>(p + 192 + 2 * j);
    const float d = half_at(p + 208);
    r.scale[0] = d * static_cast<float>(static_cast<int8_t>(scales & 255));
    r.scale[1] = d * static_cast<float>(static_cast<int8_t>(scales >> 8));
    r.minimum = 0.0f;
    return r;
  }
};

// Weight i of a run as float32, rounded as the NumPy reference does: product, then sum.
__device__ __forceinline__ float weight_of(const Run32& r, int i) {
  const int q = static_cast<int8_t>(r.q[i >> 2] >> (8 * (i & 3)));
  return __fadd_rn(__fmul_rn(static_cast<float>(q), r.scale[i >> 4]), r.minimum);
}

// Weights [32 run, 32 run + 32) of a row of k as float32; float formats may end inside the run, then zeros follow.
template <Format F>
__device__ __forceinline__ void read_floats(const uint8_t* row, int run, int64_t k, float (&out)[32]) {
  if constexpr (F == Format::kF32 || F == Format::kF16 || F == Format::kBF16) {
    const int64_t first = static_cast<int64_t>(run) * 32;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int64_t at = first + i;
      if (at >= k) {
        out[i] = 0.0f;
      } else if constexpr (F == Format::kF32) {
        out[i] = reinterpret_cast<const float*>(row)[at];
      } else if constexpr (F == Format::kF16) {
        out[i] = __half2float(reinterpret_cast<const __half*>(row)[at]);
      } else {
        out[i] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[at]);
      }
    }
  } else {
    const Run32 r = BlockReader<F>::read(row, run);
#pragma unroll
    for (int i = 0; i < 32; ++i) out[i] = weight_of(r, i);
  }
}

// f(std::integral_constant-like tag) for a run-time format.
template <Format F>
struct FormatTag {
  static constexpr Format value = F;
};

template <class Function>
cudaError_t with_block_format(Format format, const Function& f) {
  switch (format) {
    case Format::kQ4_0: return f(FormatTag<Format::kQ4_0>{});
    case Format::kQ4_1: return f(FormatTag<Format::kQ4_1>{});
    case Format::kQ5_0: return f(FormatTag<Format::kQ5_0>{});
    case Format::kQ5_1: return f(FormatTag<Format::kQ5_1>{});
    case Format::kQ8_0: return f(FormatTag<Format::kQ8_0>{});
    case Format::kQ4_K: return f(FormatTag<Format::kQ4_K>{});
    case Format::kQ5_K: return f(FormatTag<Format::kQ5_K>{});
    case Format::kQ6_K: return f(FormatTag<Format::kQ6_K>{});
    default: return cudaErrorInvalidValue;
  }
}

template <class Function>
cudaError_t with_format(Format format, const Function& f) {
  switch (format) {
    case Format::kF32: return f(FormatTag<Format::kF32>{});
    case Format::kF16: return f(FormatTag<Format::kF16>{});
    case Format::kBF16: return f(FormatTag<Format::kBF16>{});
    default: return with_block_format(format, f);
  }
}

}  // namespace trivet::cuda
