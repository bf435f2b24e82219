// The recipes of the block formats, from the bytes of 16 rows to integers and scales, and what of a tier follows from
// them; included by each vector tier.
//
// Everything happens on the bytes of 16 rows at once: `V` holds one dword per row, so a shift or mask serves 16 rows x
// 4 elements, and a format is only a recipe of loads, shifts and masks. The including file defines, in its anonymous
// namespace: V (16 dwords) with operators & | ^, shl, shr, sra; splat; F (16 floats) with mul, neg; to_float;
// half_to_float16; load_dwords, load_halves, load_dword_pairs, load_transposed, store, spread_bits; kUnroll, the
// unrolling of loops over parts of a block; and where tile<W> is used product<W>, which multiplies a panel.

#define TRIVET_INLINE [[gnu::always_inline]] inline

namespace trivet {
namespace {

// Weights are prefetched a tile and this many bytes before they are needed.
constexpr int64_t kPrefetchAhead = 4096;

TRIVET_INLINE void prefetch(const void* line, bool into_l1) {
  if (into_l1) {
    __builtin_prefetch(line, 0, 3);
  } else {
    __builtin_prefetch(line, 0, 2);
  }
}

// The bytes of a tile. Rows are read side by side, a pattern that the hardware prefetcher does not follow, so each load
// of 16 bytes of 16 rows also prefetches 256 bytes of what follows in memory, spread over the load. Past the last tile
// nothing is accessed: a prefetch of an unmapped address does nothing.
struct Rows {
  // Row r is at base[r / 4] + r % 4 * stride: few enough values for registers, and what x86 addresses can add up.
  const uint8_t* base[4];
  int64_t stride;
  uintptr_t ahead;  // the next line to prefetch
  bool into_l1;

  explicit Rows(const TileArgs& args) : stride(args.row_bytes), into_l1(args.into_l1) {
    for (int i = 0; i < 4; i++) base[i] = args.weight + 4 * i * stride;
    ahead = reinterpret_cast<uintptr_t>(args.weight) + static_cast<uintptr_t>(kTileRows * stride + kPrefetchAhead);
  }

  TRIVET_INLINE const uint8_t* at(int row, int64_t offset) const { return base[row / 4] + row % 4 * stride + offset; }

  TRIVET_INLINE void prefetch_line() {
    prefetch(reinterpret_cast<const void*>(ahead), into_l1);
    asm volatile("" ::: "memory");  // the compiler would move the loads between two prefetches away
    ahead += 64;
  }

  TRIVET_INLINE void advance(int64_t bytes) {
    for (auto& row : base) row += bytes;
  }
};

// Of 16 rows x 32 elements: scales of elements 0-15 and 16-31 (formats without halves use [0] for all 32), minimum.
struct Scales {
  F d[2];
  F minimum;

  TRIVET_INLINE explicit Scales(F scale) { d[0] = scale; }
  TRIVET_INLINE Scales(F scale, F added) : Scales(scale) { minimum = added; }
  TRIVET_INLINE static Scales of_halves(F first, F second) {
    Scales scales(first);
    scales.d[1] = second;
    return scales;
  }
};

TRIVET_INLINE V low_nibbles(V v) { return v & splat(0x0F0F0F0Fu); }
TRIVET_INLINE V high_nibbles(V v) { return shr(v, 4) & splat(0x0F0F0F0Fu); }

// Each format: kMax, the largest integer it stores; kMin, whether it has minima; kHalves, whether elements 0-15 and
// 16-31 have own scales; kBlocks, 32-blocks per format block; kBytes, its size; unpack(rows, sink), which calls
//   sink.group(block, g, v)       elements 4 g ... 4 g + 3 of a 32-block, as soon as they are there; those of elements
//                                 0-15 in order, those of 16-31 in order, and g = 0 before g = 4
//   sink.scales(block, scales)    after the groups of the block; blocks in order
// A format whose blocks are whole dwords may add a way to unpack kGroup of them at once, unpack_group.

// The nibbles of 16 bytes: element i low, element i + 16 high.
template <class Sink>
TRIVET_INLINE void emit_nibbles(int block, const V raw[4], Sink& sink) {
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    sink.group(block, g, low_nibbles(raw[g]));
    sink.group(block, g + 4, high_nibbles(raw[g]));
  }
}

// The same with the fifth bits in a dword per row, bit i for element i.
template <class Sink>
TRIVET_INLINE void emit_fives(V high, const V raw[4], Sink& sink) {
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    sink.group(0, g, low_nibbles(raw[g]) | spread_bits(shr(high, 4 * g)));
    sink.group(0, g + 4, high_nibbles(raw[g]) | spread_bits(shr(high, 4 * g + 16)));
  }
}

struct Q4_0 {
  static constexpr int kMax = 15;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 18;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    V raw[4];
    load_transposed(rows, 2, raw);
    emit_nibbles(0, raw, sink);
    sink.scales(0, Scales(load_halves(rows, 0)));
  }
};

struct Q4_1 {
  static constexpr int kMax = 15;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 20;
  static constexpr int kGroup = 4;
  TRIVET_INLINE static Scales scales_of(V head) { return {half_to_float16(head), half_to_float16(shr(head, 16))}; }
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    V raw[4];
    load_transposed(rows, 4, raw);
    emit_nibbles(0, raw, sink);
    sink.scales(0, scales_of(load_dwords(rows, 0)));
  }
  template <class Sink>
  TRIVET_INLINE static void unpack_group(Rows& rows, Sink& sink) {
    V dwords[20];  // per block: d and m, nibbles
    load_transposed(rows, 0, dwords);
#pragma GCC unroll 4
    for (int block = 0; block < kGroup; block++) {
      load_transposed(rows, 16 * (block + 1), dwords + 4 * (block + 1));
      emit_nibbles(block, dwords + 5 * block + 1, sink);
      sink.scales(block, scales_of(dwords[5 * block]));
    }
  }
};

struct Q5_0 {
  static constexpr int kMax = 31;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 22;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    V head[2];
    V raw[4];
    load_dword_pairs(rows, 0, head);
    load_transposed(rows, 6, raw);
    emit_fives(shr(head[0], 16) | shl(head[1], 16), raw, sink);
    sink.scales(0, Scales(half_to_float16(head[0])));
  }
};

struct Q5_1 {
  static constexpr int kMax = 31;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 24;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    V head[2];
    V raw[4];
    load_dword_pairs(rows, 0, head);
    load_transposed(rows, 8, raw);
    emit_fives(head[1], raw, sink);
    sink.scales(0, Scales(half_to_float16(head[0]), half_to_float16(shr(head[0], 16))));
  }
};

struct Q8_0 {
  static constexpr int kMax = 255;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 1;
  static constexpr int64_t kBytes = 34;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
#pragma GCC unroll kUnroll
    for (int part = 0; part < 2; part++) {
      V raw[4];
      load_transposed(rows, 2 + 16 * part, raw);
      // Signed -> unsigned with zero point 128.
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++) sink.group(0, 4 * part + g, raw[g] ^ splat(0x80808080u));
    }
    sink.scales(0, Scales(load_halves(rows, 0)));
  }
};

// Scales and negated minima of a q4_k or q5_k block; its first 16 bytes are d, dmin and the 12 scale bytes.
struct KScales {
  V head[4];
  F d;
  F dmin;

  TRIVET_INLINE explicit KScales(Rows& rows) {
    load_transposed(rows, 0, head);
    d = half_to_float16(head[0]);
    dmin = half_to_float16(shr(head[0], 16));
  }

  TRIVET_INLINE Scales of(int j) const {
    V scale;
    V minimum;
    if (j < 4) {
      scale = shr(head[1], 8 * j) & splat(63);
      minimum = shr(head[2], 8 * j) & splat(63);
    } else {
      const int i = j - 4;
      scale = (shr(head[3], 8 * i) & splat(15)) | (shr(head[1], 8 * i + 2) & splat(48));
      minimum = (shr(head[3], 8 * i + 4) & splat(15)) | (shr(head[2], 8 * i + 2) & splat(48));
    }
    return {mul(d, to_float(scale)), neg(mul(dmin, to_float(minimum)))};
  }
};

struct Q4_K {
  static constexpr int kMax = 15;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 8;
  static constexpr int64_t kBytes = 144;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    const KScales scales(rows);
#pragma GCC unroll kUnroll
    for (int j = 0; j < 8; j += 2) {
#pragma GCC unroll kUnroll
      for (int part = 0; part < 2; part++) {
        V raw[4];
        load_transposed(rows, 16 + 16 * (j + part), raw);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
          sink.group(j, 4 * part + g, low_nibbles(raw[g]));
          sink.group(j + 1, 4 * part + g, high_nibbles(raw[g]));
        }
      }
      sink.scales(j, scales.of(j));
      sink.scales(j + 1, scales.of(j + 1));
    }
  }
};

struct Q5_K {
  static constexpr int kMax = 31;
  static constexpr bool kMin = true;
  static constexpr bool kHalves = false;
  static constexpr int kBlocks = 8;
  static constexpr int64_t kBytes = 176;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    const KScales scales(rows);
    const V one = splat(0x01010101u);
    V high[8];
    load_transposed(rows, 16, high);
    load_transposed(rows, 32, high + 4);
#pragma GCC unroll kUnroll
    for (int j = 0; j < 8; j += 2) {
#pragma GCC unroll kUnroll
      for (int part = 0; part < 2; part++) {
        V raw[4];
        load_transposed(rows, 48 + 16 * (j + part), raw);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const int g = 4 * part + i;
          sink.group(j, g, low_nibbles(raw[i]) | shl(shr(high[g], j) & one, 4));
          sink.group(j + 1, g, high_nibbles(raw[i]) | shl(shr(high[g], j + 1) & one, 4));
        }
      }
      sink.scales(j, scales.of(j));
      sink.scales(j + 1, scales.of(j + 1));
    }
  }
};

struct Q6_K {
  static constexpr int kMax = 63;
  static constexpr bool kMin = false;
  static constexpr bool kHalves = true;
  static constexpr int kBlocks = 8;
  static constexpr int64_t kBytes = 210;
  template <class Sink>
  TRIVET_INLINE static void unpack(Rows& rows, Sink& sink) {
    const V pair = splat(0x30303030u);
    V packed[4];
    load_transposed(rows, 192, packed);
    const F d = half_to_float16(shr(load_dwords(rows, 206), 16));
    const auto scale = [&](int s) { return mul(d, to_float(sra(shl(packed[s / 4], 24 - 8 * (s % 4)), 24))); };
#pragma GCC unroll kUnroll
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll kUnroll
      for (int part = 0; part < 2; part++) {  // 16 bytes of each run of 32
        V first[4];
        V second[4];
        V high[4];
        load_transposed(rows, 64 * h + 16 * part, first);
        load_transposed(rows, 64 * h + 32 + 16 * part, second);
        load_transposed(rows, 128 + 32 * h + 16 * part, high);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const int g = 4 * part + i;
          sink.group(4 * h, g, low_nibbles(first[i]) | (shl(high[i], 4) & pair));
          sink.group(4 * h + 1, g, low_nibbles(second[i]) | (shl(high[i], 2) & pair));
          sink.group(4 * h + 2, g, high_nibbles(first[i]) | (high[i] & pair));
          sink.group(4 * h + 3, g, high_nibbles(second[i]) | (shr(high[i], 2) & pair));
        }
      }
#pragma GCC unroll kUnroll
      for (int block = 4 * h; block < 4 * h + 4; block++) {
        sink.scales(block, Scales::of_halves(scale(2 * block), scale(2 * block + 1)));
      }
    }
  }
};

// Unpacks the next `count` 32-blocks, whole format blocks; sink.advance(n) is told of every n that are done.
template <class W, class Sink>
TRIVET_INLINE void unpack_blocks(Rows& rows, int64_t count, Sink& sink) {
  if constexpr (requires { W::kGroup; }) {
    for (; count >= W::kGroup; count -= W::kGroup) {
      W::unpack_group(rows, sink);
      rows.advance(W::kGroup * W::kBytes);
      sink.advance(W::kGroup);
    }
  }
  for (; count > 0; count -= W::kBlocks) {
    W::unpack(rows, sink);
    rows.advance(W::kBytes);
    sink.advance(W::kBlocks);
  }
}

template <class W>
struct PanelSink {
  Panel& panel;
  int first = 0;

  TRIVET_INLINE void group(int block, int g, V v) { store(panel.q[first + block][g], v); }
  TRIVET_INLINE void scales(int block, const Scales& scales) {
    store(panel.d[first + block][0], scales.d[0]);
    if constexpr (W::kHalves) store(panel.d[first + block][1], scales.d[1]);
    if constexpr (W::kMin) store(panel.m[first + block], scales.minimum);
  }
  TRIVET_INLINE void advance(int blocks) { first += blocks; }
};

// Blocks to unpack at a time, `limit` at most: whole format blocks, and about as many in the last panel as in the
// others.
template <class W>
int64_t panel_blocks(int64_t num_blocks, int64_t limit) {
  const int64_t most = limit / W::kBlocks * W::kBlocks;
  const int64_t panels = (num_blocks + most - 1) / most;
  return ((num_blocks + panels - 1) / panels + W::kBlocks - 1) / W::kBlocks * W::kBlocks;
}

template <class W>
void tile(const TileArgs& args) {
  Rows rows(args);
  const int64_t most = panel_blocks<W>(args.num_blocks, kPanelBlocks);
  for (int64_t first = 0; first < args.num_blocks; first += most) {
    const int count = static_cast<int>(args.num_blocks - first < most ? args.num_blocks - first : most);
    PanelSink<W> sink{*args.panel};
    unpack_blocks<W>(rows, count, sink);
    product<W>(*args.panel, count, first, args);
  }
}

}  // namespace
}  // namespace trivet

// A function template's instances in the order of enum Format.
#define TRIVET_BY_FORMAT(f) \
  {nullptr, nullptr, nullptr, f<Q4_0>, f<Q4_1>, f<Q5_0>, f<Q5_1>, f<Q8_0>, f<Q4_K>, f<Q5_K>, f<Q6_K>}
#define TRIVET_BLOCK_TILES TRIVET_BY_FORMAT(tile)
