// PagedAttention over an int16_per_token_head cache with AVX-512 VNNI (after vec_avx512.h). Both products of
// attention are sums of int16 products in int32, which VPDPWSSD does at twice the rate of float32. Such sums are exact,
// whatever their order, so only the float operations around them are fixed by position.
//
// A block of a KV head (see KV layout in backends/contract/opset.py) has elements d, d + 1 of a key side by side, and
// elements d of the values j, j + 1: a "pair" is those two, 32 bits that VPDPWSSD multiplies and adds in one lane.
#pragma once

#include <cstring>
#include <utility>

#include "paged_attention_tile.h"

namespace {

// The L2 norm of a query and of a key, the largest element of a value, and the sum of a tile's weights are this at most
// (and half of a rounding for each element more), so no sum of products comes near 2^31.
constexpr float kInt16Max = 32767.0f;
constexpr float kLn2 = 0.693147181f;
constexpr float kTiny = 1e-30f;  // what is smaller than this is stored as zeros: its inverse may be infinite
constexpr int64_t kTilePairs = kTileKeys / 2;

// Sixteen int32. As __m512i, GCC would keep a register tile of them in memory too.
using Int32s = __v16si;

// sums + the products of int16 pairs.
inline Int32s add_products(Int32s sums, __m512i a, __m512i b) {
  return reinterpret_cast<Int32s>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sums), a, b));
}
inline Vec to_floats(Int32s x) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(x))}; }

// Calls f(0) to f(n - 1) with constants. A loop would do, but for GCC, which then keeps a register tile in memory too.
template <int... kIndices, class F>
inline void unrolled(std::integer_sequence<int, kIndices...>, const F& f) {
  (f(std::integral_constant<int, kIndices>()), ...);
}

template <int kCount, class F>
inline void unrolled(const F& f) {
  unrolled(std::make_integer_sequence<int, kCount>(), f);
}

// --- The cache ----------------------------------------------------------------------------------------------------

// One KV head of a block.
struct Int16Block {
  int32_t* keys;        // pairs, [head_dim / 2, block_size]
  int32_t* values;      // pairs, [block_size / 2, head_dim]
  float* key_scales;    // [block_size]
  float* value_scales;  // [block_size]
};

inline Int16Block int16_block(const PagedAttentionParams& p, int64_t block, int64_t kv_head) {
  const int64_t pairs = p.head_dim / 2 * p.block_size;
  int32_t* const keys = reinterpret_cast<int32_t*>(keys_of_block<int16_t>(p, block, kv_head));
  float* const scales = reinterpret_cast<float*>(keys + 2 * pairs);
  return {keys, keys + pairs, scales, scales + p.block_size};
}

// The nearest integers.
inline void store_int16(Vec x, void* out) {
  _mm256_storeu_si256(static_cast<__m256i*>(out), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

inline void quantise(const float* x, int64_t n, float factor, int16_t* out) {
  for (int64_t i = 0; i < n; i += Vec::kWidth) store_int16(mul(Vec::load(x + i), Vec::set(factor)), out + i);
}

// Quantises a query or key and returns what one step of its integers is: not a number if an element is not finite.
inline float quantise_by_norm(const float* x, int64_t n, int16_t* out) {
  Vec squares = Vec::set(0.0f);
  for (int64_t i = 0; i < n; i += Vec::kWidth) squares = mul_add(Vec::load(x + i), Vec::load(x + i), squares);
  const float norm = std::sqrt(reduce_add(squares));
  quantise(x, n, norm > kTiny ? kInt16Max / norm : 0.0f, out);
  return norm / kInt16Max + norm * 0.0f;
}

inline float quantise_by_largest(const float* x, int64_t n, int16_t* out) {
  Vec largest = Vec::set(0.0f), zeros = Vec::set(0.0f);
  for (int64_t i = 0; i < n; i += Vec::kWidth) {
    const Vec v = Vec::load(x + i);
    largest = max(largest, max(v, sub(Vec::set(0.0f), v)));
    zeros = mul_add(v, Vec::set(0.0f), zeros);  // max forgets what is not a number
  }
  const float most = reduce_max(largest) + reduce_add(zeros);
  quantise(x, n, most > kTiny ? kInt16Max / most : 0.0f, out);
  return most / kInt16Max;
}

// A head of q: its pairs, then the scale of its scores, which are logarithms to base 2.
void prepare_int16(const PagedAttentionParams& p, int64_t token, int64_t kv_head, float* q) {
  const TokenHeads heads(p, token, kv_head);
  float x[trivet::kMaxHeadDim];
  int16_t stored[trivet::kMaxHeadDim];
  for (int64_t head = 0; head < p.group; ++head) {
    float* const out = q + head * p.query_stride;
    normalise_and_rotate(p, heads.queries + head * p.head_dim, p.q_norm, heads.cos_sin, x);
    out[p.head_dim / 2] = quantise_by_norm(x, p.head_dim, stored) * (p.scale / kLn2);
    std::memcpy(out, stored, static_cast<size_t>(p.head_dim) * sizeof(int16_t));
  }
}

void store_int16_token(const PagedAttentionParams& p, int64_t token, int64_t kv_head) {
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const TokenHeads heads(p, token, kv_head);
  const int64_t offset = slot % p.block_size;
  float x[trivet::kMaxHeadDim];
  int16_t stored[trivet::kMaxHeadDim];
  const Int16Block block = int16_block(p, slot / p.block_size, kv_head);
  normalise_and_rotate(p, heads.key, p.k_norm, heads.cos_sin, x);
  block.key_scales[offset] = quantise_by_norm(x, p.head_dim, stored);
  for (int64_t i = 0; i < p.head_dim / 2; ++i) {
    std::memcpy(block.keys + i * p.block_size + offset, stored + 2 * i, sizeof(int32_t));
  }
  block.value_scales[offset] = quantise_by_largest(heads.value, p.head_dim, stored);
  int32_t* const pairs = block.values + offset / 2 * p.head_dim;
  // Only this value's halves of the pairs: another thread may be writing the other ones.
  const __mmask32 halves = offset % 2 == 0 ? 0x55555555u : 0xAAAAAAAAu;
  for (int64_t i = 0; i < p.head_dim; i += Vec::kWidth) {
    const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(stored + i)));
    _mm512_mask_storeu_epi16(pairs + i, halves, offset % 2 == 0 ? v : _mm512_slli_epi32(v, 16));
  }
}

// A tile by vectors of keys, as Tile is.
struct Int16Tile {
  static constexpr int64_t kVectors = kTileKeys / Vec::kWidth;
  const int32_t* keys[kVectors];    // pair i at i * block_size
  const int32_t* values[kVectors];  // pairs of elements, those of the keys 2 i and 2 i + 1 at i * head_dim
  const float* key_scales[kVectors];
  const float* value_scales[kVectors];
};

inline Int16Tile int16_tile(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start,
                            Visible visible) {
  Int16Tile tile;
  const int64_t first = visible.begin / Vec::kWidth, last = (visible.end - 1) / Vec::kWidth;
  const int32_t* blocks = p.block_table + item.request * p.max_blocks;
  for (int64_t c = 0; c < Int16Tile::kVectors; ++c) {
    const int64_t key = tile_start + (c < first ? first : c > last ? last : c) * Vec::kWidth;
    const int64_t offset = key % p.block_size;
    const Int16Block block = int16_block(p, blocks[key / p.block_size], item.kv_head);
    tile.keys[c] = block.keys + offset;
    tile.values[c] = block.values + offset / 2 * p.head_dim;
    tile.key_scales[c] = block.key_scales + offset;
    tile.value_scales[c] = block.value_scales + offset;
  }
  return tile;
}

// --- Scores, weights, values --------------------------------------------------------------------------------------

// Pair i of a prepared query, in every lane.
inline __m512i pair_of(const float* query, int64_t i) {
  int32_t pair;
  std::memcpy(&pair, query + i, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// scores[r][j] = the product of query r and key j, for kVecs vectors of keys from vector `c` on. `ahead`: the tile
// whose keys are fetched in passing, or null.
template <int kRows, int kVecs>
inline void int16_scores(const PagedAttentionParams& p, const float* const* queries, const Int16Tile& tile,
                         const Int16Tile* ahead, int64_t c, float* scores) {
  Int32s sums[kRows][kVecs];
  unrolled<kRows>([&](auto r) { unrolled<kVecs>([&](auto v) { sums[r][v] = Int32s{}; }); });
  const int64_t pairs = p.head_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    __m512i k[kVecs];
    unrolled<kVecs>([&](auto v) { k[v] = _mm512_loadu_si512(tile.keys[c + v] + i * p.block_size); });
    if (ahead != nullptr) {
      unrolled<kVecs>([&](auto v) { __builtin_prefetch(ahead->keys[c + v] + i * p.block_size, 0, 3); });
    }
    unrolled<kRows>([&](auto r) {
      const __m512i q = pair_of(queries[r], i);
      unrolled<kVecs>([&](auto v) { sums[r][v] = add_products(sums[r][v], k[v], q); });
    });
  }
  if (ahead != nullptr) {
    unrolled<kVecs>([&](auto v) {
      __builtin_prefetch(ahead->key_scales[c + v], 0, 3);
      __builtin_prefetch(ahead->value_scales[c + v], 0, 3);
    });
  }
  unrolled<kRows>([&](auto r) {
    unrolled<kVecs>([&](auto v) {
      const Vec scale = mul(Vec::load(tile.key_scales[c + v]), Vec::set(queries[r][pairs]));
      mul(to_floats(sums[r][v]), scale).store(scores + r * kTileKeys + v * Vec::kWidth);
    });
  });
}

// A bit for each key of the tile that is visible.
inline uint64_t bits_of(Visible keys) {
  const auto below = [](int64_t n) { return n >= kTileKeys ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
  return keys.none() ? 0 : below(keys.end) & ~below(keys.begin);
}

// 2^x for x <= 0, relative error below 2e-7; 2^-125 below that; exactly 1 at 0; NaN stays NaN.
inline Vec exp2_of(Vec x) {
  x = max(Vec::set(-125.0f), x);
  const Vec bias = Vec::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = sub(add(x, bias), bias), r = sub(x, n);
  Vec p = Vec::set(0x1.5bba14p-10f);  // minimax fit of (2^r - 1) / r on [-1/2, 1/2]
  p = mul_add(p, r, Vec::set(0x1.3cea88p-7f));
  p = mul_add(p, r, Vec::set(0x1.c6b752p-5f));
  p = mul_add(p, r, Vec::set(0x1.ebf9bcp-3f));
  p = mul_add(p, r, Vec::set(0x1.62e42ap-1f));
  p = mul_add(p, r, Vec::set(1.0f));
  return {_mm512_scalef_ps(p.v, n.v)};
}

// All lanes of rows[r] put together with `op` in lane r, in the order of reduce_add and reduce_max.
template <int kRows, class Op>
inline Vec reduce_rows(const Vec (&rows)[kRows], const Op& op) {
  static_assert(kRows <= 8);
  // Of two registers: what is left of each is half a register, and then, of two such halves, a quarter.
  const auto halves = [&](Vec a, Vec b) {
    return op(Vec{_mm512_shuffle_f32x4(a.v, b.v, 0x44)}, Vec{_mm512_shuffle_f32x4(a.v, b.v, 0xEE)});
  };
  const auto quarters = [&](Vec a, Vec b) {
    return op(Vec{_mm512_shuffle_f32x4(a.v, b.v, 0x88)}, Vec{_mm512_shuffle_f32x4(a.v, b.v, 0xDD)});
  };
  const auto row = [&](int r) { return rows[r < kRows ? r : kRows - 1]; };
  const auto four = [&](int r) { return quarters(halves(row(r), row(r + 1)), halves(row(r + 2), row(r + 3))); };
  const Vec low = four(0), high = kRows > 4 ? four(4) : low;  // a quarter per row
  const Vec pairs = op(Vec{_mm512_unpacklo_ps(low.v, high.v)}, Vec{_mm512_unpackhi_ps(low.v, high.v)});
  const Vec all = op(pairs, Vec{_mm512_permute_ps(pairs.v, 0x4E)});
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0), all.v)};
}

// Softmax of a tile's scores, which are logarithms to base 2: new running maxima and sums, what was there before
// rescaled. `weights`: 2^(score - maximum) times the value's scale, as integers whose sum is kInt16Max; `steps`: what
// one of a row's is. Rows that see nothing get zeros. What is hidden from another row adds 2^-125 to its sum, which has
// a 1 and so stays the same. Each pass is over all rows, so that none waits for the sums of one.
template <int kRows>
inline void weigh_rows(const PagedAttentionParams& p, const Visible* keys, const Int16Tile& tile, float* scores,
                       const AttentionState& state, int64_t row, int32_t (*weights)[kTilePairs], float* steps) {
  constexpr int kVecs = Int16Tile::kVectors;
  constexpr auto kAll = static_cast<__mmask16>((1u << kRows) - 1);
  uint64_t visible[kRows];
  const auto lanes = [&](int r, int v) { return static_cast<__mmask16>(visible[r] >> (v * Vec::kWidth)); };
  const auto score = [&](int r, int v) { return scores + r * kTileKeys + v * Vec::kWidth; };
  Vec maxima[kRows];
  __mmask16 seeing = 0;  // rows
  unrolled<kRows>([&](auto r) {
    visible[r] = bits_of(keys[r]);
    seeing = static_cast<__mmask16>(seeing | (visible[r] != 0 ? 1u << r : 0u));
    if (p.soft_cap > 0.0f) {
      unrolled<kVecs>([&](auto v) {
        const Vec capped = tanh_of(mul(Vec::load(score(r, v)), Vec::set(kLn2 / p.soft_cap)));
        mul(Vec::set(p.soft_cap / kLn2), capped).store(score(r, v));
      });
    }
    if (visible[r] != ~uint64_t{0}) {
      unrolled<kVecs>([&](auto v) {
        const __m512 hidden = _mm512_set1_ps(kMinusInfinity);
        _mm512_storeu_ps(score(r, v), _mm512_mask_loadu_ps(hidden, lanes(r, v), score(r, v)));
      });
    }
    const auto at = [&](int v) { return Vec::load(score(r, v)); };
    maxima[r] = max(max(at(0), at(1)), max(at(2), at(3)));
  });
  const Vec old_max{_mm512_maskz_loadu_ps(kAll, state.max + row)};
  const Vec new_max = max(old_max, reduce_rows(maxima, [](Vec a, Vec b) { return max(a, b); }));
  alignas(64) float of_row[Vec::kWidth];
  new_max.store(of_row);
  Vec sums[kRows], scaled_sums[kRows];
  unrolled<kRows>([&](auto r) {
    Vec x[kVecs];
    unrolled<kVecs>([&](auto v) { x[v] = exp2_of(sub(Vec::load(score(r, v)), Vec::set(of_row[r]))); });
    sums[r] = add(add(x[0], x[1]), add(x[2], x[3]));
    unrolled<kVecs>([&](auto v) {
      x[v].v = _mm512_maskz_mul_ps(lanes(r, v), x[v].v, _mm512_loadu_ps(tile.value_scales[v]));
      x[v].store(score(r, v));
    });
    scaled_sums[r] = add(add(x[0], x[1]), add(x[2], x[3]));
  });
  const auto plus = [](Vec a, Vec b) { return add(a, b); };
  const Vec scaled_sum = reduce_rows(scaled_sums, plus);
  _mm512_mask_storeu_ps(steps, kAll, mul(scaled_sum, Vec::set(1.0f / kInt16Max)).v);
  zero_where_less(scaled_sum, Vec::set(kTiny), div(Vec::set(kInt16Max), scaled_sum)).store(of_row);
  unrolled<kRows>([&](auto r) {
    const auto integers = [&](int v) { return _mm512_cvtps_epi32(mul(Vec::load(score(r, v)), Vec::set(of_row[r])).v); };
    for (int v = 0; v < kVecs; v += 2) {
      const __m512i packed = _mm512_packs_epi32(integers(v), integers(v + 1));  // four of each in turn
      const __m512i in_order = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
      _mm512_storeu_si512(weights[r] + v * (Vec::kWidth / 2), in_order);
    }
  });
  const Vec rescale = exp2_of(sub(old_max, new_max));
  const Vec old_sum{_mm512_maskz_loadu_ps(kAll, state.sum + row)};
  _mm512_mask_storeu_ps(state.max + row, seeing, new_max.v);
  _mm512_mask_storeu_ps(state.sum + row, seeing, mul_add(old_sum, rescale, reduce_rows(sums, plus)).v);
  // Not those that nothing was summed with.
  unsigned changed = seeing & _mm512_cmp_ps_mask(new_max.v, old_max.v, _CMP_NEQ_UQ) &
                     _mm512_cmp_ps_mask(old_max.v, _mm512_set1_ps(kMinusInfinity), _CMP_NEQ_UQ);
  if (changed == 0) return;
  rescale.store(of_row);
  for (; changed != 0; changed &= changed - 1) {
    const int r = __builtin_ctz(changed);
    float* const acc = state.acc + (row + r) * p.padded_dim;
    for (int64_t d = 0; d < p.padded_dim; d += Vec::kWidth) mul(Vec::load(acc + d), Vec::set(of_row[r])).store(acc + d);
  }
}

// acc[r][d] += steps[r] * sum over the keys of the vectors in `any` of weight j * value j [d], for kVecs vectors of d.
template <int kRows, int kVecs>
inline void int16_values(const PagedAttentionParams& p, const int32_t (*weights)[kTilePairs], const float* steps,
                         const Int16Tile& tile, const Int16Tile* ahead, Visible any, int64_t d, float* acc) {
  Int32s sums[kRows][kVecs];
  unrolled<kRows>([&](auto r) { unrolled<kVecs>([&](auto v) { sums[r][v] = Int32s{}; }); });
  for (int64_t c = any.begin / Vec::kWidth; c * Vec::kWidth < any.end; ++c) {
    const int32_t* value = tile.values[c] + d;
    const int32_t* fetch = ahead != nullptr ? ahead->values[c] + d : nullptr;
    for (int i = 0; i < Vec::kWidth / 2; ++i, value += p.head_dim) {
      __m512i x[kVecs];
      unrolled<kVecs>([&](auto v) { x[v] = _mm512_loadu_si512(value + v * Vec::kWidth); });
      if (fetch != nullptr) {
        unrolled<kVecs>([&](auto v) { __builtin_prefetch(fetch + v * Vec::kWidth, 0, 3); });
        fetch += p.head_dim;
      }
      unrolled<kRows>([&](auto r) {
        const __m512i w = _mm512_set1_epi32(weights[r][c * (Vec::kWidth / 2) + i]);
        unrolled<kVecs>([&](auto v) { sums[r][v] = add_products(sums[r][v], x[v], w); });
      });
    }
  }
  unrolled<kRows>([&](auto r) {
    unrolled<kVecs>([&](auto v) {
      float* const out = acc + r * p.padded_dim + d + v * Vec::kWidth;
      mul_add(to_floats(sums[r][v]), Vec::set(steps[r]), Vec::load(out)).store(out);
    });
  });
}

// Rows [row, row + kRows) of the item against a tile. `ahead`: the tile that is fetched in passing, or null.
template <int kRows>
inline void attend_rows_int16(const PagedAttentionParams& p, const AttentionItem& item, int64_t row, int64_t tile_start,
                              const Int16Tile& tile, const Int16Tile* ahead, const float* queries, float* scores,
                              const AttentionState& state) {
  const RowTile<kRows> rows(p, item, row, tile_start, queries);
  const Visible any = rows.any;
  if (any.none()) return;
  constexpr int kHalf = Vec::kBlock / 2;
  constexpr int64_t kBlockKeys = Vec::kBlock * Vec::kWidth;
  static_assert(kBlockKeys == kTileKeys);
  const auto score = any.end > kHalf * Vec::kWidth ? int16_scores<kRows, Vec::kBlock> : int16_scores<kRows, kHalf>;
  score(p, rows.queries, tile, ahead, 0, scores);
  int32_t weights[kRows][kTilePairs];
  float steps[kRows];
  weigh_rows<kRows>(p, rows.keys, tile, scores, state, row, weights, steps);
  constexpr int64_t kBlockDims = Vec::kBlock * Vec::kWidth;
  float* const acc = state.acc + row * p.padded_dim;
  int64_t d = 0;
  for (; d + kBlockDims <= p.head_dim; d += kBlockDims) {
    int16_values<kRows, Vec::kBlock>(p, weights, steps, tile, ahead, any, d, acc);
  }
  for (; d < p.head_dim; d += Vec::kWidth) int16_values<kRows, 1>(p, weights, steps, tile, ahead, any, d, acc);
}

void attend_int16(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition, NextPartition next,
                  const float* queries, const AttentionScratch& scratch, const AttentionState& state) {
  clear(state, item.num_tokens * p.group, p.padded_dim);
  attend_in_place(
      p, item, partition, next,
      [&](const AttentionItem& of, int64_t start, Visible visible) { return int16_tile(p, of, start, visible); },
      [&](int64_t start, const Int16Tile& tile, const Int16Tile* ahead) {
        for_each_row_tile(item.num_tokens * p.group, [&](auto n, int64_t row) {
          attend_rows_int16<decltype(n)::value>(p, item, row, start, tile, row == 0 ? ahead : nullptr, queries,
                                                scratch.scores, state);
        });
      });
  for (int64_t r = 0; r < item.num_tokens * p.group; ++r) state.max[r] *= kLn2;  // merging takes natural logarithms
}

void prepare_with_int16(const PagedAttentionParams& p, int64_t token, int64_t kv_head, float* q) {
  (p.kv_dtype == KvDtype::kInt16 ? prepare_int16 : prepare_queries)(p, token, kv_head, q);
}

void store_with_int16(const PagedAttentionParams& p, int64_t token, int64_t kv_head) {
  (p.kv_dtype == KvDtype::kInt16 ? store_int16_token : store_any)(p, token, kv_head);
}

void attend_with_int16(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition, NextPartition next,
                       const float* queries, const AttentionScratch& scratch, const AttentionState& state) {
  (p.kv_dtype == KvDtype::kInt16 ? attend_int16 : attend_any)(p, item, partition, next, queries, scratch, state);
}

constexpr trivet::AttentionKernels kAttentionKernelsWithInt16{prepare_with_int16, store_with_int16, attend_with_int16,
                                                              merge_states,       finish_item,      true};

}  // namespace
