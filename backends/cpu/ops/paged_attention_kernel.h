// What the tiers of PagedAttention share: parameters, work items and the table of kernels a tier offers.
#pragma once

#include <cstdint>

#include "kv_types.h"

namespace trivet {

// Keys are visited in tiles and partitions that are fixed by absolute position, whatever the step's batch looks like:
// softmax runs online over the tiles of a partition, and the partitions are merged in order.
inline constexpr int64_t kTileKeys = 64;
inline constexpr int64_t kPartitionKeys = 256;
inline constexpr int kScoreRows = 6;  // rows of a register tile

struct PagedAttentionParams {
  int64_t num_tokens, num_requests, num_blocks, max_blocks;
  int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
  int64_t group;         // query heads per KV head
  int64_t padded_dim;    // head_dim in whole vectors of any tier: elements of an accumulator row
  int64_t block_size;    // tokens
  int64_t stored_dim;    // elements of a key or value in the cache, its scale counted in
  int64_t kv_offset;     // KV elements per token that earlier layers hold, their scales counted in
  int64_t query_stride;  // floats from one prepared query head to the next
  int64_t sliding_window;
  float scale, soft_cap, norm_eps;
  bool rope_interleaved;
  KvDtype kv_dtype;
  const float* qkv;                // [num_tokens, (num_heads + 2 num_kv_heads) head_dim]
  const float* cos_sin;            // [num_tokens, rotary_dim]
  const int32_t* positions;        // [num_tokens]
  const int32_t* slot_mapping;     // [num_tokens]
  const int32_t* block_table;      // [num_requests, max_blocks]
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* seq_lens;         // [num_requests]
  const float* q_norm;             // [head_dim] or null
  const float* k_norm;             // [head_dim] or null
  const float* sinks;              // [num_heads] or null
  void* kv_cache;                  // laid out as opset.py says
  float* out;                      // [num_tokens, num_heads head_dim]
};

// Consecutive tokens of one request with the heads that share one KV head. Row i is token first_token + i / group, head
// kv_head * group + i % group.
//
// Requests that follow each other with one token each and share their first keys are one item as far as these go: its
// tokens then are of requests `request` and later, and first_position is the lowest of theirs.
struct AttentionItem {
  int64_t request, kv_head, first_token, num_tokens;
  int64_t first_position;         // of first_token
  int64_t shared_partitions = 0;  // which several requests share, and which all rows see whole; 0: of one request
};

// Softmax state of an item's rows: running maximum, sum and weighted values.
struct AttentionState {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* acc;  // [rows, padded_dim]
};

// Per-thread scratch, floats.
struct AttentionScratch {
  float* keys;    // [head_dim, kTileKeys]
  float* values;  // [kTileKeys, padded_dim]
  float* scores;  // [kScoreRows, kTileKeys]
};

// What a thread attends after the partition at hand: its first tile is fetched meanwhile. No item: not known.
struct NextPartition {
  const AttentionItem* item = nullptr;
  int64_t partition = 0;
};

struct AttentionKernels {
  // Normalises, rotates and scales the token's query heads that share the KV head, into q [group, query_stride].
  void (*prepare)(const PagedAttentionParams& params, int64_t token, int64_t kv_head, float* q);
  // Stores the token's key and value of the KV head, if it has a slot.
  void (*store)(const PagedAttentionParams& params, int64_t token, int64_t kv_head);
  // The state of the item over the keys of one partition, starting from nothing. queries: [num_tokens, num_heads,
  // query_stride].
  void (*attend)(const PagedAttentionParams& params, const AttentionItem& item, int64_t partition, NextPartition next,
                 const float* queries, const AttentionScratch& scratch, const AttentionState& state);
  // total = total merged with the partition that follows it.
  void (*merge)(const PagedAttentionParams& params, int64_t rows, const AttentionState& part,
                const AttentionState& total);
  // Adds the sinks, divides by the sums and writes the item's part of params.out.
  void (*finish)(const PagedAttentionParams& params, const AttentionItem& item, const AttentionState& total);
  bool has_int16;  // KvDtype::kInt16
};

extern const AttentionKernels kAttentionScalar, kAttentionBaseline, kAttentionAvx2, kAttentionAvx512Vnni,
    kAttentionNeon;

}  // namespace trivet
