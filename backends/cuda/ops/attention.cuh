// What the kernels of PagedAttention share: where keys lie, norm and rotation of a head, merging of partial results.
#pragma once

#include "activation.cuh"

namespace trivet::cuda {

constexpr int kThreads = 128;
constexpr int kPartitionKeys = 64;
constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ int64_t kv_index(const AttentionParams& p, int64_t block, int64_t k_or_v, int64_t kv_head,
                                            int64_t offset) {
  const int64_t head_row = (k_or_v * p.num_kv_heads + kv_head) * p.block_size + offset;
  return block * p.block_stride + p.kv_offset * p.block_size + head_row * p.head_dim;
}

// The block of a request that holds `position`; an id outside the cache, which is reported elsewhere, becomes 0.
__device__ __forceinline__ int64_t block_at(const AttentionParams& p, int64_t request, int64_t position) {
  const int64_t block = p.block_table[request * p.max_blocks + position / p.block_size];
  return block >= 0 && block < p.num_blocks ? block : 0;
}

// The request that token t belongs to: the last one that starts at or before it.
__device__ __forceinline__ int64_t request_of(const AttentionParams& p, int64_t token) {
  int64_t low = 0, high = p.num_requests - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (p.query_start_loc[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// --- Checks -------------------------------------------------------------------------------------------------------

// By all threads of a block. Where the borders of the requests make no sense, token 0 reports that and the others are
// not judged by them.
__device__ __forceinline__ void check_step(const ErrorSink& sink, const AttentionParams& p, int64_t token) {
  const int64_t last = p.query_start_loc[p.num_requests];
  if (token == 0) {
    for (int64_t r = threadIdx.x; r < p.num_requests; r += blockDim.x) {
      const int64_t start = p.query_start_loc[r], end = p.query_start_loc[r + 1];
      if (r == 0 && start != 0) report(sink, DeviceErrorCode::kQueryStartFirst, 0, start);
      if (end < start || end > p.num_tokens)
        report(sink, DeviceErrorCode::kQueryStart, r + 1, end, start, p.num_tokens);
      if (p.seq_lens[r] < end - start) report(sink, DeviceErrorCode::kSeqLen, r, p.seq_lens[r], end - start);
    }
    if (threadIdx.x == 0 && last != p.num_tokens) {
      report(sink, DeviceErrorCode::kQueryStartLast, p.num_requests, last, p.num_tokens);
    }
  }
  const int64_t r = request_of(p, token);
  const int64_t start = p.query_start_loc[r], end = p.query_start_loc[r + 1], seq_len = p.seq_lens[r];
  if (p.query_start_loc[0] != 0 || last != p.num_tokens || token < start || token >= end || seq_len < end - start)
    return;
  const int64_t columns = (seq_len + p.block_size - 1) / p.block_size;
  if (threadIdx.x == 0) {
    const int64_t expected = seq_len - (end - token);
    if (p.positions[token] != expected)
      report(sink, DeviceErrorCode::kPosition, token, p.positions[token], expected, r);
    const int64_t slot = p.slot_mapping[token];
    if (slot < -1 || slot >= p.num_blocks * p.block_size) {
      report(sink, DeviceErrorCode::kSlot, token, slot, p.num_blocks * p.block_size - 1);
    }
    if (columns > p.max_blocks) report(sink, DeviceErrorCode::kBlockColumns, columns, r, seq_len, p.max_blocks);
  }
  if (token != end - 1) return;
  for (int64_t b = threadIdx.x; b < columns && b < p.max_blocks; b += blockDim.x) {
    const int32_t block = p.block_table[r * p.max_blocks + b];
    if (block < 0 || block >= p.num_blocks) report(sink, DeviceErrorCode::kBlock, r, b, block, p.num_blocks - 1);
  }
}

// --- Norm and rotation --------------------------------------------------------------------------------------------

// A warp makes a head of a token: store(i, value) gets what the head holds after norm and rotation. `x` is memory of the
// warp for head_dim floats. Heads count query heads, then key heads, then value heads.
template <class Store>
__device__ __forceinline__ void prepare_head(const AttentionParams& p, int64_t token, int64_t head, float* x,
                                             const Store& store) {
  const int lane = threadIdx.x & 31, dim = static_cast<int>(p.head_dim);
  const float* source = p.qkv + (token * (p.num_heads + 2 * p.num_kv_heads) + head) * p.head_dim;
  if (head >= p.num_heads + p.num_kv_heads) {
    for (int i = lane; i < dim; i += 32) store(i, source[i]);
    return;
  }
  const float* norm = head < p.num_heads ? p.q_norm : p.k_norm;
  float sum = 0.0f;
  for (int i = lane; i < dim; i += 32) {
    x[i] = source[i];
    sum = fmaf(x[i], x[i], sum);
  }
  if (norm != nullptr) {
    const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + p.norm_eps);
    for (int i = lane; i < dim; i += 32) x[i] = x[i] * scale * norm[i];
  }
  __syncwarp();
  const int rotary_dim = static_cast<int>(p.rotary_dim), half = rotary_dim / 2;
  const float* cosines = p.cos_sin + token * p.rotary_dim;
  for (int i = lane; i < dim; i += 32) {
    float value = x[i];
    if (i < rotary_dim) {
      const int pair = p.rope_interleaved ? i / 2 : i < half ? i : i - half;
      const bool second = p.rope_interleaved ? (i & 1) != 0 : i >= half;
      const int other = p.rope_interleaved ? (i ^ 1) : second ? i - half : i + half;
      const float turned = __fmul_rn(x[other], cosines[half + pair]);
      value = __fmul_rn(value, cosines[pair]);
      value = second ? __fadd_rn(value, turned) : __fsub_rn(value, turned);
    }
    store(i, value);
  }
  __syncwarp();  // x is free again
}

// Where the key (or value) of a token goes in the cache; null if it is not written.
template <class T>
__device__ __forceinline__ T* slot_of(const AttentionParams& p, int64_t token, int64_t k_or_v, int64_t kv_head) {
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return nullptr;
  return static_cast<T*>(p.kv_cache) + kv_index(p, slot / p.block_size, k_or_v, kv_head, slot % p.block_size);
}

// --- Partial results ----------------------------------------------------------------------------------------------

// State of a row in a partition: head_dim accumulated values, maximum, sum.
constexpr int64_t kStateExtra = 4;  // floats; keeps states 16-byte aligned

__device__ __forceinline__ float* state_of(const AttentionParams& p, int64_t partitions, int64_t token, int64_t head,
                                           int64_t partition) {
  return p.states + ((token * p.num_heads + head) * partitions + partition) * (p.head_dim + kStateExtra);
}

// exp(a - b) where both may be -infinity.
__device__ __forceinline__ float exp_difference(float a, float b) { return a == b ? 1.0f : expf(__fsub_rn(a, b)); }

struct MergeScales {
  float old_scale, part_scale;
};

// One more partition into (max, sum); a partition of which the row sees nothing has sum 0 and changes nothing.
__device__ __forceinline__ MergeScales merge(float& max, float& sum, float part_max, float part_sum) {
  if (part_sum == 0.0f) return {1.0f, 0.0f};
  const float highest = fmaxf(max, part_max);
  const MergeScales scales{exp_difference(max, highest), exp_difference(part_max, highest)};
  sum = __fadd_rn(__fmul_rn(sum, scales.old_scale), __fmul_rn(part_sum, scales.part_scale));
  max = highest;
  return scales;
}

__device__ __forceinline__ float merged(MergeScales s, float old, float part) {
  if (s.part_scale == 0.0f) return __fmul_rn(old, s.old_scale);
  return __fadd_rn(__fmul_rn(old, s.old_scale), __fmul_rn(part, s.part_scale));
}

__device__ __forceinline__ float final_scale(const AttentionParams& p, int64_t head, float max, float sum) {
  if (p.sinks == nullptr) return 1.0f / sum;
  const float sink = p.sinks[head], highest = fmaxf(max, sink);  // one more logit in the denominator, without a value
  const float rescale = exp_difference(max, highest);
  return rescale / __fadd_rn(__fmul_rn(sum, rescale), exp_difference(sink, highest));
}

}  // namespace trivet::cuda
