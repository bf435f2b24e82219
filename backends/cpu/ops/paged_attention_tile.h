// The kernels of PagedAttention over the Vec of the including tier (after vec_*.h). Every row goes through the same
// operations in the same order whatever rows it is tiled with, so decode, chunked and whole prefill agree bit for bit.
#pragma once

#include <type_traits>

#include "paged_attention_kv.h"

namespace {

using trivet::AttentionState;
using trivet::kScoreRows;
using trivet::KvDtype;
using trivet::NextPartition;

// Rows that convert a tile's elements on the way sooner than they copy it first.
constexpr int64_t kRowsInPlace = Vec::kLoadsHalf ? 64 : 8;
constexpr float kMinusInfinity = -HUGE_VALF;

// --- Step 3: scores, softmax, values for the rows of an item ------------------------------------------------------

// scores[r][j] = sum over d, in order, of queries[r][d] * key j [d], for kVecs vectors of keys. `ahead`: the keys that
// are fetched in passing, or null.
template <int kRows, int kVecs, class T>
inline void score_block(const float* const* queries, const T* const* keys, const T* const* ahead, int64_t key_stride,
                        int64_t head_dim, float* scores) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) sums[r][c] = Vec::set(0.0f);
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec k[kVecs];
    for (int c = 0; c < kVecs; ++c) k[c] = Vec::load(keys[c] + d * key_stride);
    if (ahead != nullptr) {
      for (int c = 0; c < kVecs; ++c) __builtin_prefetch(ahead[c] + d * key_stride, 0, 2);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec q = Vec::set(queries[r][d]);
      for (int c = 0; c < kVecs; ++c) sums[r][c] = mul_add(q, k[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) sums[r][c].store(scores + r * kTileKeys + c * Vec::kWidth);
  }
}

// acc[r][d] += sum over keys j in `keys`, in order, of scores[r][j] * value j [d], for kVecs vectors of d. `ahead`: the
// tile whose values are fetched in passing, or null.
template <int kRows, int kVecs, class T>
inline void accumulate_block(const float* scores, const Tile<T>& tile, const Tile<T>* ahead, Visible keys, int64_t d,
                             int64_t padded_dim, float* acc) {
  constexpr int64_t kWidth = Vec::kWidth;
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) sums[r][c] = Vec::load(acc + r * padded_dim + d + c * kWidth);
  }
  for (int64_t j = keys.begin, end; j < keys.end; j = end) {
    const int64_t vector = j / kWidth;
    end = (vector + 1) * kWidth < keys.end ? (vector + 1) * kWidth : keys.end;
    const T* value = tile.values[vector] + (j % kWidth) * tile.value_stride + d;
    const T* fetch = ahead != nullptr ? ahead->values[vector] + (j % kWidth) * tile.value_stride + d : nullptr;
    for (; j < end; ++j, value += tile.value_stride) {
      Vec v[kVecs];
      for (int c = 0; c < kVecs; ++c) v[c] = Vec::load(value + c * kWidth);
      if (fetch != nullptr) {
        for (int c = 0; c < kVecs; ++c) __builtin_prefetch(fetch + c * kWidth, 0, 2);
        fetch += tile.value_stride;
      }
      for (int r = 0; r < kRows; ++r) {
        const Vec s = Vec::set(scores[r * kTileKeys + j]);
        for (int c = 0; c < kVecs; ++c) sums[r][c] = mul_add(s, v[c], sums[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVecs; ++c) sums[r][c].store(acc + r * padded_dim + d + c * kWidth);
  }
}

template <int kRows, class T>
inline void accumulate_values(const float* scores, const Tile<T>& tile, const Tile<T>* ahead, Visible keys,
                              int64_t padded_dim, float* acc) {
  if (keys.none()) return;
  constexpr int64_t kBlockDims = Vec::kBlock * Vec::kWidth;
  int64_t d = 0;
  for (; d + kBlockDims <= padded_dim; d += kBlockDims) {
    accumulate_block<kRows, Vec::kBlock>(scores, tile, ahead, keys, d, padded_dim, acc);
  }
  for (; d < padded_dim; d += Vec::kWidth) accumulate_block<kRows, 1>(scores, tile, ahead, keys, d, padded_dim, acc);
}

// Turns the scores of rows [row, row + kRows) into weights exp(score - max) with the new running maximum; rescales what
// was there before. `any`: the keys that some row sees; keys[r]: those of a row, whose other weights become 0.
template <int kRows>
inline void softmax_rows(const PagedAttentionParams& p, Visible any, const Visible* keys, float* scores,
                         const AttentionState& state, int64_t row) {
  constexpr int64_t kWidth = Vec::kWidth;
  const int64_t first = any.begin / kWidth * kWidth;
  Vec highest[kRows], sums[kRows];
  for (int r = 0; r < kRows; ++r) highest[r] = Vec::set(kMinusInfinity);
  for (int64_t j = first; j < any.end; j += kWidth) {
    for (int r = 0; r < kRows; ++r) {
      Vec s = Vec::load(scores + r * kTileKeys + j);
      if (p.soft_cap > 0.0f) s = mul(Vec::set(p.soft_cap), tanh_of(div(s, Vec::set(p.soft_cap))));
      if (j < keys[r].begin || j + kWidth > keys[r].end) {
        s = keep_lanes(s, static_cast<int>(keys[r].begin - j), static_cast<int>(keys[r].end - j), kMinusInfinity);
      }
      s.store(scores + r * kTileKeys + j);
      highest[r] = max(highest[r], s);
    }
  }
  float new_max[kRows], rescale[kRows + Vec::kWidth];
  for (int r = 0; r < kRows; ++r) {
    const float tile_max = reduce_max(highest[r]), old_max = state.max[row + r];
    new_max[r] = old_max > tile_max ? old_max : tile_max;
    rescale[r] = old_max - new_max[r];
    sums[r] = Vec::set(0.0f);
  }
  for (int64_t j = first; j < any.end; j += kWidth) {
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = fused_exp_of(sub(Vec::load(scores + r * kTileKeys + j), Vec::set(new_max[r])));
      weight.store(scores + r * kTileKeys + j);
      sums[r] = add(sums[r], weight);
    }
  }
  for (int r = 0; r < kRows; r += Vec::kWidth) fused_exp_of(Vec::load(rescale + r)).store(rescale + r);
  for (int r = 0; r < kRows; ++r) {
    if (keys[r].none()) continue;
    state.max[row + r] = new_max[r];
    state.sum[row + r] = state.sum[row + r] * rescale[r] + reduce_add(sums[r]);
    if (rescale[r] == 1.0f) continue;
    float* acc = state.acc + (row + r) * p.padded_dim;
    for (int64_t d = 0; d < p.padded_dim; d += kWidth) mul(Vec::load(acc + d), Vec::set(rescale[r])).store(acc + d);
  }
}

// Queries and visible keys of kRows rows from `row` on.
template <int kRows>
struct RowTile {
  const float* queries[kRows];
  Visible keys[kRows];
  Visible any{kTileKeys, 0}, all{0, kTileKeys};

  RowTile(const PagedAttentionParams& p, const AttentionItem& item, int64_t row, int64_t tile_start,
          const float* prepared) {
    int64_t token = row / p.group, head = row % p.group;
    for (int r = 0; r < kRows; ++r) {
      const int64_t query = (item.first_token + token) * p.num_heads + item.kv_head * p.group + head;
      queries[r] = prepared + query * p.query_stride;
      keys[r] = visible_keys(p, item.first_position + token, tile_start);
      any = any.with(keys[r]);
      all = {keys[r].begin > all.begin ? keys[r].begin : all.begin, keys[r].end < all.end ? keys[r].end : all.end};
      if (++head == p.group) head = 0, ++token;
    }
  }
};

// Rows [row, row + kRows) of the item against a tile. `ahead`: the tile that is fetched in passing, or null.
template <int kRows, class T>
inline void attend_rows(const PagedAttentionParams& p, const AttentionItem& item, int64_t row, int64_t tile_start,
                        const Tile<T>& tile, const Tile<T>* ahead, const float* queries, float* scores,
                        const AttentionState& state) {
  RowTile<kRows> rows(p, item, row, tile_start, queries);
  const auto& [q, keys, any, all_keys] = rows;
  Visible all = all_keys;
  constexpr int kHalf = Vec::kBlock / 2;
  constexpr int64_t kBlockKeys = Vec::kBlock * Vec::kWidth;
  for (int64_t j = any.begin / kBlockKeys * kBlockKeys; j < any.end; j += kBlockKeys) {
    const int64_t c = j / Vec::kWidth;
    const auto score =
        any.end - j > kHalf * Vec::kWidth ? score_block<kRows, Vec::kBlock, T> : score_block<kRows, kHalf, T>;
    score(q, tile.keys + c, ahead != nullptr ? ahead->keys + c : nullptr, tile.key_stride, p.head_dim, scores + j);
  }
  softmax_rows<kRows>(p, any, keys, scores, state, row);
  // The keys that all rows see go through the register tile; what is left and right of them row by row, still in order,
  // so that a row never touches a value it may not see.
  const Tile<T>* const none = nullptr;
  const int64_t dim = p.padded_dim;
  if (all.none()) all = {kTileKeys, kTileKeys};
  for (int r = 0; r < kRows; ++r) {
    const Visible left{keys[r].begin, keys[r].end < all.begin ? keys[r].end : all.begin};
    accumulate_values<1>(scores + r * kTileKeys, tile, none, left, dim, state.acc + (row + r) * dim);
  }
  accumulate_values<kRows>(scores, tile, ahead, all, dim, state.acc + row * dim);
  for (int r = 0; r < kRows; ++r) {
    accumulate_values<1>(scores + r * kTileKeys, tile, none, {all.end, keys[r].end}, dim, state.acc + (row + r) * dim);
  }
}

// Calls f(n, row) for register tiles of n rows that are `rows` in all, n a constant.
template <class F>
inline void for_each_row_tile(int64_t rows, const F& f) {
  int64_t row = 0;
  while (rows - row >= 9 || rows - row == kScoreRows) {
    f(std::integral_constant<int, kScoreRows>(), row);
    row += kScoreRows;
  }
  if (rows - row >= 4) {  // 7 and 8 are better as 4 and the rest than as 6 and the rest
    f(std::integral_constant<int, 4>(), row);
    row += 4;
  }
  if (rows - row == 4) f(std::integral_constant<int, 4>(), row);
  if (rows - row == 3) f(std::integral_constant<int, 3>(), row);
  if (rows - row == 2) f(std::integral_constant<int, 2>(), row);
  if (rows - row == 1) f(std::integral_constant<int, 1>(), row);
}

template <class T>
inline void attend_tile(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start,
                        const Tile<T>& tile, const Tile<T>* ahead, const float* queries, float* scores,
                        const AttentionState& state) {
  for_each_row_tile(item.num_tokens * p.group, [&](auto n, int64_t row) {
    attend_rows<decltype(n)::value>(p, item, row, tile_start, tile, row == 0 ? ahead : nullptr, queries, scores, state);
  });
}

// Positions of whole tiles.
struct Positions {
  int64_t start, end;
};

// The tiles of the partition of which the item sees something.
inline Positions visible_tiles(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition) {
  int64_t start = partition * trivet::kPartitionKeys, end = start + trivet::kPartitionKeys;
  while (start < end && visible_keys(p, item, start).none()) start += kTileKeys;
  while (end > start && visible_keys(p, item, end - kTileKeys).none()) end -= kTileKeys;
  return {start, end};
}

inline void clear(const AttentionState& state, int64_t rows, int64_t padded_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = kMinusInfinity;
    state.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < rows * padded_dim; ++i) state.acc[i] = 0.0f;
}

// The visible tiles of the partition, where they lie: tile_at(item, start, visible) is one, and attend(start, tile,
// ahead) works on it while it fetches the tile `ahead`, or null.
template <class TileAt, class Attend>
inline void attend_in_place(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition,
                            NextPartition next, const TileAt& tile_at, const Attend& attend) {
  const Positions at = visible_tiles(p, item, partition);
  if (at.start == at.end) return;
  const auto visible_tile = [&](const AttentionItem& of, int64_t start) {
    return tile_at(of, start, visible_keys(p, of, start));
  };
  auto tile = visible_tile(item, at.start);
  for (int64_t start = at.start; start < at.end; start += kTileKeys) {
    auto ahead = tile;
    bool fetch = true;
    if (start + kTileKeys < at.end) {
      ahead = visible_tile(item, start + kTileKeys);
    } else {
      const Positions after = next.item != nullptr ? visible_tiles(p, *next.item, next.partition) : Positions{};
      fetch = after.start < after.end;
      if (fetch) ahead = visible_tile(*next.item, after.start);
    }
    attend(start, tile, fetch ? &ahead : nullptr);
    tile = ahead;
  }
}

template <class T>
void attend_partition(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition, NextPartition next,
                      const float* queries, const AttentionScratch& scratch, const AttentionState& state) {
  clear(state, item.num_tokens * p.group, p.padded_dim);
  const bool whole_vectors = p.block_size % Vec::kWidth == 0 && p.head_dim == p.padded_dim;
  if (whole_vectors && item.num_tokens * p.group <= kRowsInPlace) {
    return attend_in_place(
        p, item, partition, next,
        [&](const AttentionItem& of, int64_t start, Visible visible) {
          return tile_in_place<T>(p, of, start, visible);
        },
        [&](int64_t start, const Tile<T>& tile, const Tile<T>* ahead) {
          attend_tile(p, item, start, tile, ahead, queries, scratch.scores, state);
        });
  }
  const Positions at = visible_tiles(p, item, partition);
  const Tile<float>* const none = nullptr;
  for (int64_t start = at.start; start < at.end; start += kTileKeys) {
    const Tile<float> tile = tile_copied<T>(p, item, start, visible_keys(p, item, start), scratch);
    attend_tile(p, item, start, tile, none, queries, scratch.scores, state);
  }
}

// --- Step 4: partitions together, result out ----------------------------------------------------------------------

void merge_states(const PagedAttentionParams& p, int64_t rows, const AttentionState& part,
                  const AttentionState& total) {
  for (int64_t first = 0; first < rows; first += Vec::kWidth) {
    const int64_t count = rows - first < Vec::kWidth ? rows - first : Vec::kWidth;
    float old_scale[Vec::kWidth] = {}, part_scale[Vec::kWidth] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float old_max = total.max[first + i], part_max = part.max[first + i];
      const float new_max = part_max > old_max ? part_max : old_max;
      old_scale[i] = old_max - new_max;
      part_scale[i] = part_max - new_max;
      total.max[first + i] = new_max;
    }
    exp_of(Vec::load(old_scale)).store(old_scale);
    exp_of(Vec::load(part_scale)).store(part_scale);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i;
      if (part.sum[r] == 0.0f) continue;  // the row sees nothing of this partition
      total.sum[r] = total.sum[r] * old_scale[i] + part.sum[r] * part_scale[i];
      float* acc = total.acc + r * p.padded_dim;
      const float* more = part.acc + r * p.padded_dim;
      for (int64_t d = 0; d < p.padded_dim; d += Vec::kWidth) {
        const Vec old = mul(Vec::load(acc + d), Vec::set(old_scale[i]));
        add(old, mul(Vec::load(more + d), Vec::set(part_scale[i]))).store(acc + d);
      }
    }
  }
}

void finish_item(const PagedAttentionParams& p, const AttentionItem& item, const AttentionState& total) {
  for (int64_t r = 0; r < item.num_tokens * p.group; ++r) {
    const int64_t token = item.first_token + r / p.group, head = item.kv_head * p.group + r % p.group;
    float scale = 1.0f / total.sum[r];
    if (p.sinks != nullptr) {  // one more logit in the denominator, without a value
      const float sink = p.sinks[head];
      const float new_max = sink > total.max[r] ? sink : total.max[r];
      const float rescale = exp_of(total.max[r] - new_max);
      scale = rescale / (total.sum[r] * rescale + exp_of(sink - new_max));
    }
    float* out = p.out + (token * p.num_heads + head) * p.head_dim;
    const float* acc = total.acc + r * p.padded_dim;
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] = acc[d] * scale;
  }
}

// --- The tier's table ---------------------------------------------------------------------------------------------

void store_any(const PagedAttentionParams& p, int64_t token, int64_t kv_head) {
  switch (p.kv_dtype) {
    case KvDtype::kFloat32:
      return store_token<float>(p, token, kv_head);
    case KvDtype::kFloat16:
      return store_token<Half>(p, token, kv_head);
    case KvDtype::kBFloat16:
      return store_token<BFloat16>(p, token, kv_head);
    case KvDtype::kE4M3:
    case KvDtype::kInt16:
      return;  // refused by the op
  }
}

void attend_any(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition, NextPartition next,
                const float* queries, const AttentionScratch& scratch, const AttentionState& state) {
  switch (p.kv_dtype) {
    case KvDtype::kFloat32:
      return attend_partition<float>(p, item, partition, next, queries, scratch, state);
    case KvDtype::kFloat16:
      return attend_partition<Half>(p, item, partition, next, queries, scratch, state);
    case KvDtype::kBFloat16:
      return attend_partition<BFloat16>(p, item, partition, next, queries, scratch, state);
    case KvDtype::kE4M3:
    case KvDtype::kInt16:
      return;  // refused by the op
  }
}

constexpr trivet::AttentionKernels kAttentionKernels{prepare_queries, store_any,   attend_any,
                                                     merge_states,    finish_item, false};

}  // namespace
