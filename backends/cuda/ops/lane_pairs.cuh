// What a lane of matvec_int8 multiplies at a time: two runs of 32 weights of a column, as bytes, against int8
// activations. Bytes may be a power of two times the weights; the scales of the activations make up for that.
#pragma once

#include "formats.cuh"

namespace trivet::cuda {

// Four unsigned bytes of `w` by four signed ones of `x`, added to `sum`.
__device__ __forceinline__ int dot_unsigned(uint32_t w, int x, int sum) {
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(w), "r"(x), "r"(sum));
  return result;
}

// (a & kMask) | b, and (a & kMask) ^ b, as one instruction each.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "n"(kMask), "r"(b));
  return result;
}
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_xor(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(a), "n"(kMask), "r"(b));
  return result;
}

// A lane's part of one row of x.
struct Activations {
  int4 values[2][2];  // [run][half]
  float2 scales[2];   // zeros for a run that is not there

  __device__ __forceinline__ int value(int run, int i) const {
    const int4& v = values[run][i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }
};

// Place: where the runs of a lane lie in a slice of `runs` runs; a lane beyond the end is given the last ones.
// unit(i): what the scale of x is multiplied with for run i. Sums are made the same way for any number of rows.
template <Format F>
struct LanePair {  // the formats with blocks of 32
  using Reader = BlockReader<F>;
  static constexpr int kRunDistance = 1;
  static __device__ __forceinline__ float unit(int) { return 1.0f; }
  static __device__ __forceinline__ int first_run(int lane) { return 2 * lane; }

  struct Place {
    int offsets[2];
    __device__ __forceinline__ Place(int first, int runs)
        : offsets{Reader::offset(min(first, runs - 1)), Reader::offset(min(first + 1, runs - 1))} {}
  };

  Run32 runs[2];

  __device__ __forceinline__ LanePair(const SharedBytes& slice, const Place& place) {
    const typename Reader::Lane lane(0);
#pragma unroll
    for (int i = 0; i < 2; ++i) runs[i] = Reader::decode(Reader::load(slice.at(place.offsets[i]), lane), lane);
  }

  __device__ __forceinline__ float times(const Activations& x, float sum) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int dot = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = __dp4a(runs[r].q[i], x.value(r, i), dot);
      sum = fmaf(__fmul_rn(runs[r].scale[0], x.scales[r].x), static_cast<float>(dot), sum);
      if (kHasMinimum<F>) sum = fmaf(runs[r].minimum, x.scales[r].y, sum);
    }
    return sum;
  }
};

// The runs 2 j and 2 j + 1 of a superblock are the lower and the upper nibbles of the same 32 bytes.
template <bool kFive>
struct NibblePair {
  using Reader = KReader<kFive>;
  static constexpr int kRunDistance = 1;
  // Upper nibbles of q4_k stay where they are.
  static __device__ __forceinline__ float unit(int i) { return kFive || i == 0 ? 1.0f : 1.0f / 16; }
  static __device__ __forceinline__ int first_run(int lane) { return 2 * lane; }

  // Bytes 2 j and 2 j + 1 of the scales and minima, as KReader describes them, are taken together.
  struct Place {
    int head, quants, bit, shift, minimum_shift;
    uint32_t low_mask, high_mask;
    bool late;
    __device__ __forceinline__ Place(int first, int runs)
        : head(Reader::offset(min(first, runs - 1))),
          quants(head + (kFive ? 48 : 16) + (first & 7) / 2 * 32),
          bit(first & 7),
          shift((first & 2) * 8),
          minimum_shift(shift + ((first & 4) != 0 ? 4 : 0)),
          low_mask((first & 4) != 0 ? 0x0F0Fu : 0x3F3Fu),
          high_mask((first & 4) != 0 ? 0x3030u : 0u),
          late((first & 4) != 0) {}
  };

  uint32_t low[8], high[8];
  uint32_t scales;  // two bytes
  float minima[2], d, dmin;

  __device__ __forceinline__ NibblePair(const SharedBytes& slice, const Place& place) {
    const uint4 head = slice.vector(place.head);
    const uint4 a = slice.vector(place.quants), b = slice.vector(place.quants + 16);
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    if constexpr (kFive) {
      const uint4 e = slice.vector(place.head + 16), f = slice.vector(place.head + 32);
      const uint32_t bits[8] = {e.x, e.y, e.z, e.w, f.x, f.y, f.z, f.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t fifth = bits[i] >> place.bit;
        low[i] = (words[i] & 0x0F0F0F0Fu) | (fifth << 4 & 0x10101010u);
        high[i] = (words[i] >> 4 & 0x0F0F0F0Fu) | (fifth << 3 & 0x10101010u);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        low[i] = words[i] & 0x0F0F0F0Fu;
        high[i] = words[i] & 0xF0F0F0F0u;
      }
    }
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&head.x));
    d = both.x;
    dmin = -both.y;
    scales = ((place.late ? head.w : head.y) >> place.shift & place.low_mask) |
             (head.y >> place.shift >> 2 & place.high_mask);
    const uint32_t both_minima = ((place.late ? head.w : head.z) >> place.minimum_shift & place.low_mask) |
                                 (head.z >> place.shift >> 2 & place.high_mask);
    minima[0] = static_cast<float>(both_minima & 255u);
    minima[1] = static_cast<float>(both_minima >> 8);
  }

  __device__ __forceinline__ float times(const Activations& x, float sum) const {
    int dots[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dots[0] = dot_unsigned(low[i], x.value(0, i), dots[0]);
      dots[1] = dot_unsigned(high[i], x.value(1, i), dots[1]);
    }
    const float first = static_cast<float>(dots[0] * static_cast<int>(scales & 255u));
    const float second = static_cast<float>(dots[1] * static_cast<int>(scales >> 8));
    sum = fmaf(d, fmaf(second, x.scales[1].x, __fmul_rn(first, x.scales[0].x)), sum);
    return fmaf(dmin, fmaf(minima[1], x.scales[1].y, __fmul_rn(minima[0], x.scales[0].y)), sum);
  }
};
template <>
struct LanePair<Format::kQ4_K> : NibblePair<false> {
  using NibblePair::NibblePair;
};
template <>
struct LanePair<Format::kQ5_K> : NibblePair<true> {
  using NibblePair::NibblePair;
};

// Two runs whose lower bits are the lower and the upper nibbles of the same bytes, and whose upper bits lie in the same
// bytes, too. The bytes are four times the weights: so the offset of 32 is the sign.
template <>
struct LanePair<Format::kQ6_K> {
  using Reader = BlockReader<Format::kQ6_K>;
  static constexpr int kRunDistance = 2;
  static __device__ __forceinline__ float unit(int) { return 0.25f; }
  static __device__ __forceinline__ int first_run(int lane) { return lane / 4 * 8 + (lane & 2) * 2 + (lane & 1); }

  struct Place {
    int low, high, scales, d;
    unsigned pair;  // bits below those of the first run, in a byte of upper bits
    __device__ __forceinline__ Place(int first, int runs) {
      const int offset = Reader::offset(min(first, runs - 1));
      low = offset + (first >> 2 & 1) * 64 + (first & 1) * 32;
      high = offset + 128 + (first >> 2 & 1) * 32;
      scales = offset + 192 + 2 * (first & 7);
      d = offset + 208;
      pair = (first & 1) * 2;
    }
  };

  int q[2][8];
  int scales[2][2];  // [run][half]
  float d;

  __device__ __forceinline__ LanePair(const SharedBytes& slice, const Place& place) {
    Words<8> low, high;
    slice.words(place.low, low);
    slice.words(place.high, high);
    high.shift += place.pair;  // now the upper bits of the runs are bits 0 and 1, 4 and 5
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t l = low[i], h = high[i];
      q[0][i] = static_cast<int>(masked_or<0x3C3C3C3C>(l << 2, masked_xor<0xC0C0C0C0>(h << 6, 0x80808080u)));
      q[1][i] = static_cast<int>(masked_or<0x3C3C3C3C>(l >> 2, masked_xor<0xC0C0C0C0>(h << 2, 0x80808080u)));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int both = slice.u16(place.scales + 2 * kRunDistance * r);
      scales[r][0] = static_cast<int8_t>(both & 255);
      scales[r][1] = static_cast<int8_t>(both >> 8);
    }
    d = to_half_float(slice.u16(place.d));
  }

  __device__ __forceinline__ float times(const Activations& x, float sum) const {
    float parts[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int dots[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) dots[i / 4] = __dp4a(q[r][i], x.value(r, i), dots[i / 4]);
      parts[r] = static_cast<float>(dots[0] * scales[r][0] + dots[1] * scales[r][1]);
    }
    return fmaf(d, fmaf(parts[1], x.scales[1].x, __fmul_rn(parts[0], x.scales[0].x)), sum);
  }
};

}  // namespace trivet::cuda
