// Weights times activation rows with AVX2; included by matmul_avx2.cc.
//
// One row is multiplied with what is unpacked, straight from the registers. More take panels: a register tile is up to
// 4 activation rows times all 16 weight rows: 8 registers of 16-bit sums of pair products, which leaves room for the
// weights and one broadcast. What belongs to whole blocks waits in memory meanwhile.

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

// Groups of 4 elements whose pair products add up in 16 bits: 2 * kMax * 127 * groups < 2^15.
template <class W>
constexpr int kRun = W::kMax <= 15   ? 8
                     : W::kMax <= 31 ? 4
                     : W::kMax <= 63 ? 2
                                     : 1;

// What does not add up over a whole block needs registers for 32-bit sums as well.
template <class W>
constexpr int kRegisterRows = kRun<W> == 8 ? 4 : 3;

// dot[i][h]: the groups from `first` on (half a block's with halves, else all) times MR rows, one every `stride` bytes.
template <class W, int MR>
TRIVET_INLINE void dot_products(const uint8_t (&q)[8][kTileRows][4], int first, const int8_t* x, int64_t stride,
                                __m256i dot[MR][2]) {
  constexpr int kGroups = W::kHalves ? 4 : 8;
  constexpr int kStep = kRun<W> < kGroups ? kRun<W> : kGroups;
  __m256i pairs[MR][2];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; g++) {
    const auto* stored = reinterpret_cast<const __m256i*>(q[first + g]);
    const PairProducts<W> weights[2] = {PairProducts<W>(_mm256_load_si256(stored)),
                                        PairProducts<W>(_mm256_load_si256(stored + 1))};
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++) {
      const __m256i four = _mm256_set1_epi32(load_dword(x + i * stride + 4 * (first + g)));
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256i products = weights[h].times(four);
        pairs[i][h] = g % kStep == 0 ? products : _mm256_add_epi16(pairs[i][h], products);
        keep(pairs[i][h]);
        if (g % kStep < kStep - 1) continue;
        const __m256i sums = _mm256_madd_epi16(pairs[i][h], _mm256_set1_epi16(1));
        dot[i][h] = g < kStep ? sums : _mm256_add_epi32(dot[i][h], sums);
        keep(dot[i][h]);
      }
    }
  }
}

// The panel times MR activation rows from row `i0` on; fetches those that follow, which lie too far apart for the
// hardware to see them coming.
template <class W, int MR>
void product_rows(const Panel& panel, int count, int64_t first, const TileArgs& args, int64_t i0) {
  const int64_t blocks = args.num_blocks;
  const int64_t k = blocks * kBlock;
  const int8_t* q = static_cast<const int8_t*>(args.x.q) + i0 * k + first * kBlock;
  const float* d = args.x.d + i0 * blocks + first;
  const float* sum = args.x.sum + i0 * blocks + first;
  const int32_t* correction = args.x.correction + 2 * (i0 * blocks + first);
  float* out = args.acc + i0 * args.acc_stride;
  __m256 acc[MR][2];
  for (int i = 0; i < MR; i++) {
    __builtin_prefetch(out + (MR + i) * args.acc_stride, 1, 3);
    for (int h = 0; h < 2; h++) {
      acc[i][h] = first == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(out + i * args.acc_stride + 8 * h);
    }
  }
  for (int b = 0; b < count; b++) {
    if (b % 2 == 0) {
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) __builtin_prefetch(q + (MR + i) * k + b * kBlock, 0, 3);
    }
#pragma GCC unroll 2
    for (int part = 0; part < (W::kHalves ? 2 : 1); part++) {
      __m256i dot[MR][2];
      dot_products<W, MR>(panel.q[b], 4 * part, q + b * kBlock, k, dot);
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) {
        const __m256 scale = _mm256_set1_ps(d[i * blocks + b]);
        const __m256i zero = _mm256_set1_epi32(correction[2 * (i * blocks + b) + part]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          const __m256 factor = _mm256_mul_ps(_mm256_load_ps(panel.d[b][part] + 8 * h), scale);
          // Formats with minima have no zero point, nor has the signed form of full-range bytes.
          const __m256i whole = W::kMin || W::kMax > 128 ? dot[i][h] : _mm256_add_epi32(dot[i][h], zero);
          acc[i][h] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(whole), acc[i][h]);
        }
      }
    }
    if constexpr (W::kMin) {
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) {
        const __m256 scale = _mm256_set1_ps(sum[i * blocks + b]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          acc[i][h] = _mm256_fmadd_ps(_mm256_load_ps(panel.m[b] + 8 * h), scale, acc[i][h]);
        }
      }
    }
  }
  for (int i = 0; i < MR; i++) {
    for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + i * args.acc_stride + 8 * h, acc[i][h]);
  }
}

template <class W>
void product(const Panel& panel, int count, int64_t first, const TileArgs& args) {
  int64_t i = 0;
  for (; i + kRegisterRows<W> <= args.m; i += kRegisterRows<W>) {
    product_rows<W, kRegisterRows<W>>(panel, count, first, args, i);
  }
  for (; i + 2 <= args.m; i += 2) product_rows<W, 2>(panel, count, first, args, i);
  if (i < args.m) product_rows<W, 1>(panel, count, first, args, i);
}

// Multiplies the only activation row with what is unpacked, straight from the registers. 16-bit sums are by runs of
// k-groups that fit them.
template <class W>
struct RowSink {
  static constexpr bool kFullRange = W::kMax > 128;
  static constexpr int kRuns = 8 / kRun<W>;
  const int8_t* q;
  const float* d;
  const float* sum;
  const int32_t* correction;
  __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  V pairs[8][kFullRange ? 1 : kRuns];  // by 32-block and run; of full-range bytes 32-bit sums

  explicit RowSink(const QuantizedRows& x)
      : q(static_cast<const int8_t*>(x.q)), d(x.d), sum(x.sum), correction(x.correction) {}

  TRIVET_INLINE void group(int block, int g, V v) {
    const __m256i four = _mm256_set1_epi32(load_dword(q + block * kBlock + 4 * g));
    V& sums = pairs[block][kFullRange ? 0 : g / kRun<W>];
    const bool opens = kFullRange ? g == 0 : g % kRun<W> == 0;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m256i products = PairProducts<W>(v.half[h]).times(four);
      if constexpr (kFullRange) {
        const __m256i wide = _mm256_madd_epi16(products, _mm256_set1_epi16(1));
        sums.half[h] = opens ? wide : _mm256_add_epi32(sums.half[h], wide);
      } else {
        sums.half[h] = opens ? products : _mm256_add_epi16(sums.half[h], products);
      }
    }
  }

  // The sums of elements 0-15 or 16-31, or of all.
  TRIVET_INLINE __m256i dot(int block, int part, int h) const {
    if constexpr (kFullRange) return pairs[block][0].half[h];
    constexpr int kParts = kFullRange ? 1 : W::kHalves ? kRuns / 2 : kRuns;
    __m256i total = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i++) {
      const __m256i run = pairs[block][part * kParts + i].half[h];
      const __m256i wide = _mm256_madd_epi16(run, _mm256_set1_epi16(1));
      total = i == 0 ? wide : _mm256_add_epi32(total, wide);
    }
    if constexpr (W::kMin) return total;  // no zero point
    return _mm256_add_epi32(total, _mm256_set1_epi32(correction[2 * block + part]));
  }

  TRIVET_INLINE void scales(int block, const Scales& scales) {
#pragma GCC unroll 2
    for (int part = 0; part < (W::kHalves ? 2 : 1); part++) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256 factor = _mm256_mul_ps(scales.d[part].half[h], _mm256_set1_ps(d[block]));
        acc[h] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(dot(block, part, h)), acc[h]);
      }
    }
    if constexpr (W::kMin) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        acc[h] = _mm256_fmadd_ps(scales.minimum.half[h], _mm256_set1_ps(sum[block]), acc[h]);
      }
    }
  }

  TRIVET_INLINE void advance(int count) {
    q += count * kBlock;
    d += count;
    sum += count;
    correction += 2 * count;
  }
};

template <class W>
void row_or_tile(const TileArgs& args) {
  if (args.m > 1) return tile<W>(args);
  RowSink<W> sink(args.x);
  Rows rows(args);
  unpack_blocks<W>(rows, args.num_blocks, sink);
  for (int h = 0; h < 2; h++) _mm256_storeu_ps(args.acc + 8 * h, sink.acc[h]);
}

}  // namespace
}  // namespace trivet
