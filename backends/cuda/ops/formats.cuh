// The weight formats of backends/contract/formats.py on the device. A block format is read in runs of 32 consecutive
// weights: eight words of four signed bytes, a scale per 16 of them and a constant that is added to each weight.
#pragma once

#include "device.cuh"

namespace trivet::cuda {

struct Run32 {
  int q[8];
  float scale[2];
  float minimum;
};

template <Format F>
inline constexpr bool kHasMinimum =
    F == Format::kQ4_1 || F == Format::kQ5_1 || F == Format::kQ4_K || F == Format::kQ5_K;
template <Format F>
inline constexpr bool kHasHalves = F == Format::kQ6_K;  // two scales per run

// Superblocks of these are whole 16-byte words, and so are rows of them.
template <Format F>
inline constexpr bool kAligned = F == Format::kQ4_K || F == Format::kQ5_K;

// N words at an address that is only 2-byte aligned, as aligned words that are put together when they are used, so that
// loads can be in flight; may read up to 3 bytes beyond the last word, within the allocation (Arena pads).
template <int N>
struct Words {
  uint32_t raw[N + 1];
  unsigned shift;
  __device__ __forceinline__ uint32_t operator[](int i) const { return __funnelshift_r(raw[i], raw[i + 1], shift); }
};

// Bytes of weights in device memory.
struct GlobalBytes {
  const uint8_t* base;

  __device__ __forceinline__ GlobalBytes at(int offset) const { return {base + offset}; }
  __device__ __forceinline__ uint16_t u16(int offset) const {
    return __ldg(reinterpret_cast<const uint16_t*>(base + offset));
  }
  __device__ __forceinline__ uint4 vector(int offset) const {
    return __ldg(reinterpret_cast<const uint4*>(base + offset));
  }
  template <int N>
  __device__ __forceinline__ void words(int offset, Words<N>& out) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(base + offset);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    out.shift = static_cast<unsigned>(address & 2) * 8;
#pragma unroll
    for (int i = 0; i <= N; ++i) out.raw[i] = __ldg(words + i);
  }
};

// The same in shared memory: `first` bytes after `base`, which is 16-byte aligned.
struct SharedBytes {
  const uint8_t* base;
  int first;

  __device__ __forceinline__ SharedBytes at(int offset) const { return {base, first + offset}; }
  __device__ __forceinline__ uint16_t u16(int offset) const {
    return *reinterpret_cast<const uint16_t*>(base + first + offset);
  }
  __device__ __forceinline__ uint4 vector(int offset) const {
    return *reinterpret_cast<const uint4*>(base + first + offset);
  }
  template <int N>
  __device__ __forceinline__ void words(int offset, Words<N>& out) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(base + ((first + offset) & ~3));
    out.shift = static_cast<unsigned>((first + offset) & 2) * 8;
#pragma unroll
    for (int i = 0; i <= N; ++i) out.raw[i] = words[i];
  }
};

__device__ __forceinline__ float to_half_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// x - y in each of four bytes, for bytes of x below 128 and of y up to 128: no borrow crosses where the top bit is set
// first.
__device__ __forceinline__ uint32_t minus_bytes(uint32_t x, uint32_t y) {
  return ((x | 0x80808080u) - y) ^ 0x80808080u;
}

// Bits [4 i, 4 i + 4) of `bits`, each moved to bit 4 of a byte.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits, int i) {
  const uint32_t nibble = bits >> (4 * i) & 15u;
  return (nibble * 0x00204081u & 0x01010101u) << 4;
}

// offset() is where the block of a run starts in its row; what depends on the place of a run inside its block is kept
// in Lane. load() fetches from the start of the block, decode() makes integers and scales of it.
template <Format F>
struct BlockReader;

// 32-element blocks with nibbles: d [, m] [, 32 fifth bits], 16 bytes.
template <bool kMinimum, bool kFive, int kZero>
struct NibbleReader {
  static constexpr int kHeader = kMinimum ? 4 : 2;
  static constexpr int kBytes = kHeader + (kFive ? 4 : 0) + 16;
  static constexpr int kBytesOf2048 = 64 * kBytes;
  struct Lane {
    __device__ __forceinline__ explicit Lane(int) {}
  };
  struct Raw {
    Words<kFive ? 5 : 4> words;
    uint16_t d, m;
  };
  static __device__ __forceinline__ int offset(int run) { return run * kBytes; }
  template <class Bytes>
  static __device__ __forceinline__ Raw load(const Bytes& block, const Lane&) {
    Raw raw;
    raw.d = block.u16(0);
    raw.m = kMinimum ? block.u16(2) : uint16_t{0};
    block.words(kHeader, raw.words);
    return raw;
  }
  static __device__ __forceinline__ Run32 decode(const Raw& raw, const Lane&) {
    Run32 r;
    r.scale[0] = r.scale[1] = to_half_float(raw.d);
    r.minimum = kMinimum ? to_half_float(raw.m) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = raw.words[i + (kFive ? 1 : 0)];
      uint32_t low = w & 0x0F0F0F0Fu, high = w >> 4 & 0x0F0F0F0Fu;
      if (kFive) {
        low |= fifth_bits(raw.words[0], i);
        high |= fifth_bits(raw.words[0], i + 4);
      }
      constexpr uint32_t kZeros = static_cast<uint32_t>(kZero) * 0x01010101u;
      r.q[i] = static_cast<int>(kZero != 0 ? minus_bytes(low, kZeros) : low);
      r.q[i + 4] = static_cast<int>(kZero != 0 ? minus_bytes(high, kZeros) : high);
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
  static constexpr int kBytesOf2048 = 64 * 34;
  struct Lane {
    __device__ __forceinline__ explicit Lane(int) {}
  };
  struct Raw {
    Words<8> words;
    uint16_t d;
  };
  static __device__ __forceinline__ int offset(int run) { return run * 34; }
  template <class Bytes>
  static __device__ __forceinline__ Raw load(const Bytes& block, const Lane&) {
    Raw raw;
    raw.d = block.u16(0);
    block.words(2, raw.words);
    return raw;
  }
  static __device__ __forceinline__ Run32 decode(const Raw& raw, const Lane&) {
    Run32 r;
    r.scale[0] = r.scale[1] = to_half_float(raw.d);
    r.minimum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = static_cast<int>(raw.words[i]);
    return r;
  }
};

// d, dmin, 12 bytes of 6-bit scales and minima [, 32 bytes of fifth bits], 128 bytes of nibbles; all 16-byte aligned.
// Scale and minimum of sub-block j < 4 are bytes j and 4 + j; of the later ones the low four bits are a nibble of byte
// 4 + j, the upper two lie above those of the earlier ones.
template <bool kFive>
struct KReader {
  static constexpr int kBytes = kFive ? 176 : 144;
  static constexpr int kBytesOf2048 = 8 * kBytes;
  struct Lane {
    int j, shift, minimum_shift, quants;
    uint32_t low_mask, high_mask;
    __device__ __forceinline__ explicit Lane(int run)
        : j(run & 7),
          shift((run & 3) * 8),
          minimum_shift((run & 3) * 8 + ((run & 4) != 0 ? 4 : 0)),
          quants((kFive ? 48 : 16) + (run & 7) / 2 * 32),
          low_mask((run & 4) != 0 ? 15u : 63u),
          high_mask((run & 4) != 0 ? 0x30u : 0u) {}
  };
  struct Raw {
    uint4 head, a, b, e, f;
  };
  static __device__ __forceinline__ int offset(int run) { return (run >> 3) * kBytes; }
  template <class Bytes>
  static __device__ __forceinline__ Raw load(const Bytes& block, const Lane& lane) {
    Raw raw;
    raw.head = block.vector(0);
    raw.a = block.vector(lane.quants);
    raw.b = block.vector(lane.quants + 16);
    if (kFive) {
      raw.e = block.vector(16);
      raw.f = block.vector(32);
    }
    return raw;
  }
  static __device__ __forceinline__ Run32 decode(const Raw& raw, const Lane& lane) {
    const float2 d = __half22float2(*reinterpret_cast<const __half2*>(&raw.head.x));
    const bool late = lane.high_mask != 0;
    const uint32_t scale_low = late ? raw.head.w : raw.head.y, minimum_low = late ? raw.head.w : raw.head.z;
    const uint32_t scale = (scale_low >> lane.shift & lane.low_mask) | (raw.head.y >> lane.shift >> 2 & lane.high_mask);
    const uint32_t minimum =
        (minimum_low >> lane.minimum_shift & lane.low_mask) | (raw.head.z >> lane.shift >> 2 & lane.high_mask);
    Run32 r;
    r.scale[0] = r.scale[1] = d.x * static_cast<float>(scale);
    r.minimum = -(d.y * static_cast<float>(minimum));
    const int nibble = (lane.j & 1) * 4;
    const uint32_t words[8] = {raw.a.x, raw.a.y, raw.a.z, raw.a.w, raw.b.x, raw.b.y, raw.b.z, raw.b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = static_cast<int>(words[i] >> nibble & 0x0F0F0F0Fu);
    if (kFive) {
      const uint32_t bits[8] = {raw.e.x, raw.e.y, raw.e.z, raw.e.w, raw.f.x, raw.f.y, raw.f.z, raw.f.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) r.q[i] |= static_cast<int>((bits[i] >> lane.j & 0x01010101u) << 4);
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
  static constexpr int kBytesOf2048 = 8 * 210;
  struct Lane {
    int low, high, scales, nibble, pair;
    __device__ __forceinline__ explicit Lane(int run)
        : low((run >> 2 & 1) * 64 + (run & 1) * 32),
          high(128 + (run >> 2 & 1) * 32),
          scales(192 + 2 * (run & 7)),
          nibble((run >> 1 & 1) * 4),
          pair((run & 3) * 2) {}
  };
  struct Raw {
    Words<8> low, high;
    uint16_t scales, d;
  };
  static __device__ __forceinline__ int offset(int run) { return (run >> 3) * 210; }
  template <class Bytes>
  static __device__ __forceinline__ Raw load(const Bytes& block, const Lane& lane) {
    Raw raw;
    block.words(lane.low, raw.low);
    block.words(lane.high, raw.high);
    raw.scales = block.u16(lane.scales);
    raw.d = block.u16(208);
    return raw;
  }
  static __device__ __forceinline__ Run32 decode(const Raw& raw, const Lane& lane) {
    Run32 r;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t value = (raw.low[i] >> lane.nibble & 0x0F0F0F0Fu) | (raw.high[i] >> lane.pair & 0x03030303u) << 4;
      r.q[i] = static_cast<int>(minus_bytes(value, 0x20202020u));
    }
    const float d = to_half_float(raw.d);
    r.scale[0] = d * static_cast<float>(static_cast<int8_t>(raw.scales & 255));
    r.scale[1] = d * static_cast<float>(static_cast<int8_t>(raw.scales >> 8));
    r.minimum = 0.0f;
    return r;
  }
};

template <Format F, class Bytes>
__device__ __forceinline__ Run32 read_run(const Bytes& row, int run) {
  using Reader = BlockReader<F>;
  const typename Reader::Lane lane(run);
  return Reader::decode(Reader::load(row.at(Reader::offset(run)), lane), lane);
}

// Weight i of a run as float32, rounded as the NumPy reference does: product, then sum.
__device__ __forceinline__ float weight_of(const Run32& r, int i) {
  // The byte plus 128 as the low bits of 2^23: cheaper than a conversion, and exact.
  const uint32_t raised = __byte_perm(static_cast<uint32_t>(r.q[i >> 2]) ^ 0x80808080u, 0x4B000000u, 0x7440 | (i & 3));
  const float q = __uint_as_float(raised) - 8388736.0f;
  return __fadd_rn(__fmul_rn(q, r.scale[i >> 4]), r.minimum);
}

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Weights i and i + 1 of a run as bfloat16; i is even. Bytes of less than seven bits, which are all but those of q8_0,
// plus 64 as the upper bits of 2^7: one multiply-add takes 192 off again, with an error far below bfloat16's.
template <Format F>
__device__ __forceinline__ uint32_t bfloat16_pair(const Run32& r, int i) {
  if constexpr (F == Format::kQ8_0) {
    return pack_bfloat16(weight_of(r, i), weight_of(r, i + 1));
  } else {
    const float scale = r.scale[i >> 4], offset = fmaf(-192.0f, scale, r.minimum);
    const uint32_t bytes = (static_cast<uint32_t>(r.q[i >> 2]) & 0x7F7F7F7Fu) ^ 0x40404040u;
    const auto value = [&](int at) {
      return fmaf(__uint_as_float(__byte_perm(bytes, 0x43000000u, 0x7044 | (at & 3) << 8)), scale, offset);
    };
    return pack_bfloat16(value(i), value(i + 1));
  }
}

// Eight of them from weight 8 `part` on.
template <Format F>
__device__ __forceinline__ uint4 bfloat16_words(const Run32& r, int part) {
  return make_uint4(bfloat16_pair<F>(r, 8 * part), bfloat16_pair<F>(r, 8 * part + 2), bfloat16_pair<F>(r, 8 * part + 4),
                    bfloat16_pair<F>(r, 8 * part + 6));
}

template <Format F>
inline constexpr bool kIsBlock = F != Format::kF32 && F != Format::kF16 && F != Format::kBF16;

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
    const Run32 r = read_run<F>(GlobalBytes{row}, run);
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
    case Format::kQ4_0:
      return f(FormatTag<Format::kQ4_0>{});
    case Format::kQ4_1:
      return f(FormatTag<Format::kQ4_1>{});
    case Format::kQ5_0:
      return f(FormatTag<Format::kQ5_0>{});
    case Format::kQ5_1:
      return f(FormatTag<Format::kQ5_1>{});
    case Format::kQ8_0:
      return f(FormatTag<Format::kQ8_0>{});
    case Format::kQ4_K:
      return f(FormatTag<Format::kQ4_K>{});
    case Format::kQ5_K:
      return f(FormatTag<Format::kQ5_K>{});
    case Format::kQ6_K:
      return f(FormatTag<Format::kQ6_K>{});
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Function>
cudaError_t with_format(Format format, const Function& f) {
  switch (format) {
    case Format::kF32:
      return f(FormatTag<Format::kF32>{});
    case Format::kF16:
      return f(FormatTag<Format::kF16>{});
    case Format::kBF16:
      return f(FormatTag<Format::kBF16>{});
    default:
      return with_block_format(format, f);
  }
}

}  // namespace trivet::cuda
