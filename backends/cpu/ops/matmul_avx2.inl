// What AVX2 and AVX-VNNI share of the matrix product: two registers are 16 weight rows; activations are kept as 8-bit
// integers. The including file defines after it how elements are multiplied, and includes matmul_avx2_rows.inl.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "matmul_kernels.h"

namespace trivet {
namespace {

constexpr int kVectorFloats = 8;
constexpr int kUnroll = 8;

struct V {
  __m256i half[2];
};

struct F {
  __m256 half[2];
};

template <class Function>
inline V each(V a, Function f) {
  return {{f(a.half[0]), f(a.half[1])}};
}

inline V operator&(V a, V b) {
  return {{_mm256_and_si256(a.half[0], b.half[0]), _mm256_and_si256(a.half[1], b.half[1])}};
}
inline V operator|(V a, V b) {
  return {{_mm256_or_si256(a.half[0], b.half[0]), _mm256_or_si256(a.half[1], b.half[1])}};
}
inline V operator^(V a, V b) {
  return {{_mm256_xor_si256(a.half[0], b.half[0]), _mm256_xor_si256(a.half[1], b.half[1])}};
}
inline V shl(V a, int bits) {
  return each(a, [=](__m256i v) { return _mm256_slli_epi32(v, bits); });
}
inline V shr(V a, int bits) {
  return each(a, [=](__m256i v) { return _mm256_srli_epi32(v, bits); });
}
inline V sra(V a, int bits) {
  return each(a, [=](__m256i v) { return _mm256_srai_epi32(v, bits); });
}
inline V splat(uint32_t value) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(value));
  return {{v, v}};
}
inline F mul(F a, F b) { return {{_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])}}; }
inline F neg(F a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {{_mm256_xor_ps(a.half[0], sign), _mm256_xor_ps(a.half[1], sign)}};
}
inline F to_float(V a) { return {{_mm256_cvtepi32_ps(a.half[0]), _mm256_cvtepi32_ps(a.half[1])}}; }
inline F half_to_float16(V a) {
  const V low = a & splat(0xFFFFu);
  const __m256i packed =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(low.half[0], low.half[1]), _MM_SHUFFLE(3, 1, 2, 0));
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))}};
}
inline void store(void* p, V a) {
  _mm256_store_si256(static_cast<__m256i*>(p), a.half[0]);
  _mm256_store_si256(static_cast<__m256i*>(p) + 1, a.half[1]);
}
inline void store(float* p, F a) {
  _mm256_store_ps(p, a.half[0]);
  _mm256_store_ps(p + 8, a.half[1]);
}

// The low 4 bits of each dword -> bit 4 of its 4 bytes.
inline V spread_bits(V a) {
  const __m256i table =
      _mm256_setr_epi32(0x00000000, 0x00000010, 0x00001000, 0x00001010, 0x00100000, 0x00100010, 0x00101000, 0x00101010);
  const __m256i top = _mm256_set1_epi32(0x10000000);
  return each(a, [=](__m256i v) {
    return _mm256_or_si256(_mm256_permutevar8x32_epi32(table, v), _mm256_and_si256(_mm256_slli_epi32(v, 25), top));
  });
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
  const auto eight = [&](int r) {
    __m128i part[2];
    for (int i = 0; i < 2; i++) {
      part[i] = _mm_cvtsi32_si128(load_dword(rows.at(r + 4 * i, offset)));
      part[i] = _mm_insert_epi32(part[i], load_dword(rows.at(r + 4 * i + 1, offset)), 1);
      part[i] = _mm_insert_epi32(part[i], load_dword(rows.at(r + 4 * i + 2, offset)), 2);
      part[i] = _mm_insert_epi32(part[i], load_dword(rows.at(r + 4 * i + 3, offset)), 3);
    }
    return _mm256_inserti128_si256(_mm256_castsi128_si256(part[0]), part[1], 1);
  };
  return {{eight(0), eight(8)}};
}

// The binary16 number at `offset` of each row.
inline F load_halves(Rows& rows, int64_t offset) {
  const auto load = [&](int row) {
    uint16_t half;
    __builtin_memcpy(&half, rows.at(row, offset), sizeof half);
    return half;
  };
  F out;
  for (int i = 0; i < 2; i++) {
    __m128i part = _mm_cvtsi32_si128(load(8 * i));
    part = _mm_insert_epi16(part, load(8 * i + 1), 1);
    part = _mm_insert_epi16(part, load(8 * i + 2), 2);
    part = _mm_insert_epi16(part, load(8 * i + 3), 3);
    part = _mm_insert_epi16(part, load(8 * i + 4), 4);
    part = _mm_insert_epi16(part, load(8 * i + 5), 5);
    part = _mm_insert_epi16(part, load(8 * i + 6), 6);
    part = _mm_insert_epi16(part, load(8 * i + 7), 7);
    out.half[i] = _mm256_cvtph_ps(part);
  }
  rows.prefetch_line();
  return out;
}

// 8 bytes of each row as two dwords.
inline void load_dword_pairs(Rows& rows, int64_t offset, V out[2]) {
  const auto load = [&](int row) {  // of two rows
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows.at(row, offset)));
    return _mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(rows.at(row + 1, offset)));
  };
  for (int h = 0; h < 2; h++) {
    const __m256 even = _mm256_insertf128_ps(_mm256_castps128_ps256(load(8 * h)), load(8 * h + 4), 1);
    const __m256 odd = _mm256_insertf128_ps(_mm256_castps128_ps256(load(8 * h + 2)), load(8 * h + 6), 1);
    out[0].half[h] = _mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0x88));
    out[1].half[h] = _mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0xDD));
    rows.prefetch_line();
  }
}

// 16 bytes of each row: out[g] holds dword g of the 16 rows.
inline void load_transposed(Rows& rows, int64_t offset, V out[4]) {
  for (int h = 0; h < 2; h++) {
    const auto load = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at(8 * h + row, offset)));
    };
    __m256i z[4];
    for (int i = 0; i < 4; i++) {  // 128-bit lane L of z[i]: row 4 L + i
      z[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(4 + i), 1);
      if (i % 2 == 1) rows.prefetch_line();
    }
    const __m256i t0 = _mm256_unpacklo_epi32(z[0], z[1]);
    const __m256i t1 = _mm256_unpackhi_epi32(z[0], z[1]);
    const __m256i t2 = _mm256_unpacklo_epi32(z[2], z[3]);
    const __m256i t3 = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0].half[h] = _mm256_unpacklo_epi64(t0, t2);
    out[1].half[h] = _mm256_unpackhi_epi64(t0, t2);
    out[2].half[h] = _mm256_unpacklo_epi64(t1, t3);
    out[3].half[h] = _mm256_unpackhi_epi64(t1, t3);
  }
}

inline int max_of_lanes(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(m);
}

inline int sum_of_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(1, 0, 3, 2)));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(s);
}

// See matmul_scalar.cc for the definition.
void quantize(const float* x, int64_t k, void* q_out, float* d, float* sum, int32_t* sums) {
  auto* q = static_cast<int8_t*>(q_out);
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  for (int64_t b = 0; b < k / kBlock; b++, x += kBlock, q += kBlock) {
    __m256 v[4];
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
      v[i] = _mm256_loadu_ps(x + 8 * i);
      largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), mask));
    }
    const int bits = max_of_lanes(largest);
    float amax;
    __builtin_memcpy(&amax, &bits, sizeof amax);
    const bool finite = bits < 0x7F800000;
    if (!finite || amax < 0x1p-112f) {
      d[b] = finite ? 0.0f : __builtin_nanf("");
      sum[b] = d[b];
      sums[2 * b] = sums[2 * b + 1] = 0;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i n[4];
    for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    sums[2 * b] = sum_of_lanes(_mm256_add_epi32(n[0], n[1]));
    sums[2 * b + 1] = sum_of_lanes(_mm256_add_epi32(n[2], n[3]));
    // Packing works per 128-bit lane: dwords come out as 0 2 4 6 1 3 5 7.
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q),
                        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    d[b] = amax / 127.0f;
    sum[b] = d[b] * static_cast<float>(sums[2 * b] + sums[2 * b + 1]);
  }
}

// Sum of 16 lanes held as (0..7, 8..15): lanes j and j + 8, then j + 4, j + 2, j + 1.
inline float reduce(const __m256 v[2]) {
  const __m256 half = _mm256_add_ps(v[0], v[1]);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

template <int MR, int NR>
inline void float_block(const FloatTileArgs& args, int64_t i0, int r0) {
  const float* w[NR];
  for (int r = 0; r < NR; r++) w[r] = args.weight + (r0 + r < args.n ? r0 + r : args.n - 1) * args.weight_stride;
  const float* x = args.x + i0 * args.x_stride;
  __m256 acc[MR][NR][2];
  for (auto& row : acc) {
    for (auto& sums : row) sums[0] = sums[1] = _mm256_setzero_ps();
  }
  for (int64_t e = 0; e < args.k; e += 16) {
    for (int part = 0; part < 2; part++) {
      __m256 wv[NR];
      for (int r = 0; r < NR; r++) wv[r] = _mm256_loadu_ps(w[r] + e + 8 * part);
      for (int i = 0; i < MR; i++) {
        const __m256 xv = _mm256_loadu_ps(x + i * args.x_stride + e + 8 * part);
        for (int r = 0; r < NR; r++) acc[i][r][part] = _mm256_fmadd_ps(xv, wv[r], acc[i][r][part]);
      }
    }
  }
  for (int i = 0; i < MR; i++) {
    for (int r = 0; r < NR && r0 + r < args.n; r++) {
      args.acc[(i0 + i) * args.acc_stride + r0 + r] = reduce(acc[i][r]);
    }
  }
}

void float_tile(const FloatTileArgs& args) {
  for (int r = 0; r < args.n; r += 3) {
    int64_t i = 0;
    for (; i + 2 <= args.m; i += 2) float_block<2, 3>(args, i, r);
    if (i < args.m) float_block<1, 3>(args, i, r);
  }
}

void convert_f16(const uint8_t* row, int64_t n, float* out) {
  const auto widen = [](const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, widen(row + 2 * i));
  if (i < n) {
    uint8_t rest[16] = {};
    float values[8];
    __builtin_memcpy(rest, row + 2 * i, static_cast<size_t>(2 * (n - i)));
    _mm256_storeu_ps(values, widen(rest));
    __builtin_memcpy(out + i, values, static_cast<size_t>(4 * (n - i)));
  }
}

void convert_bf16(const uint8_t* row, int64_t n, float* out) {
  const auto widen = [](const void* p) {
    const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, widen(row + 2 * i));
  if (i < n) {
    uint8_t rest[16] = {};
    float values[8];
    __builtin_memcpy(rest, row + 2 * i, static_cast<size_t>(2 * (n - i)));
    _mm256_storeu_ps(values, widen(rest));
    __builtin_memcpy(out + i, values, static_cast<size_t>(4 * (n - i)));
  }
}

// A 32-block of activation rows.
struct ActivationRows {
  const int8_t* q;
  const int32_t* corrections;  // see QuantizedRows
  int64_t blocks;              // of a row

  // Elements 4 g ... 4 g + 3 of row i.
  TRIVET_INLINE __m256i four(int i, int g) const {
    return _mm256_set1_epi32(load_dword(q + i * blocks * kBlock + 4 * g));
  }
  TRIVET_INLINE int32_t correction(int i, int g) const { return corrections[2 * i * blocks + g / 4]; }
};

}  // namespace
}  // namespace trivet
