// Matrix product with AVX-VNNI: vpdpbusd multiplies 4 elements of 8 rows and adds them up in 32 bits.
#include "matmul_avx2.inl"

// vpdpbusd as AVX-VNNI encodes it, by its bytes: releases are compiled with the compiler and the assembler of Debian
// 11, which know its AVX-512 form only.
asm(R"(
.macro trivet_vpdpbusd sums, w, x
  .set trivet_sums, -1
  .set trivet_w, -1
  .set trivet_x, -1
  .irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    .ifc \sums, %ymm\number
      .set trivet_sums, \number
    .endif
    .ifc \w, %ymm\number
      .set trivet_w, \number
    .endif
    .ifc \x, %ymm\number
      .set trivet_x, \number
    .endif
  .endr
  .if trivet_sums < 0 || trivet_w < 0 || trivet_x < 0
    .error "trivet_vpdpbusd: expected registers from ymm0 to ymm15"
  .endif
  .byte 0xC4, 0xE2 - (trivet_sums >> 3 << 7) - (trivet_x >> 3 << 5), 0x7D - (trivet_w << 3), 0x50
  .byte 0xC0 + ((trivet_sums & 7) << 3) + (trivet_x & 7)
.endm
)");

namespace trivet {
namespace {

// Adds the products of 4 unsigned elements of 8 rows and 4 signed ones to 32-bit sums.
TRIVET_INLINE void multiply_add(__m256i& sums, __m256i w, __m256i x) {
  asm("trivet_vpdpbusd %0, %1, %2" : "+x"(sums) : "x"(w), "x"(x));
}

// 8 registers of sums, two of weights, a broadcast and two constants: what belongs to whole blocks waits in memory.
template <class W>
constexpr int kRegisterRows = 4;

// The float 1.5 * 2^23 + n has the bits kStart + n for all sums n of a block. So sums that begin there become floats by
// a subtraction, and leave the ports that multiply, which a conversion would take, to the products.
constexpr int32_t kStart = 0x4B400000;
constexpr float kStartFloat = 0x1.8p23f;
static_assert(kBlock * 255 * 127 < 1 << 22);

// Formats with minima have no zero point.
template <class W>
TRIVET_INLINE __m256i start_sums(int32_t correction) {
  const __m256i start = _mm256_set1_epi32(kStart);
  return W::kMin ? start : _mm256_add_epi32(_mm256_set1_epi32(correction), start);
}

TRIVET_INLINE __m256 to_float(__m256i sums) {
  return _mm256_sub_ps(_mm256_castsi256_ps(sums), _mm256_set1_ps(kStartFloat));
}

template <class W, int MR>
TRIVET_INLINE void dot_products(const uint8_t (&q)[8][kTileRows][4], int first, const ActivationRows& x,
                                __m256 dot[MR][2]) {
  constexpr int kGroups = W::kHalves ? 4 : 8;
  __m256i sums[MR][2];
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++) sums[i][0] = sums[i][1] = start_sums<W>(x.correction(i, first));
#pragma GCC unroll 8
  for (int g = first; g < first + kGroups; g++) {
    const auto* stored = reinterpret_cast<const __m256i*>(q[g]);
    const __m256i w[2] = {_mm256_load_si256(stored), _mm256_load_si256(stored + 1)};
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++) {
      const __m256i four = x.four(i, g);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) multiply_add(sums[i][h], w[h], four);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) dot[i][h] = to_float(sums[i][h]);
  }
}

template <class W>
struct RowDots {
  V sums[W::kHalves ? 2 : 1];

  TRIVET_INLINE void add(int g, V w, __m256i four, const int32_t* correction) {
    const int part = W::kHalves ? g / 4 : 0;
    V& of_part = sums[part];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      if (g == 4 * part) of_part.half[h] = start_sums<W>(correction[part]);
      multiply_add(of_part.half[h], w.half[h], four);
    }
  }

  TRIVET_INLINE __m256 get(int part, int h, const int32_t*) const { return to_float(sums[part].half[h]); }
};

}  // namespace
}  // namespace trivet

#include "matmul_avx2_rows.inl"

namespace trivet {

const MatMulKernels kMatMulAvxVnni = kMatMulKernels;

}  // namespace trivet
