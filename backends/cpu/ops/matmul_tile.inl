// Unpacking of the block formats into a Panel, and what of a tier follows from it; included by each vector tier.
//
// Everything happens on the bytes of 16 rows at once: `V` holds one dword per row, so a shift or mask serves 16 rows x
// 4 elements, and a format is only a recipe of loads, shifts and masks. The including file defines, in its anonymous
// namespace: V (16 dwords) with operators & | ^, shl, shr, sra; splat; F (16 floats) with mul, neg; to_float;
// half_to_float16; load_dwords, load_transposed, store, spread_bits; and product<W>, which multiplies a panel.

namespace trivet {
namespace {

struct Rows {
  const uint8_t* row[kTileRows];  // rows past the last are the last again
};

inline V low_nibbles(V v) { return v & splat(0x0F0F0F0Fu); }
inline V high_nibbles(V v) { return shr(v, 4) & splat(0x0F0F0F0Fu); }

// 32 bytes of each row, from `offset`, as 8 groups of 4.
inline void load_groups(const Rows& rows, int64_t offset, V out[8]) {
  load_transposed(rows, offset, out);
  load_transposed(rows, offset + 16, out + 4);
}

// The nibbles of 16 bytes: element i low, element i + 16 high.
inline void unpack_nibbles(const Rows& rows, int64_t offset, V out[8]) {
  V raw[4];
  load_transposed(rows, offset, raw);
  for (int g = 0; g < 4; g++) {
    out[g] = low_nibbles(raw[g]);
    out[g + 4] = high_nibbles(raw[g]);
  }
}

inline void store_groups(Panel& p, int block, const V groups[8]) {
  for (int g = 0; g < 8; g++) store(p.q[block][g], groups[g]);
}

// Each format: kMax, the largest integer it stores; kMin, whether it has minima; kHalves, whether elements 0-15 and
// 16-31 have own scales; kBlocks, 32-blocks per format block; unpack(rows, offset of the format block, panel, first
// block).
struct Q4_0 {
  static constexpr int kMax = 15;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 18;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    V groups[8];
    unpack_nibbles(rows, offset + 2, groups);
    store_groups(p, block, groups);
    store(p.d[block][0], half_to_float16(load_dwords(rows, offset)));
  }
};

struct Q4_1 {
  static constexpr int kMax = 15;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 20;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    V groups[8];
    unpack_nibbles(rows, offset + 4, groups);
    store_groups(p, block, groups);
    const V head = load_dwords(rows, offset);
    store(p.d[block][0], half_to_float16(head));
    store(p.m[block], half_to_float16(shr(head, 16)));
  }
};

inline void add_fifth_bits(V high, V groups[8]) {
  for (int g = 0; g < 8; g++) groups[g] = groups[g] | spread_bits(shr(high, 4 * g));
}

struct Q5_0 {
  static constexpr int kMax = 31;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 22;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    V groups[8];
    unpack_nibbles(rows, offset + 6, groups);
    add_fifth_bits(load_dwords(rows, offset + 2), groups);
    store_groups(p, block, groups);
    store(p.d[block][0], half_to_float16(load_dwords(rows, offset)));
  }
};

struct Q5_1 {
  static constexpr int kMax = 31;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 24;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    V groups[8];
    unpack_nibbles(rows, offset + 8, groups);
    add_fifth_bits(load_dwords(rows, offset + 4), groups);
    store_groups(p, block, groups);
    const V head = load_dwords(rows, offset);
    store(p.d[block][0], half_to_float16(head));
    store(p.m[block], half_to_float16(shr(head, 16)));
  }
};

struct Q8_0 {
  static constexpr int kMax = 255;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 34;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    V groups[8];
    load_groups(rows, offset + 2, groups);
    for (V& group : groups) group = group ^ splat(0x80808080u);  // signed -> unsigned with zero point 128
    store_groups(p, block, groups);
    store(p.d[block][0], half_to_float16(load_dwords(rows, offset)));
  }
};

// Scales and negated minima of a q4_k or q5_k block; its first 16 bytes are d, dmin and the 12 scale bytes.
inline void unpack_k_scales(const Rows& rows, int64_t offset, Panel& p, int block) {
  V head[4];
  load_transposed(rows, offset, head);
  const F d = half_to_float16(head[0]);
  const F dmin = half_to_float16(shr(head[0], 16));
  for (int j = 0; j < 4; j++) {
    const V scale = shr(head[1], 8 * j) & splat(63);
    const V minimum = shr(head[2], 8 * j) & splat(63);
    store(p.d[block + j][0], mul(d, to_float(scale)));
    store(p.m[block + j], neg(mul(dmin, to_float(minimum))));
    const V scale_high = (shr(head[3], 8 * j) & splat(15)) | (shr(head[1], 8 * j + 2) & splat(48));
    const V minimum_high = (shr(head[3], 8 * j + 4) & splat(15)) | (shr(head[2], 8 * j + 2) & splat(48));
    store(p.d[block + j + 4][0], mul(d, to_float(scale_high)));
    store(p.m[block + j + 4], neg(mul(dmin, to_float(minimum_high))));
  }
}

struct Q4_K {
  static constexpr int kMax = 15;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 8;
  static constexpr int64_t kBytes = 144;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    unpack_k_scales(rows, offset, p, block);
    for (int j = 0; j < 8; j += 2) {
      V raw[8];
      load_groups(rows, offset + 16 + 16 * j, raw);
      for (int g = 0; g < 8; g++) {
        store(p.q[block + j][g], low_nibbles(raw[g]));
        store(p.q[block + j + 1][g], high_nibbles(raw[g]));
      }
    }
  }
};

struct Q5_K {
  static constexpr int kMax = 31;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 8;
  static constexpr int64_t kBytes = 176;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    unpack_k_scales(rows, offset, p, block);
    V high[8];
    load_groups(rows, offset + 16, high);
    const V one = splat(0x01010101u);
    for (int j = 0; j < 8; j += 2) {
      V raw[8];
      load_groups(rows, offset + 48 + 16 * j, raw);
      for (int g = 0; g < 8; g++) {
        store(p.q[block + j][g], low_nibbles(raw[g]) | shl(shr(high[g], j) & one, 4));
        store(p.q[block + j + 1][g], high_nibbles(raw[g]) | shl(shr(high[g], j + 1) & one, 4));
      }
    }
  }
};

struct Q6_K {
  static constexpr int kMax = 63;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = true;
  static constexpr int kBlocks = 8;
  static constexpr int64_t kBytes = 210;
  static void unpack(const Rows& rows, int64_t offset, Panel& p, int block) {
    const V pair = splat(0x30303030u);
    for (int h = 0; h < 2; h++) {
      for (int part = 0; part < 2; part++) {  // 16 bytes of each run of 32
        V first[4];
        V second[4];
        V high[4];
        load_transposed(rows, offset + 64 * h + 16 * part, first);
        load_transposed(rows, offset + 64 * h + 32 + 16 * part, second);
        load_transposed(rows, offset + 128 + 32 * h + 16 * part, high);
        for (int g = 0; g < 4; g++) {
          auto* q = &p.q[block + 4 * h];
          const int group = 4 * part + g;
          store(q[0][group], low_nibbles(first[g]) | (shl(high[g], 4) & pair));
          store(q[1][group], low_nibbles(second[g]) | (shl(high[g], 2) & pair));
          store(q[2][group], high_nibbles(first[g]) | (high[g] & pair));
          store(q[3][group], high_nibbles(second[g]) | (shr(high[g], 2) & pair));
        }
      }
    }
    V scales[4];
    load_transposed(rows, offset + 192, scales);
    const F d = half_to_float16(shr(load_dwords(rows, offset + 206), 16));
    for (int s = 0; s < 16; s++) {
      store(p.d[block + s / 2][s % 2], mul(d, to_float(sra(shl(scales[s / 4], 24 - 8 * (s % 4)), 24))));
    }
  }
};

// Rows are read side by side, a pattern that the hardware prefetcher does not follow: without this a decode step reads
// weights at 6 GB/s and with it at 14 (one core, q4_1). The next tile is the next 16 rows in memory; each block of this
// one fetches its share. Past the last row nothing is accessed: a prefetch of an unmapped address does nothing.
template <class W>
inline void prefetch_next_tile(const TileArgs& args, int64_t block) {
  constexpr uintptr_t kLine = 64;
  constexpr uintptr_t kShare = kTileRows * W::kBytes;  // bytes of a format block of 16 rows
  const auto next = reinterpret_cast<uintptr_t>(args.weight) + static_cast<uintptr_t>(kTileRows * args.row_bytes) +
                    static_cast<uintptr_t>(block / W::kBlocks) * kShare;
  for (uintptr_t at = 0; at < kShare; at += kLine) __builtin_prefetch(reinterpret_cast<const void*>(next + at), 0, 2);
}

template <class W>
void tile(const TileArgs& args) {
  Rows rows;
  for (int r = 0; r < kTileRows; r++) {
    rows.row[r] = args.weight + (r < args.rows ? r : args.rows - 1) * args.row_bytes;
  }
  Panel& panel = *args.panel;
  for (int64_t first = 0; first < args.num_blocks; first += kPanelBlocks) {
    const int count = static_cast<int>(args.num_blocks - first < kPanelBlocks ? args.num_blocks - first : kPanelBlocks);
    for (int block = 0; block < count; block += W::kBlocks) {
      prefetch_next_tile<W>(args, first + block);
      W::unpack(rows, (first + block) / W::kBlocks * W::kBytes, panel, block);
    }
    product<W>(panel, count, first, args);
  }
}

}  // namespace
}  // namespace trivet

// The entries of MatMulKernels::tile, in the order of enum Format.
#define TRIVET_BLOCK_TILES                                                 \
  {nullptr,    nullptr,    nullptr,    tile<Q4_0>, tile<Q4_1>, tile<Q5_0>, \
   tile<Q5_1>, tile<Q8_0>, tile<Q4_K>, tile<Q5_K>, tile<Q6_K>}
