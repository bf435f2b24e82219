// Two and more activation rows with AVX-512 VNNI; included by matmul_avx512_vnni.cc. Rows are packed in groups, so that
// all of a group is one sequential stream.
//
// Up to 8 rows are one group, which takes the 4 elements of a k-group as they are unpacked, all sums in registers.
//
// For more rows two tiles of weights are unpacked, some blocks at a time, and multiplied with group after group; a
// broadcast of 4 activations serves both tiles. What is left to wait for is the multiplications themselves: per row,
// tile and 32-block 8 dot products, a conversion and 2 scalings, 3 with minima.

namespace trivet {
namespace {

// What of a format matters once it is unpacked: formats that agree in it share their code.
template <bool kHasMin, bool kHasHalves>
struct Scaling {
  static constexpr bool kMin = kHasMin;
  static constexpr bool kHalves = kHasHalves;
};

template <class S>
constexpr int64_t kPackedBytes = packed_block_bytes(S::kHalves);

// Keeps the compiler from loading a broadcast anew for every use.
TRIVET_INLINE __m512i broadcast(const void* p) {
  __m512i v = _mm512_set1_epi32(load_dword(p));
  asm("" : "+v"(v));
  return v;
}

// One 32-block of MR rows times one of each of two tiles.
template <class S, int MR>
TRIVET_INLINE void multiply_block(const Panel* panels, int b, const uint8_t* x, __m512 acc[MR][2]) {
  constexpr int kHalves = S::kHalves ? 2 : 1;
  const uint8_t* scale = x + MR * kBlock;
  const uint8_t* last = scale + 4 * MR;
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; h++) {
    __m512i dot[MR][2];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const __m512i start = S::kMin ? _mm512_setzero_si512() : broadcast(last + 4 * (h * MR + i));
#pragma GCC unroll 2
      for (int t = 0; t < 2; t++) dot[i][t] = start;
    }
#pragma GCC unroll 8
    for (int g = h * 4; g < h * 4 + 8 / kHalves; g++) {
      __m512i w[2];
#pragma GCC unroll 2
      for (int t = 0; t < 2; t++) w[t] = _mm512_load_si512(panels[t].q[b][g]);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const __m512i four = broadcast(x + i * kBlock + 4 * g);
#pragma GCC unroll 2
        for (int t = 0; t < 2; t++) dot[i][t] = _mm512_dpbusd_epi32(dot[i][t], w[t], four);
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++) {
      const __m512 d = _mm512_load_ps(panels[t].d[b][h]);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const __m512 factor = _mm512_mul_ps(d, _mm512_castsi512_ps(_mm512_set1_epi32(load_dword(scale + 4 * i))));
        acc[i][t] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot[i][t]), acc[i][t]);
      }
    }
  }
  if constexpr (S::kMin) {
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++) {
      const __m512 minimum = _mm512_load_ps(panels[t].m[b]);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const __m512 sum = _mm512_castsi512_ps(_mm512_set1_epi32(load_dword(last + 4 * i)));
        acc[i][t] = _mm512_fmadd_ps(minimum, sum, acc[i][t]);
      }
    }
  }
}

// Weights that are fetched into the second-level cache while others are multiplied: unpacking alone would wait for the
// memory, which would then rest until the next panel. Past the last tile nothing is accessed, see Rows.
struct Ahead {
  uintptr_t at;
  uintptr_t end;
  uintptr_t bytes;  // per 32-block of a group, whole lines

  TRIVET_INLINE void fetch() {
    const uintptr_t until = at + bytes < end ? at + bytes : end;
    for (; at < until; at += 64) __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
  }
};

// The panels' `count` blocks times one group, added to the sums so far where there are some.
template <class S, int MR>
void multiply_group(const Panel* panels, int count, const uint8_t* x, const float* before, const Sums& after,
                    Ahead& ahead) {
  Ahead fetched = ahead;  // a copy stays in registers
  __m512 acc[MR][2];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++) {
      acc[i][t] = before == nullptr ? _mm512_setzero_ps() : _mm512_load_ps(before + (2 * i + t) * kTileRows);
    }
  }
  for (int b = 0; b < count; b++, x += MR * kPackedBytes<S>) {
    fetched.fetch();
    multiply_block<S, MR>(panels, b, x, acc);
  }
  ahead = fetched;
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++) _mm512_storeu_ps(after.tile[t] + i * after.stride, acc[i][t]);
  }
}

// By the rows of a group that is not the only one: more than kGroupRows in groups of nearly equal size.
constexpr int64_t kLeastPanelGroupRows = 4;
static_assert(kGroupRows == 8 && kPanelGroupRows == 6);
template <class S>
constexpr decltype(&multiply_group<S, 4>) kMultiplyGroup[] = {multiply_group<S, 4>, multiply_group<S, 5>,
                                                              multiply_group<S, 6>};

TileArgs tile_args(const PackedTileArgs& args, int t) {
  const uint8_t* weight = args.weight + t * kTileRows * args.row_bytes;
  return {weight, args.row_bytes, args.num_blocks, {}, 0, nullptr, 0, nullptr, args.into_l1};
}

// Multiplies one group of MR packed rows with what is unpacked, straight from the registers.
template <class W, int MR>
struct DirectSink {
  using S = Scaling<W::kMin, W::kHalves>;
  const uint8_t* x;
  __m512 acc[MR];
  __m512i dot[8][2][MR];  // by 32-block and half

  TRIVET_INLINE void group(int block, int g, V v) {
    const int half = W::kHalves ? g / 4 : 0;
    const uint8_t* q = x + block * MR * kPackedBytes<S>;
    const uint8_t* correction = q + MR * (kBlock + 4) + half * 4 * MR;
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      __m512i& sums = dot[block][half][i];
      if (g == half * 4) sums = W::kMin ? _mm512_setzero_si512() : _mm512_set1_epi32(load_dword(correction + 4 * i));
      sums = _mm512_dpbusd_epi32(sums, v.v, _mm512_set1_epi32(load_dword(q + i * kBlock + 4 * g)));
    }
  }

  TRIVET_INLINE void scales(int block, const Scales& scales) {
    const uint8_t* d = x + block * MR * kPackedBytes<S> + MR * kBlock;
    const auto value = [&](int64_t i) { return _mm512_castsi512_ps(_mm512_set1_epi32(load_dword(d + 4 * i))); };
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 2
      for (int h = 0; h < (W::kHalves ? 2 : 1); h++) {
        const __m512 factor = _mm512_mul_ps(scales.d[h].v, value(i));
        acc[i] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot[block][h][i]), acc[i]);
      }
      if constexpr (W::kMin) acc[i] = _mm512_fmadd_ps(scales.minimum.v, value(MR + i), acc[i]);
    }
  }

  TRIVET_INLINE void advance(int count) { x += count * MR * kPackedBytes<S>; }
};

template <class W, int MR>
void multiply_directly(const PackedTileArgs& args) {
  for (int t = 0; t < 2; t++) {
    Rows rows(tile_args(args, t));
    DirectSink<W, MR> sink;
    sink.x = args.x;
    for (auto& acc : sink.acc) acc = _mm512_setzero_ps();
    unpack_blocks<W>(rows, args.num_blocks, sink);
    for (int i = 0; i < MR; i++) _mm512_storeu_ps(args.y.tile[t] + i * args.y.stride, sink.acc[i]);
  }
}

template <class W>
constexpr decltype(&multiply_directly<W, 1>) kMultiplyDirectly[kGroupRows] = {
    multiply_directly<W, 1>, multiply_directly<W, 2>, multiply_directly<W, 3>, multiply_directly<W, 4>,
    multiply_directly<W, 5>, multiply_directly<W, 6>, multiply_directly<W, 7>, multiply_directly<W, 8>};

// Two tiles, a panel at a time.
template <class W>
void multiply_panels(const PackedTileArgs& args) {
  using S = Scaling<W::kMin, W::kHalves>;
  Rows rows[2] = {Rows(tile_args(args, 0)), Rows(tile_args(args, 1))};
  for (Rows& tile : rows) tile.into_l1 = false;  // the next tiles are needed after all groups
  const int64_t first_row = args.groups.start(args.first_group);
  const int64_t most = panel_blocks<W>(args.num_blocks, kPanelBlocks);
  const auto bytes = static_cast<uintptr_t>(2 * kTileRows * args.row_bytes);
  const auto blocks = static_cast<uintptr_t>(args.num_blocks * (args.last_group - args.first_group));
  const uintptr_t next = reinterpret_cast<uintptr_t>(args.weight) + bytes;
  Ahead ahead{next, next + bytes, (bytes / 64 + blocks) / blocks * 64};
  for (int64_t first = 0; first < args.num_blocks; first += most) {
    const int count = static_cast<int>(args.num_blocks - first < most ? args.num_blocks - first : most);
    for (int t = 0; t < 2; t++) {
      PanelSink<W> sink{args.panels[t]};
      Rows own = rows[t];  // a copy stays in registers
      unpack_blocks<W>(own, count, sink);
      rows[t] = own;
    }
    const bool last = first + count == args.num_blocks;
    for (int64_t g = args.first_group; g < args.last_group; g++) {
      const int64_t row = args.groups.start(g);
      const int64_t size = args.groups.start(g + 1) - row;
      const uint8_t* x = args.x + (row * args.num_blocks + size * first) * kPackedBytes<S>;
      const int64_t i = row - first_row;
      float* partial = args.partial + i * 2 * kTileRows;
      const Sums after =
          last ? Sums{{args.y.tile[0] + i * args.y.stride, args.y.tile[1] + i * args.y.stride}, args.y.stride}
               : Sums{{partial, partial + kTileRows}, 2 * kTileRows};
      const auto multiply = kMultiplyGroup<S>[size - kLeastPanelGroupRows];
      multiply(args.panels, count, x, first == 0 ? nullptr : partial, after, ahead);
    }
  }
}

template <class W>
void packed_tiles(const PackedTileArgs& args) {
  if (args.groups.count == 1) return kMultiplyDirectly<W>[args.groups.rows - 1](args);
  multiply_panels<W>(args);
}

// In the order of packed_block_bytes().
void pack(const QuantizedRows& x, const int32_t* sums, int64_t rows, int64_t blocks, int zero_point, bool halves,
          uint8_t* out) {
  const auto* q = static_cast<const uint8_t*>(x.q);
  for (int64_t b = 0; b < blocks; b++) {
    auto* values = reinterpret_cast<float*>(out + rows * kBlock);
    auto* corrections = reinterpret_cast<int32_t*>(values) + rows;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = i * blocks + b;
      __builtin_memcpy(out + i * kBlock, q + at * kBlock, kBlock);
      values[i] = x.d[at];
      if (zero_point == 0) {
        values[rows + i] = x.sum[at];
      } else {
        corrections[i] = -zero_point * (halves ? sums[2 * at] : sums[2 * at] + sums[2 * at + 1]);
        if (halves) corrections[rows + i] = -zero_point * sums[2 * at + 1];
      }
    }
    out += rows * packed_block_bytes(halves);
  }
}

}  // namespace
}  // namespace trivet
