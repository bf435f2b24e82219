// Matrix product with AVX2: vpmaddubsw multiplies pairs of elements to 16 bits.
#include "matmul_avx2.inl"

namespace trivet {
namespace {

// Sums stay in the order written: regrouped by the compiler, all products would be under way at once, in memory.
TRIVET_INLINE void keep(__m256i& v) { asm("" : "+x"(v)); }

// Dwords of 8 weight rows.
template <class W>
struct PairProducts {
  static constexpr bool kFullRange = W::kMax > 128;
  __m256i w;
  __m256i magnitude;  // of full-range bytes, which are signed here

  TRIVET_INLINE explicit PairProducts(__m256i stored) : w(stored) {
    if constexpr (kFullRange) {
      w = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
      magnitude = _mm256_abs_epi8(w);
    }
  }

  // Products of 4 elements of 8 rows, added in pairs. Two products of an unsigned byte up to 128 and a signed one fit
  // 16 bits, so full-range bytes go as |w| and x with w's sign.
  TRIVET_INLINE __m256i times(__m256i x) const {
    if constexpr (kFullRange) return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
    return _mm256_maddubs_epi16(w, x);
  }
};

// The sum as a number, the zero point taken off. Formats with minima have none, nor has the signed form of full-range
// bytes.
template <class W>
TRIVET_INLINE __m256 to_float(__m256i sum, int32_t correction) {
  if constexpr (W::kMin || W::kMax > 128) return _mm256_cvtepi32_ps(sum);
  return _mm256_cvtepi32_ps(_mm256_add_epi32(sum, _mm256_set1_epi32(correction)));
}

// Groups of 4 elements whose pair products add up in 16 bits: 2 * kMax * 127 * groups < 2^15.
template <class W>
constexpr int kRun = W::kMax <= 15   ? 8
                     : W::kMax <= 31 ? 4
                     : W::kMax <= 63 ? 2
                                     : 1;

// 4 rows have 8 registers of 16-bit sums of pair products, which leaves room for the weights and one broadcast. What
// does not add up over a whole block needs registers for 32-bit sums as well.
template <class W>
constexpr int kRegisterRows = kRun<W> == 8 ? 4 : 3;

template <class W, int MR>
TRIVET_INLINE void dot_products(const uint8_t (&q)[8][kTileRows][4], int first, const ActivationRows& x,
                                __m256 dot[MR][2]) {
  constexpr int kGroups = W::kHalves ? 4 : 8;
  constexpr int kStep = kRun<W> < kGroups ? kRun<W> : kGroups;
  __m256i pairs[MR][2];
  __m256i sums[MR][2];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; g++) {
    const auto* stored = reinterpret_cast<const __m256i*>(q[first + g]);
    const PairProducts<W> weights[2] = {PairProducts<W>(_mm256_load_si256(stored)),
                                        PairProducts<W>(_mm256_load_si256(stored + 1))};
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++) {
      const __m256i four = x.four(i, first + g);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256i products = weights[h].times(four);
        pairs[i][h] = g % kStep == 0 ? products : _mm256_add_epi16(pairs[i][h], products);
        keep(pairs[i][h]);
        if (g % kStep < kStep - 1) continue;
        const __m256i wide = _mm256_madd_epi16(pairs[i][h], _mm256_set1_epi16(1));
        sums[i][h] = g < kStep ? wide : _mm256_add_epi32(sums[i][h], wide);
        keep(sums[i][h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) dot[i][h] = to_float<W>(sums[i][h], x.correction(i, first));
  }
}

// 16-bit sums are by runs of groups that fit them.
template <class W>
struct RowDots {
  static constexpr bool kFullRange = W::kMax > 128;
  static constexpr int kRuns = 8 / kRun<W>;
  V sums[kFullRange ? 1 : kRuns];  // of full-range bytes 32-bit sums

  TRIVET_INLINE void add(int g, V w, __m256i four, const int32_t*) {
    V& run = sums[kFullRange ? 0 : g / kRun<W>];
    const bool opens = kFullRange ? g == 0 : g % kRun<W> == 0;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m256i products = PairProducts<W>(w.half[h]).times(four);
      if constexpr (kFullRange) {
        const __m256i wide = _mm256_madd_epi16(products, _mm256_set1_epi16(1));
        run.half[h] = opens ? wide : _mm256_add_epi32(run.half[h], wide);
      } else {
        run.half[h] = opens ? products : _mm256_add_epi16(run.half[h], products);
      }
    }
  }

  TRIVET_INLINE __m256 get(int part, int h, const int32_t* correction) const {
    if constexpr (kFullRange) return to_float<W>(sums[0].half[h], 0);
    constexpr int kParts = W::kHalves ? kRuns / 2 : kRuns;
    __m256i total = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i++) {
      const __m256i wide = _mm256_madd_epi16(sums[part * kParts + i].half[h], _mm256_set1_epi16(1));
      total = i == 0 ? wide : _mm256_add_epi32(total, wide);
    }
    return to_float<W>(total, correction[part]);
  }
};

}  // namespace
}  // namespace trivet

#include "matmul_avx2_rows.inl"

namespace trivet {

const MatMulKernels kMatMulAvx2 = kMatMulKernels;

}  // namespace trivet
