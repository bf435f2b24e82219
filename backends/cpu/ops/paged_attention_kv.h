// PagedAttention's way into the KV cache and out of it: keys and values are written there, and read back in tiles.
#pragma once

#include "paged_attention_kernel.h"
#include "vec_math.h"

namespace {

using trivet::AttentionItem;
using trivet::AttentionScratch;
using trivet::kTileKeys;
using trivet::PagedAttentionParams;

// --- Step 1: queries, and keys and values into the cache ---------------------------------------------------------

// Rotates the first rotary_dim elements of a head from x to y, which may be the same; cos and sin hold rotary_dim / 2
// values each.
inline void rotate(const PagedAttentionParams& p, const float* cos_sin, const float* x, float* y) {
  const int64_t half = p.rotary_dim / 2;
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  if (x != y) {
    for (int64_t i = p.rotary_dim; i < p.head_dim; ++i) y[i] = x[i];
  }
  if (p.rope_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cosines[i] - b * sines[i];
      y[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
    return;
  }
  int64_t i = 0;
  for (; i + Vec::kWidth <= half; i += Vec::kWidth) {
    const Vec a = Vec::load(x + i), b = Vec::load(x + half + i), c = Vec::load(cosines + i), s = Vec::load(sines + i);
    sub(mul(a, c), mul(b, s)).store(y + i);
    add(mul(b, c), mul(a, s)).store(y + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cosines[i] - b * sines[i];
    y[half + i] = b * cosines[i] + a * sines[i];
  }
}

inline void normalise_and_rotate(const PagedAttentionParams& p, const float* x, const float* norm, const float* cos_sin,
                                 float* y) {
  if (norm != nullptr) rms_norm_row(x, norm, p.head_dim, p.norm_eps, y);
  rotate(p, cos_sin, norm != nullptr ? y : x, y);
}

// The keys of one head in a block, [head_dim, block_size]; its values, [block_size, head_dim], follow them. A layer's
// blocks lie side by side: see KV layout in backends/contract/opset.py.
template <class T>
inline T* keys_of_block(const PagedAttentionParams& p, int64_t block, int64_t kv_head) {
  const int64_t rows = p.kv_offset * p.num_blocks + (block * p.num_kv_heads + kv_head) * 2 * p.stored_dim;
  return static_cast<T*>(p.kv_cache) + rows * p.block_size;
}

template <class T>
inline void convert_row(const float* x, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::load(x + i).store(out + i);
  for (; i < n; ++i) from_float(x[i], out + i);
}

// What a product left of a token for one KV head.
struct TokenHeads {
  const float* queries;  // [group, head_dim]
  const float* key;
  const float* value;
  const float* cos_sin;

  TokenHeads(const PagedAttentionParams& p, int64_t token, int64_t kv_head)
      : cos_sin(p.cos_sin + token * p.rotary_dim) {
    const float* row = p.qkv + token * (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
    queries = row + kv_head * p.group * p.head_dim;
    key = row + (p.num_heads + kv_head) * p.head_dim;
    value = key + p.num_kv_heads * p.head_dim;
  }
};

inline void prepare_queries(const PagedAttentionParams& p, int64_t token, int64_t kv_head, float* q) {
  const TokenHeads heads(p, token, kv_head);
  for (int64_t head = 0; head < p.group; ++head) {
    float* y = q + head * p.query_stride;
    normalise_and_rotate(p, heads.queries + head * p.head_dim, p.q_norm, heads.cos_sin, y);
    for (int64_t i = 0; i < p.head_dim; ++i) y[i] *= p.scale;
  }
}

template <class T>
void store_token(const PagedAttentionParams& p, int64_t token, int64_t kv_head) {
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const TokenHeads heads(p, token, kv_head);
  const int64_t offset = slot % p.block_size;
  float key[trivet::kMaxHeadDim];
  T stored[trivet::kMaxHeadDim];
  normalise_and_rotate(p, heads.key, p.k_norm, heads.cos_sin, key);
  convert_row(key, p.head_dim, stored);
  T* out = keys_of_block<T>(p, slot / p.block_size, kv_head);
  for (int64_t d = 0; d < p.head_dim; ++d) out[d * p.block_size + offset] = stored[d];
  convert_row(heads.value, p.head_dim, out + (p.block_size + offset) * p.head_dim);
}

// --- Step 2: the keys and values of a tile ------------------------------------------------------------------------

// Keys of a tile that a row may see.
struct Visible {
  int64_t begin, end;

  bool none() const { return begin >= end; }

  // The smallest range that has these keys and those of `other`.
  Visible with(Visible other) const {
    if (other.none()) return *this;
    return {other.begin < begin ? other.begin : begin, other.end > end ? other.end : end};
  }
};

inline Visible visible_keys(const PagedAttentionParams& p, int64_t position, int64_t tile_start) {
  const int64_t first = p.sliding_window > 0 ? position - p.sliding_window + 1 : 0;
  const int64_t begin = first > tile_start ? first - tile_start : 0;
  const int64_t end = position + 1 - tile_start;
  return {begin, end < 0 ? 0 : end < kTileKeys ? end : kTileKeys};
}

inline Visible visible_keys(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start) {
  const int64_t last_position = item.first_position + item.num_tokens - 1;
  return {visible_keys(p, item.first_position, tile_start).begin, visible_keys(p, last_position, tile_start).end};
}

// A tile by vectors of keys: vector c has the keys c * kWidth + i. Their elements d are the vector at keys[c] +
// d * key_stride; the elements of value i are at values[c] + i * value_stride. A vector that is not visible is the
// nearest one that is: register tiles may read it.
template <class T>
struct Tile {
  static constexpr int64_t kVectors = kTileKeys / Vec::kWidth;
  const T* keys[kVectors];
  const T* values[kVectors];
  int64_t key_stride, value_stride;
};

// Calls f(j, keys, values, run) for every run of visible keys [j, j + run) in one block: `keys` is element 0 of key j,
// `values` element 0 of value j.
template <class T, class F>
inline void for_each_run(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start, Visible visible,
                         const F& f) {
  const int64_t first = tile_start + visible.begin;
  const int32_t* block = p.block_table + item.request * p.max_blocks + first / p.block_size;
  int64_t offset = first % p.block_size;
  for (int64_t j = visible.begin, run; j < visible.end; j += run, ++block, offset = 0) {
    run = p.block_size - offset < visible.end - j ? p.block_size - offset : visible.end - j;
    const T* keys = keys_of_block<T>(p, *block, item.kv_head);
    f(j, keys + offset, keys + (p.block_size + offset) * p.head_dim, run);
  }
}

// The visible part of the tile as it lies in the cache, whose blocks hold whole vectors of keys.
template <class T>
inline Tile<T> tile_in_place(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start,
                             Visible visible) {
  constexpr int64_t kWidth = Vec::kWidth, kVectors = Tile<T>::kVectors;
  Tile<T> tile;
  tile.key_stride = p.block_size;
  tile.value_stride = p.head_dim;
  const int64_t first = visible.begin / kWidth, end = (visible.end - 1) / kWidth + 1;
  const Visible whole{first * kWidth, end * kWidth};
  for_each_run<T>(p, item, tile_start, whole, [&](int64_t j, const T* keys, const T* values, int64_t run) {
    for (int64_t i = 0; i < run; i += kWidth) {
      tile.keys[(j + i) / kWidth] = keys + i;
      tile.values[(j + i) / kWidth] = values + i * p.head_dim;
    }
  });
  for (int64_t c = 0; c < kVectors; ++c) {
    const int64_t nearest = c < first ? first : c < end ? c : end - 1;
    tile.keys[c] = tile.keys[nearest];
    tile.values[c] = tile.values[nearest];
  }
  return tile;
}

template <class T>
inline void copy_row(const T* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::load(x + i).store(out + i);
  for (; i < n; ++i) out[i] = to_float(x[i]);
}

// The same in scratch, as float32: for many rows, for blocks that end inside a vector of keys, and for heads that end
// inside a vector of values (which zeros fill up).
template <class T>
inline Tile<float> tile_copied(const PagedAttentionParams& p, const AttentionItem& item, int64_t tile_start,
                               Visible visible, const AttentionScratch& scratch) {
  Tile<float> tile;
  tile.key_stride = kTileKeys;
  tile.value_stride = p.padded_dim;
  for (int64_t c = 0; c < tile.kVectors; ++c) {
    tile.keys[c] = scratch.keys + c * Vec::kWidth;
    tile.values[c] = scratch.values + c * Vec::kWidth * p.padded_dim;
  }
  for_each_run<T>(p, item, tile_start, visible, [&](int64_t j, const T* keys, const T* values, int64_t run) {
    for (int64_t d = 0; d < p.head_dim; ++d) copy_row(keys + d * p.block_size, run, scratch.keys + d * kTileKeys + j);
    for (int64_t i = 0; i < run; ++i) {
      float* out = scratch.values + (j + i) * p.padded_dim;
      copy_row(values + i * p.head_dim, p.head_dim, out);
      for (int64_t d = p.head_dim; d < p.padded_dim; ++d) out[d] = 0.0f;
    }
  });
  return tile;
}

}  // namespace
