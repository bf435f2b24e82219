// Weights times activation rows with AVX2 and AVX-VNNI. The including file defines before it
//
//   kRegisterRows<W>     most activation rows that are multiplied together
//   dot_products<W, MR>  dot[i][h]: the groups of a panel's block from `first` on (half of them with halves, else all)
//                        times row i, as floats of 8 weight rows, the zero point taken off
//   RowDots<W>           the same of one row and a whole block; add() takes a group as it is unpacked, get() gives
//                        a part
//
// One row is multiplied with what is unpacked, straight from the registers. More take panels.

namespace trivet {
namespace {

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
      __m256 dot[MR][2];
      dot_products<W, MR>(panel.q[b], 4 * part, {q + b * kBlock, correction + 2 * b, blocks}, dot);
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) {
        const __m256 scale = _mm256_set1_ps(d[i * blocks + b]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          const __m256 factor = _mm256_mul_ps(_mm256_load_ps(panel.d[b][part] + 8 * h), scale);
          acc[i][h] = _mm256_fmadd_ps(factor, dot[i][h], acc[i][h]);
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

// Multiplies the only activation row with what is unpacked, straight from the registers.
template <class W>
struct RowSink {
  const int8_t* q;
  const float* d;
  const float* sum;
  const int32_t* correction;
  __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  RowDots<W> dots[8];  // by 32-block

  explicit RowSink(const QuantizedRows& x)
      : q(static_cast<const int8_t*>(x.q)), d(x.d), sum(x.sum), correction(x.correction) {}

  TRIVET_INLINE void group(int block, int g, V v) {
    dots[block].add(g, v, _mm256_set1_epi32(load_dword(q + block * kBlock + 4 * g)), correction + 2 * block);
  }

  TRIVET_INLINE void scales(int block, const Scales& scales) {
#pragma GCC unroll 2
    for (int part = 0; part < (W::kHalves ? 2 : 1); part++) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256 factor = _mm256_mul_ps(scales.d[part].half[h], _mm256_set1_ps(d[block]));
        acc[h] = _mm256_fmadd_ps(factor, dots[block].get(part, h, correction + 2 * block), acc[h]);
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

constexpr MatMulKernels kMatMulKernels = {
    .q_bytes = 1,
    .quantize = quantize,
    .tile = TRIVET_BY_FORMAT(row_or_tile),
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
