// PagedAttention with float32 arithmetic. An item (some consecutive tokens of a request, one KV head with a part of its
// query heads) goes over the keys, which are cut into partitions at fixed absolute positions. In a step of many tokens
// kernel 1 makes the queries (norm, rotation, scale) and writes keys and values to their slots, and an item of kernel 2
// merges its partitions as it goes. In a step of few tokens there is kernel 2 only: every partition has a block of its
// own, which makes its queries, and the last block of an item merges all of them. Both do the same operations in the
// same order, so a row's bits depend neither on the batch nor on the chunking of its prompt.
#include <type_traits>

#include "attention.cuh"

namespace trivet::cuda {
namespace {

constexpr int64_t kSplitStates = 1 << 14;  // and so many partial results of a head
constexpr int kMaxRows = 16;               // query rows of an item

// --- Kernel 1 -----------------------------------------------------------------------------------------------------

// A warp per token and head: query heads, then key heads, then value heads.
template <class T, int kEach>
__global__ void __launch_bounds__(kThreads) prepare_kernel(ErrorSink sink, AttentionParams p) {
  extern __shared__ float staged[];  // [kThreads / 32][head_dim]
  wait_for_previous();
  const int64_t token = blockIdx.x, warp = threadIdx.x >> 5, head = blockIdx.y * (kThreads / 32) + warp;
  if (blockIdx.y == 0) check_step(sink, p, token);
  if (head >= p.num_heads + 2 * p.num_kv_heads) return;
  float* x = staged + warp * p.head_dim;
  if (head < p.num_heads) {
    float* queries = p.queries + (token * p.num_heads + head) * p.head_dim;
    prepare_head<kEach>(p, token, head, x, [&](int i, float value) { queries[i] = value * p.scale; });
    return;
  }
  const int64_t key_head = head - p.num_heads;
  T* target = slot_of<T>(p, token, key_head / p.num_kv_heads, key_head % p.num_kv_heads);
  if (target == nullptr) return;
  prepare_head<kEach>(p, token, head, x, [&](int i, float value) { target[i] = from_float<T>(value); });
}

// --- Kernel 2 -----------------------------------------------------------------------------------------------------

// The item of a block: request and first token. Blocks run over items of all requests; the last ones find none.
__device__ __forceinline__ void find_item(const AttentionParams& p, int tokens_per_item, int64_t (&item)[2]) {
  int64_t left = blockIdx.x;
  item[0] = -1;
  if (tokens_per_item == 1) {
    item[0] = request_of(p, left);
    item[1] = left;
    return;
  }
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const int64_t count = p.query_start_loc[r + 1] - p.query_start_loc[r];
    const int64_t items = (count + tokens_per_item - 1) / tokens_per_item;
    if (left < items) {
      item[0] = r;
      item[1] = p.query_start_loc[r] + (items - 1 - left) * tokens_per_item;  // the longest first
      return;
    }
    left -= items;
  }
}

// kKeys per tile; kSlots * kThreads >= head_dim; kRows query rows per item.
template <class T, int kKeys, int kSlots, int kRows, bool kSplit>
__global__ void __launch_bounds__(kThreads)
    attend_kernel(ErrorSink sink, AttentionParams p, int tokens_per_item, int heads_per_item, int partitions) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int dim = static_cast<int>(p.head_dim), key_stride = dim + 16 / static_cast<int>(sizeof(T));
  T* keys = reinterpret_cast<T*>(memory);                           // [kKeys][key_stride]
  T* values = keys + kKeys * key_stride;                            // [kKeys][dim]
  float* queries = reinterpret_cast<float*>(values + kKeys * dim);  // [kRows][dim]
  float* scores = queries + kRows * dim;                            // [kKeys][kRows]
  __shared__ float row_max[kRows], row_sum[kRows], row_rescale[kRows];
  float* staged = scores + kKeys * kRows;  // of a split step: [kThreads / 32][dim], for prepare_head
  __shared__ int64_t key_rows[kKeys], item[2];
  // Of a split step: the slots that it writes, the token that makes a key of the tile or -1, whether this block is the
  // last one of its item.
  __shared__ int slots[kSplitTokens], new_tokens[kKeys];
  __shared__ bool is_last;
  if constexpr (!kSplit) wait_for_previous();  // a split step first fetches what earlier steps have written

  const int thread = threadIdx.x, warp = thread >> 5;
  if (thread == 0) find_item(p, tokens_per_item, item);
  if constexpr (kSplit) {
    if (blockIdx.y == 0 && blockIdx.z == 0) check_step(sink, p, blockIdx.x);
    for (int i = thread; i < p.num_tokens; i += kThreads) slots[i] = p.slot_mapping[i];
  }
  __syncthreads();
  const int64_t request = item[0], first_token = item[1];
  if (request < 0) return;
  const int64_t end_token = p.query_start_loc[request + 1];
  const int tokens = static_cast<int>(min(static_cast<int64_t>(tokens_per_item), end_token - first_token));
  const int64_t kv_head = blockIdx.y % p.num_kv_heads;
  const int head_part = static_cast<int>(blockIdx.y / p.num_kv_heads), first_head = head_part * heads_per_item;
  const int heads = min(heads_per_item, static_cast<int>(p.group) - first_head);
  const int rows = tokens * heads;  // row = token * heads + head
  const int64_t limit = p.max_blocks * p.block_size;
  const int64_t first_position =
      max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.positions[first_token]), limit - 1));
  const int64_t last_position = min(first_position + tokens - 1, limit - 1);
  const int64_t window_start =
      p.sliding_window > 0 ? max(static_cast<int64_t>(0), first_position - p.sliding_window + 1) : 0;
  const int64_t first_partition = window_start / kPartitionKeys, end_partition = last_position / kPartitionKeys;
  int64_t partition = first_partition, last_partition = end_partition;
  if (kSplit) {
    const int64_t wanted = blockIdx.z;
    if (wanted < partition || wanted > last_partition) return;
    partition = last_partition = wanted;
  }
  const T* cache = static_cast<const T*>(p.kv_cache);
  const int64_t to_values = p.num_kv_heads * p.block_size * p.head_dim;
  const auto fetch_tile = [&](int64_t tile) {
    const int64_t begin = max(tile, window_start), end = min(tile + kKeys, last_position + 1);
    if (thread < kKeys) {
      const int64_t position = tile + thread;
      int64_t at = -1;
      int token = -1;
      if (position >= begin && position < end) {
        const int64_t block = block_at(p, request, position), offset = position % p.block_size;
        if constexpr (kSplit) {
          for (int t = 0; t < p.num_tokens; ++t) token = slots[t] == block * p.block_size + offset ? t : token;
        }
        if (token < 0) at = kv_index(p, block, 0, kv_head, offset);
      }
      key_rows[thread] = at;
      if constexpr (kSplit) new_tokens[thread] = token;
    }
    __syncthreads();
    constexpr int kWide = 16 / sizeof(T);
    const int pieces = dim / kWide;
#pragma unroll 4
    for (int i = thread; i < kKeys * pieces; i += kThreads) {
      const int key = i / pieces, part = i % pieces;
      const bool given = key_rows[key] >= 0;
      const T* from = cache + (given ? key_rows[key] : 0) + part * kWide;
      copy_async(keys + key * key_stride + part * kWide, from, given);
      copy_async(values + key * dim + part * kWide, given ? from + to_values : from, given);
    }
  };
  // The keys and values of this step, as they are rounded on their way into the cache.
  const auto add_new_keys = [&] {
    for (int i = warp; i < 2 * kKeys; i += kThreads / 32) {
      const int key = i / 2, is_value = i % 2;
      if (new_tokens[key] < 0) continue;
      T* target = is_value != 0 ? values + key * dim : keys + key * key_stride;
      prepare_head<kSlots * kThreads / 32>(p, new_tokens[key], p.num_heads + is_value * p.num_kv_heads + kv_head,
                                           staged + warp * dim,
                                           [&](int e, float value) { target[e] = from_float<T>(value); });
    }
  };
  const auto head_of = [&](int row) { return kv_head * p.group + first_head + row % heads; };
  if constexpr (kSplit) {
    fetch_tile(max(partition * kPartitionKeys, window_start / kKeys * kKeys));
    wait_for_previous();
    for (int row = warp; row < rows; row += kThreads / 32) {
      prepare_head<kSlots * kThreads / 32>(p, first_token, head_of(row), staged + warp * dim,
                                           [&](int i, float value) { queries[row * dim + i] = value * p.scale; });
    }
    if (head_part == 0 && partition == end_partition && warp >= 2) {  // one block of a token writes to the cache
      const int is_value = warp - 2;
      if (T* target = slot_of<T>(p, first_token, is_value, kv_head); target != nullptr) {
        prepare_head<kSlots * kThreads / 32>(p, first_token, p.num_heads + is_value * p.num_kv_heads + kv_head,
                                             staged + warp * dim,
                                             [&](int i, float value) { target[i] = from_float<T>(value); });
      }
    }
  } else {
    for (int i = thread; i < rows * dim; i += kThreads) {
      const int row = i / dim;
      queries[i] = p.queries[((first_token + row / heads) * p.num_heads + head_of(row)) * dim + i % dim];
    }
  }

  float total[kRows][kSlots] = {}, total_max[kRows], total_sum[kRows];  // over partitions
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    total_max[r] = -kInfinity;
    total_sum[r] = 0.0f;
  }
  bool fetched = kSplit;  // the first tile
  for (; partition <= last_partition; ++partition) {
    float acc[kRows][kSlots] = {};
    if (thread < kRows) {
      row_max[thread] = -kInfinity;
      row_sum[thread] = 0.0f;
    }
    for (int64_t tile = partition * kPartitionKeys; tile < (partition + 1) * kPartitionKeys; tile += kKeys) {
      const int64_t begin = max(tile, window_start), end = min(tile + kKeys, last_position + 1);
      if (begin >= end) continue;
      __syncthreads();  // the last tile's keys and scores are done with
      if (!fetched) fetch_tile(tile);
      fetched = false;
      asm volatile("cp.async.wait_all;" ::: "memory");
      if constexpr (kSplit) {
        __syncthreads();
        add_new_keys();
      }
      __syncthreads();
      constexpr int kWide = 16 / sizeof(T);

      // Scores: a thread has one key and every kGroups-th row.
      constexpr int kGroups = kThreads / kKeys, kRowsEach = (kRows + kGroups - 1) / kGroups;
      {
        const int key = thread % kKeys, group = thread / kKeys;
        float dots[kRowsEach] = {};
        for (int d = 0; d < dim; d += kWide) {
          const uint4 raw = *reinterpret_cast<const uint4*>(keys + key * key_stride + d);
          const T* k = reinterpret_cast<const T*>(&raw);
#pragma unroll
          for (int i = 0; i < kRowsEach; ++i) {
            const int row = group + i * kGroups;
            if (kRows % kGroups != 0 && row >= kRows) continue;
            const float* q = queries + row * dim + d;
#pragma unroll
            for (int e = 0; e < kWide; e += 4) {
              const float4 four = *reinterpret_cast<const float4*>(q + e);
              dots[i] = fmaf(four.x, to_float(k[e]), dots[i]);
              dots[i] = fmaf(four.y, to_float(k[e + 1]), dots[i]);
              dots[i] = fmaf(four.z, to_float(k[e + 2]), dots[i]);
              dots[i] = fmaf(four.w, to_float(k[e + 3]), dots[i]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const int row = group + i * kGroups;
          if (row >= kRows) continue;
          float score = -kInfinity;
          if (row < rows) {
            const int64_t position = first_position + row / heads, at = tile + key;
            const bool seen = at <= position && at < end && (p.sliding_window == 0 || at > position - p.sliding_window);
            if (seen) score = p.soft_cap > 0.0f ? p.soft_cap * tanhf(dots[i] / p.soft_cap) : dots[i];
          }
          scores[key * kRows + row] = score;
        }
      }
      __syncthreads();

      // Weights: a warp has every fourth row.
      const int lane = thread & 31;
      for (int row = thread >> 5; row < kRows; row += kThreads / 32) {
        float highest = -kInfinity;
        for (int key = lane; key < kKeys; key += 32) highest = fmaxf(highest, scores[key * kRows + row]);
        highest = warp_max(highest);
        const float old = row_max[row], now = fmaxf(old, highest);
        float sum = 0.0f;
        for (int key = lane; key < kKeys; key += 32) {
          const float score = scores[key * kRows + row];
          // A NaN score stays one: it must reach the output.
          const float weight = score == -kInfinity ? 0.0f : expf(__fsub_rn(score, now));
          scores[key * kRows + row] = weight;
          sum += weight;
        }
        sum = warp_sum(sum);
        __syncwarp();
        if (lane == 0) {
          const float rescale = exp_difference(old, now);
          row_rescale[row] = rescale;
          row_max[row] = now;
          row_sum[row] = __fadd_rn(__fmul_rn(row_sum[row], rescale), sum);
        }
      }
      __syncthreads();

      // Values: a thread has the dimensions thread, thread + 128, ...
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) acc[r][s] = __fmul_rn(acc[r][s], row_rescale[r]);
      }
      // Where not all rows see all of [begin, end), a weight of zero must not meet a value that may be anything.
      const bool uniform =
          end <= first_position + 1 && (p.sliding_window == 0 || begin > last_position - p.sliding_window);
      const int key_begin = static_cast<int>(begin - tile), key_end = static_cast<int>(end - tile);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int d = thread + s * kThreads;
        if (d >= dim) continue;
#pragma unroll 8
        for (int key = key_begin; key < key_end; ++key) {
          const float value = to_float(values[key * dim + d]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const float weight = scores[key * kRows + r];
            const float more = fmaf(weight, value, acc[r][s]);
            acc[r][s] = uniform || weight != 0.0f ? more : acc[r][s];
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      if constexpr (kSplit) {
        float* state = state_of(p, partitions, first_token + r / heads, head_of(r), partition);
        if (thread == 0) {
          state[dim] = row_max[r];
          state[dim + 1] = row_sum[r];
        }
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          const int d = thread + s * kThreads;
          if (d < dim) state[d] = acc[r][s];
        }
      } else {
        const MergeScales scales = merge(total_max[r], total_sum[r], row_max[r], row_sum[r]);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) total[r][s] = merged(scales, total[r][s], acc[r][s]);
      }
    }
    __syncthreads();  // row_max and row_sum are reset next
  }
  if constexpr (kSplit) {
    if (!is_last_block(p, first_token, static_cast<int>(end_partition - first_partition), is_last)) return;
    merge_partitions(p, first_token, kv_head * p.group + first_head, heads, first_partition, end_partition, partitions);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      const float scale = final_scale(p, head_of(r), total_max[r], total_sum[r]);
      float* out = p.out + ((first_token + r / heads) * p.num_heads + head_of(r)) * dim;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int d = thread + s * kThreads;
        if (d < dim) out[d] = __fmul_rn(total[r][s], scale);
      }
    }
  }
}

// --- Host ---------------------------------------------------------------------------------------------------------

int64_t partitions_of(const AttentionParams& p) {
  return (p.max_blocks * p.block_size + kPartitionKeys - 1) / kPartitionKeys;
}

bool is_split(const AttentionParams& p) {
  return p.num_tokens <= kSplitTokens && p.num_tokens * partitions_of(p) <= kSplitStates;
}

template <class T, int kKeys, int kSlots, int kRows>
cudaError_t attend(const Launch& on, ErrorSink sink, const AttentionParams& p) {
  const bool split = is_split(p);
  const int heads = static_cast<int>(p.group < kRows ? p.group : kRows);
  const int tokens = split ? 1 : kRows / heads;
  const int64_t items = tokens == 1 ? p.num_tokens : p.num_tokens / tokens + p.num_requests;
  const int64_t head_parts = (p.group + heads - 1) / heads;
  const int partitions = static_cast<int>(partitions_of(p));
  const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(p.num_kv_heads * head_parts),
                  static_cast<unsigned>(split ? partitions : 1));
  const size_t floats = kRows * p.head_dim + kKeys * kRows + (split ? kThreads / 32 * p.head_dim : 0);
  const size_t bytes = kKeys * (2 * p.head_dim * sizeof(T) + 16) + floats * sizeof(float);
  return launch(on,
                split ? attend_kernel<T, kKeys, kSlots, kRows, true> : attend_kernel<T, kKeys, kSlots, kRows, false>,
                grid, dim3(kThreads), bytes, sink, p, tokens, heads, partitions);
}

template <class T, int kKeys, int kSlots>
cudaError_t attend_rows(const Launch& on, ErrorSink sink, const AttentionParams& p) {
  if (!is_split(p)) return attend<T, kKeys, kSlots, kMaxRows / kSlots>(on, sink, p);
  if (p.group == 1) return attend<T, kKeys, kSlots, 1>(on, sink, p);
  if (p.group <= 4) return attend<T, kKeys, kSlots, 4>(on, sink, p);
  return attend<T, kKeys, kSlots, 8 / (kSlots == 4 ? 2 : 1)>(on, sink, p);
}

// A tile has as many keys whatever the number of rows: where its borders lie is part of a row's bits.
template <class T>
cudaError_t run(const Launch& on, ErrorSink sink, const AttentionParams& p) {
  if (!is_split(p)) {
    const dim3 grid(static_cast<unsigned>(p.num_tokens),
                    static_cast<unsigned>((p.num_heads + 2 * p.num_kv_heads + kThreads / 32 - 1) / (kThreads / 32)));
    const size_t bytes = kThreads / 32 * p.head_dim * sizeof(float);
    const auto kernel = p.head_dim <= 128   ? prepare_kernel<T, 4>
                        : p.head_dim <= 256 ? prepare_kernel<T, 8>
                                            : prepare_kernel<T, 16>;
    const cudaError_t status = launch(on, kernel, grid, dim3(kThreads), bytes, sink, p);
    if (status != cudaSuccess) return status;
    if (attends_on_tensor_cores(p)) return attend_mma(on, p);
  }
  if (is_split(p) && decodes_on_tensor_cores(p)) {
    return attend_decode(on, sink, p, static_cast<int>(partitions_of(p)));
  }
  if (p.head_dim <= kThreads) return attend_rows<T, 64, 1>(on, sink, p);
  if (p.head_dim <= 2 * kThreads) return attend_rows<T, 32, 2>(on, sink, p);
  return attend_rows<T, sizeof(T) == 4 ? 16 : 32, 4>(on, sink, p);
}

}  // namespace

bool attention_quantizes(const AttentionParams& p) { return is_split(p) && p.head_dim % 32 == 0; }

int64_t attention_state_floats(const AttentionParams& p) {
  return is_split(p) ? p.num_tokens * p.num_heads * partitions_of(p) * (p.head_dim + kStateExtra) : 0;
}

int64_t attention_counters(const AttentionParams& p) {
  return is_split(p) ? p.num_tokens * p.num_kv_heads * p.group : 0;
}

cudaError_t paged_attention(const Launch& on, ErrorSink sink, const AttentionParams& p) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.kv_dtype == 0) return run<float>(on, sink, p);
  if (p.kv_dtype == 1) return run<__half>(on, sink, p);
  return run<__nv_bfloat16>(on, sink, p);
}

}  // namespace trivet::cuda
