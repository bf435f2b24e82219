// Matrix product with SSE2, which every x86-64 CPU has: four registers are 16 weight rows, activations are kept as
// 16-bit integers for pmaddwd.
#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

#include "matmul_kernels.h"

namespace trivet {
namespace {

constexpr int kVectorFloats = 4;
constexpr int kUnroll = 1;

struct V {
  __m128i quarter[4];
};

struct F {
  __m128 quarter[4];
};

template <class Function>
inline V each(Function f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline V operator&(V a, V b) {
  return each([&](int i) { return _mm_and_si128(a.quarter[i], b.quarter[i]); });
}
inline V operator|(V a, V b) {
  return each([&](int i) { return _mm_or_si128(a.quarter[i], b.quarter[i]); });
}
inline V operator^(V a, V b) {
  return each([&](int i) { return _mm_xor_si128(a.quarter[i], b.quarter[i]); });
}
inline V shl(V a, int bits) {
  return each([&](int i) { return _mm_slli_epi32(a.quarter[i], bits); });
}
inline V shr(V a, int bits) {
  return each([&](int i) { return _mm_srli_epi32(a.quarter[i], bits); });
}
inline V sra(V a, int bits) {
  return each([&](int i) { return _mm_srai_epi32(a.quarter[i], bits); });
}
inline V splat(uint32_t value) {
  return each([&](int) { return _mm_set1_epi32(static_cast<int>(value)); });
}
inline F mul(F a, F b) {
  F out;
  for (int i = 0; i < 4; i++) out.quarter[i] = _mm_mul_ps(a.quarter[i], b.quarter[i]);
  return out;
}
inline F neg(F a) {
  F out;
  for (int i = 0; i < 4; i++) out.quarter[i] = _mm_xor_ps(a.quarter[i], _mm_set1_ps(-0.0f));
  return out;
}
inline F to_float(V a) {
  F out;
  for (int i = 0; i < 4; i++) out.quarter[i] = _mm_cvtepi32_ps(a.quarter[i]);
  return out;
}

// IEEE binary16 in the low half of each dword; see half_to_float in scalar_math.h.
inline __m128 half_to_float4(__m128i half) {
  const __m128i sign = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x8000)), 16);
  const __m128i magnitude = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x7FFF)), 13);
  const __m128i special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x0F7FFFFF));
  const __m128 finite = _mm_mul_ps(_mm_castsi128_ps(magnitude), _mm_set1_ps(0x1p112f));
  const __m128i infinite = _mm_and_si128(special, _mm_or_si128(magnitude, _mm_set1_epi32(0x7F800000)));
  const __m128i bits = _mm_or_si128(_mm_andnot_si128(special, _mm_castps_si128(finite)), infinite);
  return _mm_castsi128_ps(_mm_or_si128(bits, sign));
}

inline F half_to_float16(V a) {
  F out;
  for (int i = 0; i < 4; i++) out.quarter[i] = half_to_float4(a.quarter[i]);
  return out;
}
inline void store(void* p, V a) {
  for (int i = 0; i < 4; i++) _mm_store_si128(static_cast<__m128i*>(p) + i, a.quarter[i]);
}
inline void store(float* p, F a) {
  for (int i = 0; i < 4; i++) _mm_store_ps(p + 4 * i, a.quarter[i]);
}

// The low 4 bits of each dword -> bit 4 of its 4 bytes.
inline V spread_bits(V a) {
  a = a & splat(15);
  return (shl(a, 4) | shl(a, 11) | shl(a, 18) | shl(a, 25)) & splat(0x10101010u);
}

inline int load_dword(const void* p) {
  int value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
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
  const auto load = [&](int row) { return _mm_cvtsi32_si128(load_dword(rows.at(row, offset))); };
  return each([&](int i) {
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(load(4 * i), load(4 * i + 1)),
                              _mm_unpacklo_epi32(load(4 * i + 2), load(4 * i + 3)));
  });
}

inline F load_halves(Rows& rows, int64_t offset) { return half_to_float16(load_dwords(rows, offset)); }

// 8 bytes of each row as two dwords.
inline void load_dword_pairs(Rows& rows, int64_t offset, V out[2]) {
  out[0] = load_dwords(rows, offset);
  out[1] = load_dwords(rows, offset + 4);
}

// 16 bytes of each row: out[g] holds dword g of the 16 rows.
inline void load_transposed(Rows& rows, int64_t offset, V out[4]) {
  for (int i = 0; i < 4; i++) {
    __m128i z[4];
    for (int r = 0; r < 4; r++) {
      z[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at(4 * i + r, offset)));
    }
    rows.prefetch_line();
    const __m128i t0 = _mm_unpacklo_epi32(z[0], z[1]);
    const __m128i t1 = _mm_unpackhi_epi32(z[0], z[1]);
    const __m128i t2 = _mm_unpacklo_epi32(z[2], z[3]);
    const __m128i t3 = _mm_unpackhi_epi32(z[2], z[3]);
    out[0].quarter[i] = _mm_unpacklo_epi64(t0, t2);
    out[1].quarter[i] = _mm_unpackhi_epi64(t0, t2);
    out[2].quarter[i] = _mm_unpacklo_epi64(t1, t3);
    out[3].quarter[i] = _mm_unpackhi_epi64(t1, t3);
  }
}

// Sums of neighbouring lanes of (a, b): four rows from two registers that hold two halves of each of two rows.
inline __m128i add_neighbours(__m128i a, __m128i b) {
  const __m128 even = _mm_shuffle_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b), _MM_SHUFFLE(2, 0, 2, 0));
  const __m128 odd = _mm_shuffle_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b), _MM_SHUFFLE(3, 1, 3, 1));
  return _mm_add_epi32(_mm_castps_si128(even), _mm_castps_si128(odd));
}

// The panel's rows 8 h ... 8 h + 7 times MR activation rows from row `i0` on.
template <class W, int MR>
inline void product_rows(const Panel& panel, int count, int64_t first, const TileArgs& args, int64_t i0, int h) {
  constexpr int kHalves = W::kHalves ? 2 : 1;
  const int64_t blocks = args.num_blocks;
  const int64_t k = blocks * kBlock;
  const int16_t* q = static_cast<const int16_t*>(args.x.q) + i0 * k + first * kBlock;
  const float* d = args.x.d + i0 * blocks + first;
  const float* sum = args.x.sum + i0 * blocks + first;
  const int32_t* correction = args.x.correction + 2 * (i0 * blocks + first);
  float* out = args.acc + i0 * args.acc_stride + 8 * h;
  const __m128i zero = _mm_setzero_si128();
  __m128 acc[MR][2];
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < 2; j++) {
      acc[i][j] = first == 0 ? _mm_setzero_ps() : _mm_loadu_ps(out + i * args.acc_stride + 4 * j);
    }
  }
  for (int b = 0; b < count; b++) {
    for (int part = 0; part < kHalves; part++) {
      __m128i dot[MR][4];
      for (auto& sums : dot) {
        for (auto& s : sums) s = zero;
      }
      for (int g = 0; g < 8 / kHalves; g++) {
        const int group = part * 4 + g;
        __m128i w[4];  // two rows each, 4 elements of 16 bits
        for (int j = 0; j < 2; j++) {
          const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(panel.q[b][group][8 * h + 4 * j]));
          w[2 * j] = _mm_unpacklo_epi8(bytes, zero);
          w[2 * j + 1] = _mm_unpackhi_epi8(bytes, zero);
        }
        for (int i = 0; i < MR; i++) {
          const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + i * k + b * kBlock + 4 * group));
          const __m128i x = _mm_unpacklo_epi64(four, four);
          for (int j = 0; j < 4; j++) dot[i][j] = _mm_add_epi32(dot[i][j], _mm_madd_epi16(w[j], x));
        }
      }
      for (int i = 0; i < MR; i++) {
        const __m128i start = _mm_set1_epi32(correction[2 * (i * blocks + b) + part]);
        const __m128 x_scale = _mm_set1_ps(d[i * blocks + b]);
        for (int j = 0; j < 2; j++) {
          const __m128i total = _mm_add_epi32(add_neighbours(dot[i][2 * j], dot[i][2 * j + 1]), start);
          const __m128 factor = _mm_mul_ps(_mm_load_ps(panel.d[b][part] + 8 * h + 4 * j), x_scale);
          acc[i][j] = _mm_add_ps(acc[i][j], _mm_mul_ps(factor, _mm_cvtepi32_ps(total)));
        }
      }
    }
    if (W::kMin) {
      for (int i = 0; i < MR; i++) {
        const __m128 x_sum = _mm_set1_ps(sum[i * blocks + b]);
        for (int j = 0; j < 2; j++) {
          acc[i][j] = _mm_add_ps(acc[i][j], _mm_mul_ps(_mm_load_ps(panel.m[b] + 8 * h + 4 * j), x_sum));
        }
      }
    }
  }
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < 2; j++) _mm_storeu_ps(out + i * args.acc_stride + 4 * j, acc[i][j]);
  }
}

template <class W>
void product(const Panel& panel, int count, int64_t first, const TileArgs& args) {
  for (int h = 0; h < 2; h++) {
    int64_t i = 0;
    for (; i + 2 <= args.m; i += 2) product_rows<W, 2>(panel, count, first, args, i, h);
    if (i < args.m) product_rows<W, 1>(panel, count, first, args, i, h);
  }
}

inline __m128i max_epi32(__m128i a, __m128i b) {
  const __m128i greater = _mm_cmpgt_epi32(a, b);
  return _mm_or_si128(_mm_and_si128(greater, a), _mm_andnot_si128(greater, b));
}

inline int sum_of_lanes(__m128i s) {
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(1, 0, 3, 2)));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(s);
}

// See matmul_scalar.cc for the definition.
void quantize(const float* x, int64_t k, void* q_out, float* d, float* sum, int32_t* sums) {
  auto* q = static_cast<int16_t*>(q_out);
  const __m128i mask = _mm_set1_epi32(0x7FFFFFFF);
  for (int64_t b = 0; b < k / kBlock; b++, x += kBlock, q += kBlock) {
    __m128i largest = _mm_setzero_si128();
    for (int i = 0; i < 8; i++) {
      largest = max_epi32(largest, _mm_and_si128(_mm_castps_si128(_mm_loadu_ps(x + 4 * i)), mask));
    }
    largest = max_epi32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(1, 0, 3, 2)));
    largest = max_epi32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(2, 3, 0, 1)));
    const int bits = _mm_cvtsi128_si32(largest);
    float amax;
    __builtin_memcpy(&amax, &bits, sizeof amax);
    const bool finite = bits < 0x7F800000;
    if (!finite || amax < 0x1p-112f) {
      d[b] = finite ? 0.0f : __builtin_nanf("");
      sum[b] = d[b];
      sums[2 * b] = sums[2 * b + 1] = 0;
      for (int i = 0; i < 4; i++) _mm_storeu_si128(reinterpret_cast<__m128i*>(q) + i, _mm_setzero_si128());
      continue;
    }
    const __m128 inverse = _mm_set1_ps(127.0f / amax);
    __m128i halves[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    for (int i = 0; i < 4; i++) {
      const __m128i n0 = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + 8 * i), inverse));
      const __m128i n1 = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + 8 * i + 4), inverse));
      halves[i / 2] = _mm_add_epi32(halves[i / 2], _mm_add_epi32(n0, n1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q) + i, _mm_packs_epi32(n0, n1));
    }
    sums[2 * b] = sum_of_lanes(halves[0]);
    sums[2 * b + 1] = sum_of_lanes(halves[1]);
    d[b] = amax / 127.0f;
    sum[b] = d[b] * static_cast<float>(sums[2 * b] + sums[2 * b + 1]);
  }
}

// Sum of 16 lanes held as four registers: lanes j and j + 8, then j + 4, j + 2, j + 1.
inline float reduce(const __m128 v[4]) {
  __m128 s = _mm_add_ps(_mm_add_ps(v[0], v[2]), _mm_add_ps(v[1], v[3]));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

template <int NR>
inline void float_block(const FloatTileArgs& args, int64_t i, int r0) {
  const float* w[NR];
  for (int r = 0; r < NR; r++) w[r] = args.weight + (r0 + r < args.n ? r0 + r : args.n - 1) * args.weight_stride;
  const float* x = args.x + i * args.x_stride;
  __m128 acc[NR][4];
  for (auto& sums : acc) {
    for (auto& s : sums) s = _mm_setzero_ps();
  }
  for (int64_t e = 0; e < args.k; e += 16) {
    for (int part = 0; part < 4; part++) {
      const __m128 xv = _mm_loadu_ps(x + e + 4 * part);
      for (int r = 0; r < NR; r++) {
        acc[r][part] = _mm_add_ps(acc[r][part], _mm_mul_ps(xv, _mm_loadu_ps(w[r] + e + 4 * part)));
      }
    }
  }
  for (int r = 0; r < NR && r0 + r < args.n; r++) args.acc[i * args.acc_stride + r0 + r] = reduce(acc[r]);
}

void float_tile(const FloatTileArgs& args) {
  for (int64_t i = 0; i < args.m; i++) {
    for (int r = 0; r < args.n; r += 2) float_block<2>(args, i, r);
  }
}

void convert_f16(const uint8_t* row, int64_t n, float* out) {
  const __m128i zero = _mm_setzero_si128();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
    _mm_storeu_ps(out + i, half_to_float4(_mm_unpacklo_epi16(half, zero)));
    _mm_storeu_ps(out + i + 4, half_to_float4(_mm_unpackhi_epi16(half, zero)));
  }
  for (; i < n; i++) {
    uint16_t half;
    __builtin_memcpy(&half, row + 2 * i, sizeof half);
    _mm_store_ss(out + i, half_to_float4(_mm_cvtsi32_si128(half)));
  }
}

void convert_bf16(const uint8_t* row, int64_t n, float* out) {
  const __m128i zero = _mm_setzero_si128();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
    _mm_storeu_ps(out + i, _mm_castsi128_ps(_mm_unpacklo_epi16(zero, v)));
    _mm_storeu_ps(out + i + 4, _mm_castsi128_ps(_mm_unpackhi_epi16(zero, v)));
  }
  for (; i < n; i++) {
    uint16_t value;
    __builtin_memcpy(&value, row + 2 * i, sizeof value);
    _mm_store_ss(out + i, _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(static_cast<uint32_t>(value) << 16))));
  }
}

}  // namespace

const MatMulKernels kMatMulBaseline = {
    .q_bytes = 2,
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

}  // namespace trivet
