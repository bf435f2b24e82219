// Matrix product with AVX-512 VNNI: a register is 16 weight rows, vpdpbusd multiplies 4 elements of each.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "matmul_kernels.h"

namespace trivet {
namespace {

constexpr int kVectorFloats = 16;
constexpr int kUnroll = 8;

struct V {
  __m512i v;
};

struct F {
  __m512 v;
};

inline V operator&(V a, V b) { return {_mm512_and_si512(a.v, b.v)}; }
inline V operator|(V a, V b) { return {_mm512_or_si512(a.v, b.v)}; }
inline V operator^(V a, V b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline V shl(V a, int bits) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(bits))}; }
inline V shr(V a, int bits) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(bits))}; }
inline V sra(V a, int bits) { return {_mm512_srai_epi32(a.v, static_cast<unsigned>(bits))}; }
inline V splat(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F neg(F a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
inline F to_float(V a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F half_to_float16(V a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
inline void store(void* p, V a) { _mm512_store_si512(p, a.v); }
inline void store(float* p, F a) { _mm512_store_ps(p, a.v); }

// The low 4 bits of each dword -> bit 4 of its 4 bytes.
inline V spread_bits(V a) {
  const __m512i table =
      _mm512_setr_epi32(0x00000000, 0x00000010, 0x00001000, 0x00001010, 0x00100000, 0x00100010, 0x00101000, 0x00101010,
                        0x10000000, 0x10000010, 0x10001000, 0x10001010, 0x10100000, 0x10100010, 0x10101000, 0x10101010);
  return {_mm512_permutexvar_epi32(a.v, table)};
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

}  // namespace
}  // namespace trivet

#include "matmul_glu.inl"
#include "matmul_tile.inl"

namespace trivet {
namespace {

TRIVET_INLINE __m512i join(__m128i a, __m128i b, __m128i c, __m128i d) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

TRIVET_INLINE V load_dwords(Rows& rows, int64_t offset) {
  rows.prefetch_line();
  __m128i part[4];
  for (int i = 0; i < 4; i++) {
    part[i] = _mm_cvtsi32_si128(load_dword(rows.at(4 * i, offset)));
    part[i] = _mm_insert_epi32(part[i], load_dword(rows.at(4 * i + 1, offset)), 1);
    part[i] = _mm_insert_epi32(part[i], load_dword(rows.at(4 * i + 2, offset)), 2);
    part[i] = _mm_insert_epi32(part[i], load_dword(rows.at(4 * i + 3, offset)), 3);
  }
  return {join(part[0], part[1], part[2], part[3])};
}

// The binary16 number at `offset` of each row.
TRIVET_INLINE F load_halves(Rows& rows, int64_t offset) {
  const auto load = [&](int row) {
    uint16_t half;
    __builtin_memcpy(&half, rows.at(row, offset), sizeof half);
    return half;
  };
  __m128i part[2];
  for (int i = 0; i < 2; i++) {
    part[i] = _mm_cvtsi32_si128(load(8 * i));
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 1), 1);
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 2), 2);
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 3), 3);
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 4), 4);
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 5), 5);
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 6), 6);
    part[i] = _mm_insert_epi16(part[i], load(8 * i + 7), 7);
  }
  rows.prefetch_line();
  return {_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(part[0]), part[1], 1))};
}

// 8 bytes of each row as two dwords.
TRIVET_INLINE void load_dword_pairs(Rows& rows, int64_t offset, V out[2]) {
  const auto load = [&](int row) {  // of two rows
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows.at(row, offset)));
    return _mm_castps_si128(
        _mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(rows.at(row + 1, offset))));
  };
  const __m512 even = _mm512_castsi512_ps(join(load(0), load(4), load(8), load(12)));
  rows.prefetch_line();
  const __m512 odd = _mm512_castsi512_ps(join(load(2), load(6), load(10), load(14)));
  rows.prefetch_line();
  out[0].v = _mm512_castps_si512(_mm512_shuffle_ps(even, odd, 0x88));
  out[1].v = _mm512_castps_si512(_mm512_shuffle_ps(even, odd, 0xDD));
}

// 16 bytes of each row: out[g] holds dword g of the 16 rows.
TRIVET_INLINE void load_transposed(Rows& rows, int64_t offset, V out[4]) {
  const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at(row, offset))); };
  __m512i z[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // 128-bit lane L of z[i]: row 4 L + i
    // Inserts into 256 bits first: they cost half.
    z[i] = join(load(i), load(4 + i), load(8 + i), load(12 + i));
    rows.prefetch_line();
  }
  const __m512i t0 = _mm512_unpacklo_epi32(z[0], z[1]);
  const __m512i t1 = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i t2 = _mm512_unpacklo_epi32(z[2], z[3]);
  const __m512i t3 = _mm512_unpackhi_epi32(z[2], z[3]);
  out[0].v = _mm512_unpacklo_epi64(t0, t2);
  out[1].v = _mm512_unpackhi_epi64(t0, t2);
  out[2].v = _mm512_unpacklo_epi64(t1, t3);
  out[3].v = _mm512_unpackhi_epi64(t1, t3);
}

// Multiplies the only activation row with what is unpacked, straight from the registers.
template <class W>
struct RowSink {
  const int8_t* q;
  const float* d;
  const float* sum;
  const int32_t* correction;
  __m512 acc = _mm512_setzero_ps();
  __m512i dot[8][2];  // by 32-block and half

  explicit RowSink(const QuantizedRows& x)
      : q(static_cast<const int8_t*>(x.q)), d(x.d), sum(x.sum), correction(x.correction) {}

  TRIVET_INLINE void group(int block, int g, V v) {
    const int which = W::kHalves ? g / 4 : 0;
    const bool opens = W::kHalves ? g % 4 == 0 : g == 0;
    __m512i& sums = dot[block][which];
    if (opens) sums = _mm512_set1_epi32(correction[2 * block + which]);
    sums = _mm512_dpbusd_epi32(sums, v.v, _mm512_set1_epi32(load_dword(q + block * kBlock + 4 * g)));
  }

  TRIVET_INLINE void scales(int block, const Scales& scales) {
#pragma GCC unroll 2
    for (int h = 0; h < (W::kHalves ? 2 : 1); h++) {
      const __m512 factor = _mm512_mul_ps(scales.d[h].v, _mm512_set1_ps(d[block]));
      acc = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot[block][h]), acc);
    }
    if constexpr (W::kMin) {
      acc = _mm512_fmadd_ps(scales.minimum.v, _mm512_set1_ps(sum[block]), acc);
    }
  }

  TRIVET_INLINE void advance(int count) {
    q += count * kBlock;
    d += count;
    sum += count;
    correction += 2 * count;
  }
};

// More rows are packed.
static_assert(kMinPackedRows == 2);
template <class W, bool kIntoL1>
void one_row_fetching(const TileArgs& args) {
  RowSink<W> sink(args.x);
  Rows rows(args);
  rows.into_l1 = kIntoL1;  // a constant: a branch for every line costs up to 6 % of a product whose weights are cached
  unpack_blocks<W>(rows, args.num_blocks, sink);
  _mm512_storeu_ps(args.acc, sink.acc);
}

template <class W>
void one_row(const TileArgs& args) {
  (args.into_l1 ? one_row_fetching<W, true> : one_row_fetching<W, false>)(args);
}

}  // namespace
}  // namespace trivet

#include "matmul_avx512_vnni_packed.inl"
#include "matmul_avx512_vnni_quantize.inl"

namespace trivet {
namespace {

// Lanes j and j + 8, then j + 4, j + 2, j + 1 of four accumulators: four sums.
inline __m128 reduce4(const __m512 v[4]) {
  __m128 s[4];
  for (int i = 0; i < 4; i++) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
    s[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
  return _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3]));
}

template <int MR>
inline void float_rows(const FloatTileArgs& args, int64_t i0) {
  for (int r0 = 0; r0 < args.n; r0 += 4) {
    const float* w[4];
    for (int r = 0; r < 4; r++) w[r] = args.weight + (r0 + r < args.n ? r0 + r : args.n - 1) * args.weight_stride;
    const float* x = args.x + i0 * args.x_stride;
    __m512 acc[MR][4];
    for (int i = 0; i < MR; i++) {
      for (int r = 0; r < 4; r++) acc[i][r] = _mm512_setzero_ps();
    }
    for (int64_t e = 0; e < args.k; e += 16) {
      __m512 wv[4];
      for (int r = 0; r < 4; r++) wv[r] = _mm512_loadu_ps(w[r] + e);
      for (int i = 0; i < MR; i++) {
        const __m512 xv = _mm512_loadu_ps(x + i * args.x_stride + e);
        for (int r = 0; r < 4; r++) acc[i][r] = _mm512_fmadd_ps(xv, wv[r], acc[i][r]);
      }
    }
    for (int i = 0; i < MR; i++) {
      float sums[4];
      _mm_storeu_ps(sums, reduce4(acc[i]));
      for (int r = 0; r < 4 && r0 + r < args.n; r++) args.acc[(i0 + i) * args.acc_stride + r0 + r] = sums[r];
    }
  }
}

void float_tile(const FloatTileArgs& args) {
  int64_t i = 0;
  for (; i + 4 <= args.m; i += 4) float_rows<4>(args, i);
  for (; i < args.m; i++) float_rows<1>(args, i);
}

void convert_f16(const uint8_t* row, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i));
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half));
  }
  const auto rest = static_cast<__mmask16>((1u << (n - i)) - 1);
  _mm512_mask_storeu_ps(out + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, row + 2 * i)));
}

void convert_bf16(const uint8_t* row, int64_t n, float* out) {
  const auto widen = [](__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(out + i, widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i))));
  }
  const auto rest = static_cast<__mmask16>((1u << (n - i)) - 1);
  _mm512_mask_storeu_ps(out + i, rest, widen(_mm256_maskz_loadu_epi16(rest, row + 2 * i)));
}

}  // namespace

const MatMulKernels kMatMulAvx512Vnni = {
    .q_bytes = 1,
    .quantize = quantize,
    .tile = TRIVET_BY_FORMAT(one_row),
    .pack = pack,
    .packed_tiles = TRIVET_BY_FORMAT(packed_tiles),
    .float_tile = float_tile,
    .convert_f16 = convert_f16,
    .convert_bf16 = convert_bf16,
    .glu = glu,
    .soft_cap = soft_cap,
};

}  // namespace trivet
