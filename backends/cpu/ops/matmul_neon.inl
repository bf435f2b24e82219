// What the tiers of Arm share of the matrix product: four NEON registers are 16 weight rows; activations are kept as
// 8-bit integers.
//
// The including file defines before it kRows, the most activation rows that go through the registers together, and
// kSignedWeights, whether it multiplies bytes above 127 as signed ones; after it dot_products and its table.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "matmul_kernels.h"
#include "scalar_math.h"

namespace trivet {
namespace {

constexpr int kVectorFloats = 4;
constexpr int kUnroll = 1;

struct V {
  uint32x4_t quarter[4];
};

struct F {
  float32x4_t quarter[4];
};

template <class Function>
inline V each(Function f) {
  return {{f(0), f(1), f(2), f(3)}};
}

template <class Function>
inline F each_float(Function f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline V operator&(V a, V b) {
  return each([&](int i) { return vandq_u32(a.quarter[i], b.quarter[i]); });
}
inline V operator|(V a, V b) {
  return each([&](int i) { return vorrq_u32(a.quarter[i], b.quarter[i]); });
}
inline V operator^(V a, V b) {
  return each([&](int i) { return veorq_u32(a.quarter[i], b.quarter[i]); });
}
inline V shl(V a, int bits) {
  return each([&](int i) { return vshlq_u32(a.quarter[i], vdupq_n_s32(bits)); });
}
inline V shr(V a, int bits) {
  return each([&](int i) { return vshlq_u32(a.quarter[i], vdupq_n_s32(-bits)); });
}
inline V sra(V a, int bits) {
  return each(
      [&](int i) { return vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(a.quarter[i]), vdupq_n_s32(-bits))); });
}
inline V splat(uint32_t value) {
  return each([&](int) { return vdupq_n_u32(value); });
}
inline F mul(F a, F b) {
  return each_float([&](int i) { return vmulq_f32(a.quarter[i], b.quarter[i]); });
}
inline F neg(F a) {
  return each_float([&](int i) { return vnegq_f32(a.quarter[i]); });
}
inline F to_float(V a) {
  return each_float([&](int i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a.quarter[i])); });
}
// IEEE binary16 in the low half of each dword.
inline F half_to_float16(V a) {
  return each_float([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(a.quarter[i]))); });
}
inline void store(void* p, V a) {
  for (int i = 0; i < 4; i++) vst1q_u32(static_cast<uint32_t*>(p) + 4 * i, a.quarter[i]);
}
inline void store(float* p, F a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.quarter[i]);
}

// The low 4 bits of each dword -> bit 4 of its 4 bytes.
inline V spread_bits(V a) {
  a = a & splat(15);
  return (shl(a, 4) | shl(a, 11) | shl(a, 18) | shl(a, 25)) & splat(0x10101010u);
}

struct Rows;
inline V load_dwords(Rows& rows, int64_t offset);
inline F load_halves(Rows& rows, int64_t offset);
inline void load_dword_pairs(Rows& rows, int64_t offset, V out[2]);
inline void load_transposed(Rows& rows, int64_t offset, V out[4]);
template <class W>
void product(const Panel& panel, int count, int64_t first, const TileArgs& args);

}  // namespace
}  // namespace trivet

#include "matmul_glu.inl"
#include "matmul_tile.inl"
namespace trivet {
namespace {

inline V load_dwords(Rows& rows, int64_t offset) {
  rows.prefetch_line();
  const auto load = [&](int row) { return load_as<uint32_t>(rows.at(row, offset)); };
  return each([&](int i) { return uint32x4_t{load(4 * i), load(4 * i + 1), load(4 * i + 2), load(4 * i + 3)}; });
}

// The binary16 number at `offset` of each row.
inline F load_halves(Rows& rows, int64_t offset) {
  rows.prefetch_line();
  const auto load = [&](int row) { return load_as<uint16_t>(rows.at(row, offset)); };
  return each_float([&](int i) {
    const uint16x4_t four{load(4 * i), load(4 * i + 1), load(4 * i + 2), load(4 * i + 3)};
    return vcvt_f32_f16(vreinterpret_f16_u16(four));
  });
}

// 8 bytes of each row as two dwords.
inline void load_dword_pairs(Rows& rows, int64_t offset, V out[2]) {
  const auto load = [&](int row) { return vcreate_u32(load_as<uint64_t>(rows.at(row, offset))); };
  for (int i = 0; i < 4; i++) {
    const uint32x4_t a = vcombine_u32(load(4 * i), load(4 * i + 1));
    const uint32x4_t b = vcombine_u32(load(4 * i + 2), load(4 * i + 3));
    out[0].quarter[i] = vuzp1q_u32(a, b);
    out[1].quarter[i] = vuzp2q_u32(a, b);
    if (i % 2 == 1) rows.prefetch_line();
  }
}

// 16 bytes of each row: out[g] holds dword g of the 16 rows.
inline void load_transposed(Rows& rows, int64_t offset, V out[4]) {
  for (int i = 0; i < 4; i++) {
    uint32x4_t z[4];
    for (int r = 0; r < 4; r++) z[r] = vreinterpretq_u32_u8(vld1q_u8(rows.at(4 * i + r, offset)));
    rows.prefetch_line();
    const uint64x2_t even01 = vreinterpretq_u64_u32(vtrn1q_u32(z[0], z[1]));
    const uint64x2_t odd01 = vreinterpretq_u64_u32(vtrn2q_u32(z[0], z[1]));
    const uint64x2_t even23 = vreinterpretq_u64_u32(vtrn1q_u32(z[2], z[3]));
    const uint64x2_t odd23 = vreinterpretq_u64_u32(vtrn2q_u32(z[2], z[3]));
    out[0].quarter[i] = vreinterpretq_u32_u64(vtrn1q_u64(even01, even23));
    out[1].quarter[i] = vreinterpretq_u32_u64(vtrn1q_u64(odd01, odd23));
    out[2].quarter[i] = vreinterpretq_u32_u64(vtrn2q_u64(even01, even23));
    out[3].quarter[i] = vreinterpretq_u32_u64(vtrn2q_u64(odd01, odd23));
  }
}

// A group of a panel block: 4 elements of each of the 16 rows.
using Group = uint8_t[kTileRows][4];

// Groups of a 32-block that share a scale.
template <class W>
inline constexpr int kGroups = W::kHalves ? 4 : 8;

// Whether the tier takes the format's integers less their zero point, so that nothing is left to correct.
template <class W>
inline constexpr bool kFlipped = kSignedWeights && W::kMax > 127;

// 4 elements of rows row ... row + 3.
template <class W>
inline int8x16_t load_weights(const Group& group, int row) {
  const uint8x16_t bytes = vld1q_u8(group[row]);
  return vreinterpretq_s8_u8(kFlipped<W> ? veorq_u8(bytes, vdupq_n_u8(0x80)) : bytes);
}

// dot[i][j] = the products of rows row + 4 j ... row + 4 j + 3 with activation row i (q + i * stride), summed over
// kGroups<W> groups. Defined by the tier.
template <class W, int MR>
inline void dot_products(const Group* groups, int row, const int8_t* q, int64_t stride, int32x4_t dot[MR][2]);

// The panel's rows 8 h ... 8 h + 7 times MR activation rows from row `i0` on.
template <class W, int MR>
inline void product_rows(const Panel& panel, int count, int64_t first, const TileArgs& args, int64_t i0, int h) {
  const int64_t blocks = args.num_blocks;
  const int64_t k = blocks * kBlock;
  const int8_t* q = static_cast<const int8_t*>(args.x.q) + i0 * k + first * kBlock;
  const float* d = args.x.d + i0 * blocks + first;
  const float* sum = args.x.sum + i0 * blocks + first;
  const int32_t* correction = args.x.correction + 2 * (i0 * blocks + first);
  float* out = args.acc + i0 * args.acc_stride + 8 * h;
  float32x4_t acc[MR][2];
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < 2; j++) {
      acc[i][j] = first == 0 ? vdupq_n_f32(0.0f) : vld1q_f32(out + i * args.acc_stride + 4 * j);
    }
  }
  for (int b = 0; b < count; b++) {
    for (int part = 0; part < (W::kHalves ? 2 : 1); part++) {
      int32x4_t dot[MR][2];
      dot_products<W, MR>(panel.q[b] + 4 * part, 8 * h, q + b * kBlock + 16 * part, k, dot);
      for (int i = 0; i < MR; i++) {
        const int32_t start = kFlipped<W> ? 0 : correction[2 * (i * blocks + b) + part];
        for (int j = 0; j < 2; j++) {
          const float32x4_t total = vcvtq_f32_s32(vaddq_s32(dot[i][j], vdupq_n_s32(start)));
          const float32x4_t factor = vmulq_n_f32(vld1q_f32(panel.d[b][part] + 8 * h + 4 * j), d[i * blocks + b]);
          acc[i][j] = vfmaq_f32(acc[i][j], factor, total);
        }
      }
    }
    if constexpr (W::kMin) {
      for (int i = 0; i < MR; i++) {
        for (int j = 0; j < 2; j++) {
          const float32x4_t minimum = vld1q_f32(panel.m[b] + 8 * h + 4 * j);
          acc[i][j] = vfmaq_n_f32(acc[i][j], minimum, sum[i * blocks + b]);
        }
      }
    }
  }
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < 2; j++) vst1q_f32(out + i * args.acc_stride + 4 * j, acc[i][j]);
  }
}

template <class W>
void product(const Panel& panel, int count, int64_t first, const TileArgs& args) {
  for (int h = 0; h < 2; h++) {
    int64_t i = 0;
    for (; i + kRows <= args.m; i += kRows) product_rows<W, kRows>(panel, count, first, args, i, h);
    if constexpr (kRows > 4) {
      for (; i + 4 <= args.m; i += 4) product_rows<W, 4>(panel, count, first, args, i, h);
    }
    if constexpr (kRows > 2) {
      for (; i + 2 <= args.m; i += 2) product_rows<W, 2>(panel, count, first, args, i, h);
    }
    if (i < args.m) product_rows<W, 1>(panel, count, first, args, i, h);
  }
}

// See matmul_scalar.cc for the definition.
void quantize(const float* x, int64_t k, void* q_out, float* d, float* sum, int32_t* sums) {
  auto* q = static_cast<int8_t*>(q_out);
  for (int64_t b = 0; b < k / kBlock; b++, x += kBlock, q += kBlock) {
    uint32x4_t largest = vdupq_n_u32(0);
    for (int i = 0; i < 8; i++) {
      const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + 4 * i));
      largest = vmaxq_u32(largest, vandq_u32(bits, vdupq_n_u32(0x7FFFFFFFu)));
    }
    const uint32_t bits = vmaxvq_u32(largest);
    const float amax = float_of_bits(bits);
    const bool finite = bits < 0x7F800000u;
    if (!finite || amax < 0x1p-112f) {
      d[b] = finite ? 0.0f : __builtin_nanf("");
      sum[b] = d[b];
      sums[2 * b] = sums[2 * b + 1] = 0;
      for (int i = 0; i < 2; i++) vst1q_s8(q + 16 * i, vdupq_n_s8(0));
      continue;
    }
    const float32x4_t inverse = vdupq_n_f32(127.0f / amax);
    for (int half = 0; half < 2; half++) {
      int32x4_t n[4];  // to the nearest, ties to even
      for (int i = 0; i < 4; i++) n[i] = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 16 * half + 4 * i), inverse));
      sums[2 * b + half] = vaddvq_s32(vaddq_s32(vaddq_s32(n[0], n[1]), vaddq_s32(n[2], n[3])));
      const int16x8_t low = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1]));
      const int16x8_t high = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
      vst1q_s8(q + 16 * half, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    }
    d[b] = amax / 127.0f;
    sum[b] = d[b] * static_cast<float>(sums[2 * b] + sums[2 * b + 1]);
  }
}

// Sum of 16 lanes held as four registers: lanes j and j + 8, then j + 4, j + 2, j + 1.
inline float reduce(const float32x4_t v[4]) {
  const float32x4_t s = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
  const float32x2_t pairs = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(pairs, 0) + vget_lane_f32(pairs, 1);
}

template <int MR, int NR>
inline void float_block(const FloatTileArgs& args, int64_t i0, int r0) {
  const float* w[NR];
  for (int r = 0; r < NR; r++) w[r] = args.weight + (r0 + r < args.n ? r0 + r : args.n - 1) * args.weight_stride;
  const float* x = args.x + i0 * args.x_stride;
  float32x4_t acc[MR][NR][4];
  for (auto& row : acc) {
    for (auto& sums : row) {
      for (auto& s : sums) s = vdupq_n_f32(0.0f);
    }
  }
  for (int64_t e = 0; e < args.k; e += 16) {
    for (int part = 0; part < 4; part++) {
      float32x4_t wv[NR];
      for (int r = 0; r < NR; r++) wv[r] = vld1q_f32(w[r] + e + 4 * part);
      for (int i = 0; i < MR; i++) {
        const float32x4_t xv = vld1q_f32(x + i * args.x_stride + e + 4 * part);
        for (int r = 0; r < NR; r++) acc[i][r][part] = vfmaq_f32(acc[i][r][part], xv, wv[r]);
      }
    }
  }
  for (int i = 0; i < MR; i++) {
    for (int r = 0; r < NR && r0 + r < args.n; r++) args.acc[(i0 + i) * args.acc_stride + r0 + r] = reduce(acc[i][r]);
  }
}

void float_tile(const FloatTileArgs& args) {
  int64_t i = 0;
  for (; i + 2 <= args.m; i += 2) {
    for (int r = 0; r < args.n; r += 2) float_block<2, 2>(args, i, r);
  }
  for (int r = 0; i < args.m && r < args.n; r += 4) float_block<1, 4>(args, i, r);
}

void convert_f16(const uint8_t* row, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(row + 2 * i))));
  }
  for (; i < n; i++) out[i] = load_half(row + 2 * i);
}

void convert_bf16(const uint8_t* row, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint16x4_t four = vreinterpret_u16_u8(vld1_u8(row + 2 * i));
    vst1q_f32(out + i, vreinterpretq_f32_u32(vshll_n_u16(four, 16)));
  }
  for (; i < n; i++) out[i] = bfloat16_to_float(load_as<uint16_t>(row + 2 * i));
}

constexpr MatMulKernels kMatMulKernels = {
    .q_bytes = 1,
    .quantize = quantize,
    .tile = TRIVET_BLOCK_TILES,
    .pack = nullptr,
    .packed_tiles = {},
    .float_tile = float_tile,
    .convert_f16 = convert_f16,
    .convert_bf16 = convert_bf16,
    .glu = glu,
    .soft_cap = soft_cap,
};

}  // namespace
}  // namespace trivet
