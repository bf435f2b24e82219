// The kernels of PagedAttention over the Vec of the including tier (after vec_*.h). Every row goes through the same
// operations in the same order whatever rows it is tiled with, so decode, chunked and whole prefill agree bit for bit.
#pragma once

#include "paged_attention_kernel.h"
#include "vec_math.h"

namespace {

using trivet::AttentionItem;
using trivet::AttentionScratch;
using trivet::AttentionState;
using trivet::kTileKeys;
using trivet::KvDtype;
using trivet::PagedAttentionParams;

constexpr int kTileRows = 4;  // rows of a register tile
constexpr float kMinusInfinity = -HUGE_VALF;

// --- Step 1: queries, and keys and values into the cache ---------------------------------------------------------

// Rotates the first rotary_dim elements of a head; cos and sin hold rotary_dim / 2 values each.
inline void rotate(const PagedAttentionParams& p, const float* cos_sin, float* x) {
  const int64_t half = p.rotary_dim / 2;
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  if (p.rope_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
    return;
  }
  int64_t i = 0;
  for (; i + Vec::kWidth <= half; i += Vec::kWidth) {
    const Vec a = Vec::load(x + i), b = Vec::load(x + half + i), c = Vec::load(cosines + i), s = Vec::load(sines + i);
    sub(mul(a, c), mul(b, s)).store(x + i);
    add(mul(b, c), mul(a, s)).store(x + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosines[i] - b * sines[i];
    x[half + i] = b * cosines[i] + a * sines[i];
  }
}

inline void normalise_and_rotate(const PagedAttentionParams& p, const float* x, const float* norm, const float* cos_sin,
                                 float* y) {
  if (norm != nullptr) {
    rms_norm_row(x, norm, p.head_dim, p.norm_eps, y);
  } else {
    for (int64_t i = 0; i < p.head_dim; ++i) y[i] = x[i];
  }
  rotate(p, cos_sin, y);
}

// Element index of (block, K = 0 or V = 1, kv_head, offset in the block).
inline int64_t kv_index(const PagedAttentionParams& p, int64_t block, int64_t k_or_v, int64_t kv_head, int64_t offset) {
  const int64_t head_row = (k_or_v * p.num_kv_heads + kv_head) * p.block_size + offset;
  return block * p.block_stride + p.kv_offset * p.block_size + head_row * p.head_dim;
}

template <class T>
inline void store_row(const float* x, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::load(x + i).store(out + i);
  for (; i < n; ++i) from_float(x[i], out + i);
}

template <class T>
void prepare_token(const PagedAttentionParams& p, int64_t token, float* q) {
  const float* row = p.qkv + token * (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
  const float* cos_sin = p.cos_sin + token * p.rotary_dim;
  for (int64_t head = 0; head < p.num_heads; ++head) {
    float* y = q + head * p.head_dim;
    normalise_and_rotate(p, row + head * p.head_dim, p.q_norm, cos_sin, y);
    for (int64_t i = 0; i < p.head_dim; ++i) y[i] *= p.scale;
  }
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  T* cache = static_cast<T*>(p.kv_cache);
  const float* keys = row + p.num_heads * p.head_dim;
  const float* values = keys + p.num_kv_heads * p.head_dim;
  for (int64_t head = 0; head < p.num_kv_heads; ++head) {
    float key[trivet::kMaxHeadDim];
    normalise_and_rotate(p, keys + head * p.head_dim, p.k_norm, cos_sin, key);
    store_row(key, p.head_dim, cache + kv_index(p, block, 0, head, offset));
    store_row(values + head * p.head_dim, p.head_dim, cache + kv_index(p, block, 1, head, offset));
  }
}

// --- Step 2: one tile of keys and values, read back from the cache as float32 -------------------------------------

// Where the keys and values of a tile's positions [0, end) lie in the cache.
template <class T>
struct TileRows {
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  int64_t end = 0;

  TileRows(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start, int64_t begin, int64_t end)
      : end(end) {
    const int32_t* table = p.block_table + item.request * p.max_blocks;
    const T* cache = static_cast<const T*>(p.kv_cache);
    for (int64_t j = begin; j < end; ++j) {
      const int64_t position = tile_start + j;
      const int64_t block = table[position / p.block_size], offset = position % p.block_size;
      keys[j] = cache + kv_index(p, block, 0, item.kv_head, offset);
      values[j] = cache + kv_index(p, block, 1, item.kv_head, offset);
    }
  }
};

// Fetches the lines that elements [d, d + kWidth) of rows [begin, end) start. A head's rows are too short for the
// hardware prefetcher to follow.
template <class T>
inline void prefetch_rows(const T* const* rows, int64_t begin, int64_t end, int64_t d) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (d % kLine != 0) return;
  for (int64_t j = begin; j < end; ++j) __builtin_prefetch(rows[j] + d, 0, 2);
}

// keys[d][j] for the tile's keys j in [begin, end), in whole vectors of keys: the first and last key fill them up.
template <class T>
inline void pack_keys(const PagedAttentionParams& p, const T* const* rows, int64_t begin, int64_t end,
                      const TileRows<T>& next, float* keys) {
  constexpr int64_t kWidth = Vec::kWidth;
  for (int64_t j = begin / kWidth * kWidth; j < end; j += kWidth) {
    const T* square_rows[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
      square_rows[i] = rows[j + i < begin ? begin : j + i < end ? j + i : end - 1];
    }
    Vec square[kWidth];
    int64_t d = 0;
    for (; d + kWidth <= p.head_dim; d += kWidth) {
      for (int64_t i = 0; i < kWidth; ++i) square[i] = Vec::load(square_rows[i] + d);
      prefetch_rows(next.keys, j, j + kWidth < next.end ? j + kWidth : next.end, d);
      transpose(square);
      for (int64_t i = 0; i < kWidth; ++i) square[i].store(keys + (d + i) * kTileKeys + j);
    }
    if (d == p.head_dim) continue;
    for (int64_t i = 0; i < kWidth; ++i) square[i] = load_first(square_rows[i] + d, p.head_dim - d);
    transpose(square);
    for (int64_t i = 0; d + i < p.head_dim; ++i) square[i].store(keys + (d + i) * kTileKeys + j);
  }
}

template <class T>
inline void pack_values(const PagedAttentionParams& p, const T* const* rows, int64_t begin, int64_t end,
                        const TileRows<T>& next, float* values) {
  for (int64_t j = begin; j < end; ++j) {
    float* out = values + j * p.padded_dim;
    int64_t d = 0;
    for (; d + Vec::kWidth <= p.head_dim; d += Vec::kWidth) {
      Vec::load(rows[j] + d).store(out + d);
      prefetch_rows(next.values, j, j < next.end ? j + 1 : j, d);
    }
    for (; d < p.padded_dim; d += Vec::kWidth) load_first(rows[j] + d, p.head_dim - d).store(out + d);
  }
}

// The rows of the tile's keys that are visible up to last_position.
template <class T>
TileRows<T> rows_of_tile(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start, int64_t begin,
                         int64_t last_position) {
  const int64_t end = last_position + 1 - tile_start;
  return {p, item, tile_start, begin, end < 0 ? 0 : end < kTileKeys ? end : kTileKeys};
}

// --- Step 3: scores, softmax, values for the rows of an item ------------------------------------------------------

// scores[r][j] = sum over d, in order, of queries[r][d] * keys[d][j] for kBlock vectors of keys.
template <int kRows>
inline void score_block(const float* const* queries, const float* keys, int64_t head_dim, float* scores) {
  Vec sums[kRows][Vec::kBlock];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < Vec::kBlock; ++c) sums[r][c] = Vec::set(0.0f);
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec k[Vec::kBlock];
    for (int c = 0; c < Vec::kBlock; ++c) k[c] = Vec::load(keys + d * kTileKeys + c * Vec::kWidth);
    for (int r = 0; r < kRows; ++r) {
      const Vec q = Vec::set(queries[r][d]);
      for (int c = 0; c < Vec::kBlock; ++c) sums[r][c] = mul_add(q, k[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < Vec::kBlock; ++c) sums[r][c].store(scores + r * kTileKeys + c * Vec::kWidth);
  }
}

// acc[r] += sum over keys j in [begin, end), in order, of scores[r][j] * values(j).
template <int kRows, class Values>
inline void accumulate_values(const float* scores, const Values& values, int64_t begin, int64_t end, int64_t padded_dim,
                              float* acc) {
  if (begin >= end) return;
  constexpr int64_t kBlockDims = Vec::kBlock * Vec::kWidth;
  int64_t d = 0;
  for (; d + kBlockDims <= padded_dim; d += kBlockDims) {
    Vec sums[kRows][Vec::kBlock];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < Vec::kBlock; ++c) sums[r][c] = Vec::load(acc + r * padded_dim + d + c * Vec::kWidth);
    }
    for (int64_t j = begin; j < end; ++j) {
      Vec v[Vec::kBlock];
      for (int c = 0; c < Vec::kBlock; ++c) v[c] = Vec::load(values(j) + d + c * Vec::kWidth);
      for (int r = 0; r < kRows; ++r) {
        const Vec s = Vec::set(scores[r * kTileKeys + j]);
        for (int c = 0; c < Vec::kBlock; ++c) sums[r][c] = mul_add(s, v[c], sums[r][c]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < Vec::kBlock; ++c) sums[r][c].store(acc + r * padded_dim + d + c * Vec::kWidth);
    }
  }
  for (; d < padded_dim; d += Vec::kWidth) {
    Vec sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = Vec::load(acc + r * padded_dim + d);
    for (int64_t j = begin; j < end; ++j) {
      const Vec v = Vec::load(values(j) + d);
      for (int r = 0; r < kRows; ++r) sums[r] = mul_add(Vec::set(scores[r * kTileKeys + j]), v, sums[r]);
    }
    for (int r = 0; r < kRows; ++r) sums[r].store(acc + r * padded_dim + d);
  }
}

// Keys of a tile that a row may see.
struct Visible {
  int64_t begin, end;
};

inline Visible visible_keys(const PagedAttentionParams& p, int64_t position, int64_t tile_start) {
  const int64_t first = p.sliding_window > 0 ? position - p.sliding_window + 1 : 0;
  const int64_t begin = first > tile_start ? first - tile_start : 0;
  const int64_t end = position + 1 - tile_start;
  return {begin, end < 0 ? 0 : end < kTileKeys ? end : kTileKeys};
}

// Turns a row's scores into weights exp(score - max) with the new running maximum; rescales what was there before.
inline void softmax_row(const PagedAttentionParams& p, Visible keys, float* scores, const AttentionState& state,
                        int64_t row) {
  constexpr int64_t kWidth = Vec::kWidth;
  const int64_t first = keys.begin / kWidth * kWidth;
  Vec highest = Vec::set(kMinusInfinity);
  for (int64_t j = first; j < keys.end; j += kWidth) {
    Vec s = Vec::load(scores + j);
    if (p.soft_cap > 0.0f) s = mul(Vec::set(p.soft_cap), tanh_of(div(s, Vec::set(p.soft_cap))));
    s = keep_lanes(s, static_cast<int>(keys.begin - j), static_cast<int>(keys.end - j), kMinusInfinity);
    s.store(scores + j);
    highest = max(highest, s);
  }
  const float tile_max = reduce_max(highest);
  const float old_max = state.max[row];
  const float new_max = old_max > tile_max ? old_max : tile_max;
  Vec sum = Vec::set(0.0f);
  for (int64_t j = first; j < keys.end; j += kWidth) {
    const Vec weight = exp_of(sub(Vec::load(scores + j), Vec::set(new_max)));
    weight.store(scores + j);
    sum = add(sum, weight);
  }
  const float rescale = old_max == new_max ? 1.0f : exp_of(old_max - new_max);  // exp(0) is exactly 1
  state.max[row] = new_max;
  state.sum[row] = state.sum[row] * rescale + reduce_add(sum);
  if (rescale == 1.0f) return;
  float* acc = state.acc + row * p.padded_dim;
  for (int64_t d = 0; d < p.padded_dim; d += kWidth) mul(Vec::load(acc + d), Vec::set(rescale)).store(acc + d);
}

// Rows [row, row + kRows) of the item against the tile of packed keys; values(j): the elements of value j.
template <int kRows, class Values>
inline void attend_rows(const PagedAttentionParams& p, const AttentionItem& item, int64_t row, int64_t tile_start,
                        const float* queries, const AttentionScratch& scratch, const Values& values,
                        const AttentionState& state) {
  const float* q[kRows];
  Visible keys[kRows];
  Visible any{kTileKeys, 0}, all{0, kTileKeys};
  for (int r = 0; r < kRows; ++r) {
    const int64_t token = (row + r) / p.group, head = item.kv_head * p.group + (row + r) % p.group;
    q[r] = queries + ((item.first_token + token) * p.num_heads + head) * p.head_dim;
    keys[r] = visible_keys(p, item.first_position + token, tile_start);
    if (keys[r].begin < keys[r].end) {
      any = {keys[r].begin < any.begin ? keys[r].begin : any.begin, keys[r].end > any.end ? keys[r].end : any.end};
    }
    all = {keys[r].begin > all.begin ? keys[r].begin : all.begin, keys[r].end < all.end ? keys[r].end : all.end};
  }
  constexpr int64_t kBlockKeys = Vec::kBlock * Vec::kWidth;
  for (int64_t j = any.begin / kBlockKeys * kBlockKeys; j < any.end; j += kBlockKeys) {
    score_block<kRows>(q, scratch.keys + j, p.head_dim, scratch.scores + j);
  }
  for (int r = 0; r < kRows; ++r) {
    if (keys[r].begin < keys[r].end) softmax_row(p, keys[r], scratch.scores + r * kTileKeys, state, row + r);
  }
  // The keys that all rows see go through the register tile; what is left and right of them row by row, still in order,
  // so that a row never touches a value it may not see.
  const int64_t dim = p.padded_dim;
  if (all.begin >= all.end) all = {kTileKeys, kTileKeys};
  for (int r = 0; r < kRows; ++r) {
    const int64_t end = keys[r].end < all.begin ? keys[r].end : all.begin;
    accumulate_values<1>(scratch.scores + r * kTileKeys, values, keys[r].begin, end, dim, state.acc + (row + r) * dim);
  }
  accumulate_values<kRows>(scratch.scores, values, all.begin, all.end, dim, state.acc + row * dim);
  for (int r = 0; r < kRows; ++r) {
    accumulate_values<1>(scratch.scores + r * kTileKeys, values, all.end, keys[r].end, dim,
                         state.acc + (row + r) * dim);
  }
}

template <class Values>
inline void attend_tile(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start,
                        const float* queries, const AttentionScratch& scratch, const Values& values,
                        const AttentionState& state) {
  const int64_t rows = item.num_tokens * p.group;
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    attend_rows<kTileRows>(p, item, r, tile_start, queries, scratch, values, state);
  }
  if (rows - r == 3) attend_rows<3>(p, item, r, tile_start, queries, scratch, values, state);
  if (rows - r == 2) attend_rows<2>(p, item, r, tile_start, queries, scratch, values, state);
  if (rows - r == 1) attend_rows<1>(p, item, r, tile_start, queries, scratch, values, state);
}

template <class T>
void attend_partition(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition, const float* queries,
                      const AttentionScratch& scratch, const AttentionState& state) {
  const int64_t rows = item.num_tokens * p.group;
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = kMinusInfinity;
    state.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < rows * p.padded_dim; ++i) state.acc[i] = 0.0f;
  // Few rows convert the values on the way faster than they write and read them once more.
  const bool values_in_place = rows <= 2 * kTileRows && p.head_dim == p.padded_dim;
  const int64_t last_position = item.first_position + item.num_tokens - 1;
  for (int64_t tile = 0; tile < trivet::kPartitionKeys / kTileKeys; ++tile) {
    const int64_t tile_start = partition * trivet::kPartitionKeys + tile * kTileKeys;
    const int64_t begin = visible_keys(p, item.first_position, tile_start).begin;
    const int64_t end = visible_keys(p, last_position, tile_start).end;
    if (begin >= end) continue;
    const TileRows<T> tile_rows = rows_of_tile<T>(p, item, tile_start, begin, last_position);
    const TileRows<T> next = rows_of_tile<T>(p, item, tile_start + kTileKeys, 0, last_position);
    pack_keys(p, tile_rows.keys, begin, end, next, scratch.keys);
    if (values_in_place) {
      for (int64_t d = 0; d < p.head_dim; d += Vec::kWidth) prefetch_rows(next.values, 0, next.end, d);
      const auto values = [&](int64_t j) { return tile_rows.values[j]; };
      attend_tile(p, item, tile_start, queries, scratch, values, state);
    } else {
      pack_values(p, tile_rows.values, begin, end, next, scratch.values);
      const auto values = [&](int64_t j) { return scratch.values + j * p.padded_dim; };
      attend_tile(p, item, tile_start, queries, scratch, values, state);
    }
  }
}

// --- Step 4: partitions together, result out ----------------------------------------------------------------------

void merge_states(const PagedAttentionParams& p, int64_t rows, const AttentionState& part,
                  const AttentionState& total) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.sum[r] == 0.0f) continue;  // the row sees nothing of this partition
    const float new_max = part.max[r] > total.max[r] ? part.max[r] : total.max[r];
    const float old_scale = exp_of(total.max[r] - new_max), part_scale = exp_of(part.max[r] - new_max);
    total.max[r] = new_max;
    total.sum[r] = total.sum[r] * old_scale + part.sum[r] * part_scale;
    float* acc = total.acc + r * p.padded_dim;
    const float* more = part.acc + r * p.padded_dim;
    for (int64_t d = 0; d < p.padded_dim; d += Vec::kWidth) {
      const Vec old = mul(Vec::load(acc + d), Vec::set(old_scale));
      add(old, mul(Vec::load(more + d), Vec::set(part_scale))).store(acc + d);
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

void prepare_any(const PagedAttentionParams& p, int64_t token, float* q) {
  switch (p.kv_dtype) {
    case KvDtype::kFloat32:
      return prepare_token<float>(p, token, q);
    case KvDtype::kFloat16:
      return prepare_token<Half>(p, token, q);
    case KvDtype::kBFloat16:
      return prepare_token<BFloat16>(p, token, q);
  }
}

void attend_any(const PagedAttentionParams& p, const AttentionItem& item, int64_t partition, const float* queries,
                const AttentionScratch& scratch, const AttentionState& state) {
  switch (p.kv_dtype) {
    case KvDtype::kFloat32:
      return attend_partition<float>(p, item, partition, queries, scratch, state);
    case KvDtype::kFloat16:
      return attend_partition<Half>(p, item, partition, queries, scratch, state);
    case KvDtype::kBFloat16:
      return attend_partition<BFloat16>(p, item, partition, queries, scratch, state);
  }
}

constexpr trivet::AttentionKernels kAttentionKernels{prepare_any, attend_any, merge_states, finish_item};

}  // namespace
