// PagedAttention. Kernel 1 makes the queries (norm, rotation, scale) and writes keys and values to their slots. Kernel
// 2 takes an item (some consecutive tokens of a request, one KV head with a part of its query heads) over the keys.
// Keys are cut into partitions at fixed absolute positions; a step of few tokens gives every partition to a block of
// its own and kernel 3 merges them in order, a step of many tokens merges as it goes. Both do the same operations in
// the same order, so a row's bits depend neither on the batch nor on the chunking of its prompt.
#include <type_traits>

#include "activation.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPartitionKeys = 128;
constexpr int64_t kSplitTokens = 64;  // steps of at most so many tokens are split over partitions
constexpr int kMaxRows = 16;          // query rows of an item
constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ int64_t kv_index(const AttentionParams& p, int64_t block, int64_t k_or_v, int64_t kv_head,
                                            int64_t offset) {
  const int64_t head_row = (k_or_v * p.num_kv_heads + kv_head) * p.block_size + offset;
  return block * p.block_stride + p.kv_offset * p.block_size + head_row * p.head_dim;
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

// --- Kernel 1 -----------------------------------------------------------------------------------------------------

// Where the borders of the requests make no sense, token 0 reports that and the others are not judged by them.
__device__ void check_step(const ErrorSink& sink, const AttentionParams& p, int64_t token) {
  const int64_t last = p.query_start_loc[p.num_requests];
  if (token == 0) {
    if (p.query_start_loc[0] != 0) report(sink, DeviceErrorCode::kQueryStartFirst, 0, p.query_start_loc[0]);
    for (int64_t r = 0; r < p.num_requests; ++r) {
      const int64_t start = p.query_start_loc[r], end = p.query_start_loc[r + 1];
      if (end < start || end > p.num_tokens)
        report(sink, DeviceErrorCode::kQueryStart, r + 1, end, start, p.num_tokens);
      if (p.seq_lens[r] < end - start) report(sink, DeviceErrorCode::kSeqLen, r, p.seq_lens[r], end - start);
    }
    if (last != p.num_tokens) report(sink, DeviceErrorCode::kQueryStartLast, p.num_requests, last, p.num_tokens);
  }
  const int64_t r = request_of(p, token);
  const int64_t start = p.query_start_loc[r], end = p.query_start_loc[r + 1], seq_len = p.seq_lens[r];
  if (p.query_start_loc[0] != 0 || last != p.num_tokens || token < start || token >= end || seq_len < end - start)
    return;
  const int64_t expected = seq_len - (end - token);
  if (p.positions[token] != expected) report(sink, DeviceErrorCode::kPosition, token, p.positions[token], expected, r);
  const int64_t slot = p.slot_mapping[token];
  if (slot < -1 || slot >= p.num_blocks * p.block_size) {
    report(sink, DeviceErrorCode::kSlot, token, slot, p.num_blocks * p.block_size - 1);
  }
  const int64_t columns = (seq_len + p.block_size - 1) / p.block_size;
  if (columns > p.max_blocks) report(sink, DeviceErrorCode::kBlockColumns, columns, r, seq_len, p.max_blocks);
  if (token != end - 1) return;
  for (int64_t b = 0; b < columns && b < p.max_blocks; ++b) {
    const int32_t block = p.block_table[r * p.max_blocks + b];
    if (block < 0 || block >= p.num_blocks) report(sink, DeviceErrorCode::kBlock, r, b, block, p.num_blocks - 1);
  }
}

// A block per token and head: query heads, then key heads, then value heads.
template <class T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(ErrorSink sink, AttentionParams p) {
  extern __shared__ float x[];  // [head_dim]
  __shared__ float sums[32];
  wait_for_previous();
  const int64_t token = blockIdx.x, head = blockIdx.y;
  if (head == 0 && threadIdx.x == 0) check_step(sink, p, token);
  const float* source = p.qkv + (token * (p.num_heads + 2 * p.num_kv_heads) + head) * p.head_dim;
  const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
  const int64_t slot = p.slot_mapping[token];
  if (!is_query && (slot < 0 || slot >= p.num_blocks * p.block_size)) return;
  T* target = nullptr;
  if (!is_query) {
    const int64_t kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
    target = static_cast<T*>(p.kv_cache) + kv_index(p, slot / p.block_size, is_value, kv_head, slot % p.block_size);
  }
  if (is_value) {
    for (int64_t i = threadIdx.x; i < p.head_dim; i += kThreads) target[i] = from_float<T>(source[i]);
    return;
  }
  const float* norm = is_query ? p.q_norm : p.k_norm;
  float scale = 1.0f;
  if (norm != nullptr) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.head_dim; i += kThreads) sum += source[i] * source[i];
    scale = 1.0f / sqrtf(block_sum(sum, sums) / static_cast<float>(p.head_dim) + p.norm_eps);
  }
  for (int64_t i = threadIdx.x; i < p.head_dim; i += kThreads) {
    x[i] = norm != nullptr ? source[i] * scale * norm[i] : source[i];
  }
  __syncthreads();
  const int64_t half = p.rotary_dim / 2;
  const float* cosines = p.cos_sin + token * p.rotary_dim;
  for (int64_t i = threadIdx.x; i < p.head_dim; i += kThreads) {
    float value = x[i];
    if (i < p.rotary_dim) {
      const int64_t pair = p.rope_interleaved ? i / 2 : i % half;
      const bool second = p.rope_interleaved ? (i & 1) != 0 : i >= half;
      const int64_t other = p.rope_interleaved ? (i ^ 1) : second ? i - half : i + half;
      const float turned = __fmul_rn(x[other], cosines[half + pair]);
      value = __fmul_rn(value, cosines[pair]);
      value = second ? __fadd_rn(value, turned) : __fsub_rn(value, turned);
    }
    if (is_query) {
      p.queries[(token * p.num_heads + head) * p.head_dim + i] = value * p.scale;
    } else {
      target[i] = from_float<T>(value);
    }
  }
}

// --- Kernel 2 -----------------------------------------------------------------------------------------------------

// State of a row: maximum, sum, then head_dim accumulated values.
__device__ __forceinline__ float* state_of(const AttentionParams& p, int64_t partitions, int64_t token, int64_t head,
                                           int64_t partition) {
  return p.states + ((token * p.num_heads + head) * partitions + partition) * (p.head_dim + 2);
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
  __shared__ int64_t key_rows[kKeys], item[2];
  wait_for_previous();

  // The item: request and first token. Blocks run over items of all requests; the last ones find none.
  const int thread = threadIdx.x;
  if (thread == 0) {
    int64_t left = blockIdx.x, request = -1, token = 0;
    if (tokens_per_item == 1) {
      request = request_of(p, left);
      token = left;
    } else {
      for (int64_t r = 0; r < p.num_requests; ++r) {
        const int64_t count = p.query_start_loc[r + 1] - p.query_start_loc[r];
        const int64_t items = (count + tokens_per_item - 1) / tokens_per_item;
        if (left < items) {
          request = r;
          token = p.query_start_loc[r] + (items - 1 - left) * tokens_per_item;  // the longest first
          break;
        }
        left -= items;
      }
    }
    item[0] = request;
    item[1] = token;
  }
  __syncthreads();
  const int64_t request = item[0], first_token = item[1];
  if (request < 0) return;
  const int64_t end_token = p.query_start_loc[request + 1];
  const int tokens = static_cast<int>(min(static_cast<int64_t>(tokens_per_item), end_token - first_token));
  const int64_t kv_head = blockIdx.y % p.num_kv_heads;
  const int first_head = static_cast<int>(blockIdx.y / p.num_kv_heads) * heads_per_item;  // of the group
  const int heads = min(heads_per_item, static_cast<int>(p.group) - first_head);
  const int rows = tokens * heads;  // row = token * heads + head
  const int64_t limit = p.max_blocks * p.block_size;
  const int64_t first_position =
      max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.positions[first_token]), limit - 1));
  const int64_t last_position = min(first_position + tokens - 1, limit - 1);
  const int64_t window_start =
      p.sliding_window > 0 ? max(static_cast<int64_t>(0), first_position - p.sliding_window + 1) : 0;
  int64_t partition = window_start / kPartitionKeys, last_partition = last_position / kPartitionKeys;
  if (kSplit) {
    const int64_t wanted = blockIdx.z;
    if (wanted < partition || wanted > last_partition) return;
    partition = last_partition = wanted;
  }
  const auto head_of = [&](int row) { return kv_head * p.group + first_head + row % heads; };
  for (int i = thread; i < rows * dim; i += kThreads) {
    const int row = i / dim;
    queries[i] = p.queries[((first_token + row / heads) * p.num_heads + head_of(row)) * dim + i % dim];
  }

  float total[kRows][kSlots] = {}, total_max[kRows], total_sum[kRows];  // over partitions
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    total_max[r] = -kInfinity;
    total_sum[r] = 0.0f;
  }
  const T* cache = static_cast<const T*>(p.kv_cache);
  const int64_t to_values = p.num_kv_heads * p.block_size * p.head_dim;
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
      if (thread < kKeys) {
        const int64_t position = tile + thread;
        int64_t at = -1;
        if (position >= begin && position < end) {
          const int64_t block = p.block_table[request * p.max_blocks + position / p.block_size];
          const bool known = block >= 0 && block < p.num_blocks;  // kernel 1 has reported it
          at = kv_index(p, known ? block : 0, 0, kv_head, position % p.block_size);
        }
        key_rows[thread] = at;
      }
      __syncthreads();
      constexpr int kWide = 16 / sizeof(T);
      const int pieces = dim / kWide;
#pragma unroll 4
      for (int i = thread; i < kKeys * pieces; i += kThreads) {
        const int key = i / pieces, part = i % pieces;
        uint4 k = make_uint4(0, 0, 0, 0), v = k;
        if (key_rows[key] >= 0) {
          k = *reinterpret_cast<const uint4*>(cache + key_rows[key] + part * kWide);
          v = *reinterpret_cast<const uint4*>(cache + key_rows[key] + to_values + part * kWide);
        }
        *reinterpret_cast<uint4*>(keys + key * key_stride + part * kWide) = k;
        *reinterpret_cast<uint4*>(values + key * dim + part * kWide) = v;
      }
      __syncthreads();

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
          state[0] = row_max[r];
          state[1] = row_sum[r];
        }
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          const int d = thread + s * kThreads;
          if (d < dim) state[2 + d] = acc[r][s];
        }
      } else {
        const MergeScales scales = merge(total_max[r], total_sum[r], row_max[r], row_sum[r]);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) total[r][s] = merged(scales, total[r][s], acc[r][s]);
      }
    }
    __syncthreads();  // row_max and row_sum are reset next
  }
  if constexpr (!kSplit) {
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

// --- Kernel 3 -----------------------------------------------------------------------------------------------------

// A thread has four dimensions of a head of a token: its partitions, in order.
__global__ void __launch_bounds__(kThreads) merge_kernel(AttentionParams p, int partitions) {
  wait_for_previous();
  const int64_t token = blockIdx.x, width = p.num_heads * p.head_dim / 4;
  const int64_t at = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const bool inside = at < width;
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (inside) {
    const int64_t head = at * 4 / p.head_dim, d = at * 4 % p.head_dim;
    const int64_t limit = p.max_blocks * p.block_size;
    const int64_t position = max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.positions[token]), limit - 1));
    const int64_t start = p.sliding_window > 0 ? max(static_cast<int64_t>(0), position - p.sliding_window + 1) : 0;
    float max = -kInfinity, sum = 0.0f, total[4] = {};
    for (int64_t i = start / kPartitionKeys; i <= position / kPartitionKeys; ++i) {
      const float* state = state_of(p, partitions, token, head, i);
      const MergeScales scales = merge(max, sum, state[0], state[1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] = merged(scales, total[e], state[2 + d + e]);
    }
    const float scale = final_scale(p, head, max, sum);
    out = make_float4(__fmul_rn(total[0], scale), __fmul_rn(total[1], scale), __fmul_rn(total[2], scale),
                      __fmul_rn(total[3], scale));
    reinterpret_cast<float4*>(p.out)[token * width + at] = out;
  }
  if (p.quantized.values == nullptr) return;
  const Quantized8 q = quantize_quad(out);
  if (inside) store_quantized(p.quantized, token, width * 4, at, q);
}

// --- Host ---------------------------------------------------------------------------------------------------------

bool is_split(const AttentionParams& p) { return p.num_tokens <= kSplitTokens; }

int64_t partitions_of(const AttentionParams& p) {
  return (p.max_blocks * p.block_size + kPartitionKeys - 1) / kPartitionKeys;
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
  const size_t bytes = kKeys * (2 * p.head_dim * sizeof(T) + 16) + (kRows * p.head_dim + kKeys * kRows) * sizeof(float);
  cudaError_t status =
      launch(on, split ? attend_kernel<T, kKeys, kSlots, kRows, true> : attend_kernel<T, kKeys, kSlots, kRows, false>,
             grid, dim3(kThreads), bytes, sink, p, tokens, heads, partitions);
  if (status != cudaSuccess || !split) return status;
  const int64_t quads = p.num_heads * p.head_dim / 4;
  const dim3 parts(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>((quads + kThreads - 1) / kThreads));
  return launch(on, merge_kernel, parts, dim3(kThreads), 0, p, partitions);
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
  const dim3 heads(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_heads + 2 * p.num_kv_heads));
  const cudaError_t status = launch(on, prepare_kernel<T>, heads, dim3(kThreads), p.head_dim * sizeof(float), sink, p);
  if (status != cudaSuccess) return status;
  if (p.head_dim <= kThreads) return attend_rows<T, 64, 1>(on, sink, p);
  if (p.head_dim <= 2 * kThreads) return attend_rows<T, 32, 2>(on, sink, p);
  return attend_rows<T, sizeof(T) == 4 ? 16 : 32, 4>(on, sink, p);
}

}  // namespace

bool attention_quantizes(const AttentionParams& p) { return is_split(p) && p.head_dim % 32 == 0; }

int64_t attention_state_floats(const AttentionParams& p) {
  return is_split(p) ? p.num_tokens * p.num_heads * partitions_of(p) * (p.head_dim + 2) : 0;
}

cudaError_t paged_attention(const Launch& on, ErrorSink sink, const AttentionParams& p) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.kv_dtype == 0) return run<float>(on, sink, p);
  if (p.kv_dtype == 1) return run<__half>(on, sink, p);
  return run<__nv_bfloat16>(on, sink, p);
}

}  // namespace trivet::cuda
