// PagedAttention with float32 arithmetic, for every cache. A block has an item (some consecutive tokens of a request,
// one KV head with a part of its query heads) as rows and goes over the keys, which are cut into partitions at fixed
// absolute positions. In a step of many tokens it merges its partitions as it goes. In a split step every partition has
// a block of its own, which makes its queries, and the last block of an item merges all of them. Both do the same
// operations in the same order, so a row's bits depend neither on the batch nor on the chunking of its prompt.
#include "attention.cuh"

namespace trivet::cuda {
namespace {

constexpr int kMaxRows = 16;  // query rows of an item

template <int kKeys, int kRows>
struct Shared {
  float row_max[kRows], row_sum[kRows], row_rescale[kRows];
  int64_t key_rows[kKeys];  // where the keys of the tile lie in the cache, or -1
  Item item;
  // Of a split step: the slots that it writes, the token that makes a key of the tile or -1, whether this block is the
  // last one of its item.
  int slots[kSplitTokens], new_tokens[kKeys];
  bool is_last;
};

// What a block works on. kKeys per tile; kSlots * kThreads >= head_dim; kRows query rows per item.
template <class T, int kKeys, int kSlots, int kRows, bool kSplit>
struct Block {
  static constexpr int kWide = 16 / sizeof(T);  // elements of a piece

  const AttentionParams& p;
  Shared<kKeys, kRows>& shared;
  int dim, key_stride;
  T* keys;         // [kKeys][key_stride]
  T* values;       // [kKeys][dim]
  float* queries;  // [kRows][dim]
  float* scores;   // [kKeys][kRows], later as weights
  float* staged;   // of a split step: [kThreads / 32][dim], for prepare_head
  Item item{};
  int64_t kv_head = 0;
  int first_head = 0, heads = 0, rows = 0;  // row = token * heads + head

  __device__ __forceinline__ Block(const AttentionParams& params, Shared<kKeys, kRows>& of_block, unsigned char* memory)
      : p(params),
        shared(of_block),
        dim(static_cast<int>(p.head_dim)),
        key_stride(dim + kWide),
        keys(reinterpret_cast<T*>(memory)),
        values(keys + kKeys * key_stride),
        queries(reinterpret_cast<float*>(values + kKeys * dim)),
        scores(queries + kRows * dim),
        staged(scores + kKeys * kRows) {}

  __device__ __forceinline__ void set_item(int heads_per_item) {
    item = shared.item;
    kv_head = blockIdx.y % p.num_kv_heads;
    first_head = static_cast<int>(blockIdx.y / p.num_kv_heads) * heads_per_item;
    heads = min(heads_per_item, static_cast<int>(p.group) - first_head);
    rows = item.tokens * heads;
  }

  __device__ __forceinline__ int64_t head_of(int row) const { return kv_head * p.group + first_head + row % heads; }
  // The keys of a tile that some row sees.
  __device__ __forceinline__ int64_t begin_of(int64_t tile) const { return max(tile, item.first_key); }
  __device__ __forceinline__ int64_t end_of(int64_t tile) const { return min(tile + kKeys, item.last_position + 1); }

  __device__ __forceinline__ void find_keys(int64_t tile) {
    const int64_t position = tile + threadIdx.x;
    if (threadIdx.x >= kKeys) return;
    int64_t at = -1;
    int token = -1;
    if (position >= begin_of(tile) && position < end_of(tile)) {
      const int64_t block = block_at(p, item.request, position), offset = position % p.block_size;
      if constexpr (kSplit) {
        for (int t = 0; t < p.num_tokens; ++t) token = shared.slots[t] == block * p.block_size + offset ? t : token;
      }
      if (token < 0) at = kv_index(p, block, 0, kv_head, offset);
    }
    shared.key_rows[threadIdx.x] = at;
    if constexpr (kSplit) shared.new_tokens[threadIdx.x] = token;
  }

  __device__ __forceinline__ void fetch(int64_t tile) {
    find_keys(tile);
    __syncthreads();
    const T* cache = static_cast<const T*>(p.kv_cache);
    const int64_t to_values = p.num_kv_heads * p.block_size * p.head_dim;
    const int pieces = dim / kWide;
#pragma unroll 4
    for (int i = threadIdx.x; i < kKeys * pieces; i += kThreads) {
      const int key = i / pieces, part = i % pieces;
      const bool given = shared.key_rows[key] >= 0;
      const T* from = cache + (given ? shared.key_rows[key] : 0) + part * kWide;
      copy_async(keys + key * key_stride + part * kWide, from, given);
      copy_async(values + key * dim + part * kWide, given ? from + to_values : from, given);
    }
  }

  // A warp makes a head of a token, which counts query heads, then key heads, then value heads.
  template <class Store>
  __device__ __forceinline__ void prepare(int64_t token, int64_t head, const Store& store) {
    prepare_head<kSlots * kThreads / 32>(p, token, head, staged + threadIdx.x / 32 * dim, store);
  }
  __device__ __forceinline__ int64_t key_or_value_head(int is_value) const {
    return p.num_heads + is_value * p.num_kv_heads + kv_head;
  }

  // Of a split step: its queries; and one block of a token writes its key and value to the cache.
  __device__ __forceinline__ void make_queries(bool writes) {
    const int warp = threadIdx.x / 32;
    for (int row = warp; row < rows; row += kThreads / 32) {
      prepare(item.first_token, head_of(row), [&](int i, float value) { queries[row * dim + i] = value * p.scale; });
    }
    if (!writes || warp < 2) return;
    const int is_value = warp - 2;
    T* target = slot_of<T>(p, item.first_token, is_value, kv_head);
    if (target == nullptr) return;
    prepare(item.first_token, key_or_value_head(is_value),
            [&](int i, float value) { target[i] = from_float<T>(value); });
  }

  __device__ __forceinline__ void load_queries() {
    for (int i = threadIdx.x; i < rows * dim; i += kThreads) {
      const int row = i / dim;
      const int64_t head = (item.first_token + row / heads) * p.num_heads + head_of(row);
      queries[i] = p.queries[head * dim + i % dim];
    }
  }

  // Of a split step: its keys and values among those of the tile, as they are rounded on their way into the cache.
  __device__ __forceinline__ void add_new_keys() {
    for (int i = threadIdx.x / 32; i < 2 * kKeys; i += kThreads / 32) {
      const int key = i / 2, is_value = i % 2;
      if (shared.new_tokens[key] < 0) continue;
      T* target = is_value != 0 ? values + key * dim : keys + key * key_stride;
      prepare(shared.new_tokens[key], key_or_value_head(is_value),
              [&](int e, float value) { target[e] = from_float<T>(value); });
    }
  }

  // A thread has one key and every kGroups-th row.
  __device__ __forceinline__ void score(int64_t tile) {
    constexpr int kGroups = kThreads / kKeys, kRowsEach = (kRows + kGroups - 1) / kGroups;
    const int key = threadIdx.x % kKeys, group = threadIdx.x / kKeys;
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
        const int64_t position = item.first_position + row / heads, at = tile + key;
        const bool seen =
            at <= position && at < end_of(tile) && (p.sliding_window == 0 || at > position - p.sliding_window);
        if (seen) score = p.soft_cap > 0.0f ? p.soft_cap * tanhf(dots[i] / p.soft_cap) : dots[i];
      }
      scores[key * kRows + row] = score;
    }
  }

  // Scores to weights; a warp has every fourth row.
  __device__ __forceinline__ void weigh() {
    const int lane = threadIdx.x & 31;
    for (int row = threadIdx.x / 32; row < kRows; row += kThreads / 32) {
      float highest = -kInfinity;
      for (int key = lane; key < kKeys; key += 32) highest = fmaxf(highest, scores[key * kRows + row]);
      highest = warp_max(highest);
      const float old = shared.row_max[row], now = fmaxf(old, highest);
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
        shared.row_rescale[row] = rescale;
        shared.row_max[row] = now;
        shared.row_sum[row] = __fadd_rn(__fmul_rn(shared.row_sum[row], rescale), sum);
      }
    }
  }

  // A thread has the dimensions thread, thread + kThreads, ...
  __device__ __forceinline__ void add_values(int64_t tile, float (&acc)[kRows][kSlots]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) acc[r][s] = __fmul_rn(acc[r][s], shared.row_rescale[r]);
    }
    // Where not all rows see all of the keys, a weight of zero must not meet a value that may be anything.
    const int64_t begin = begin_of(tile), end = end_of(tile);
    const bool uniform =
        end <= item.first_position + 1 && (p.sliding_window == 0 || begin > item.last_position - p.sliding_window);
    const int key_begin = static_cast<int>(begin - tile), key_end = static_cast<int>(end - tile);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int d = threadIdx.x + s * kThreads;
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

  // One partition; `fetched`: its first tile is on its way.
  __device__ __forceinline__ void attend(int64_t partition, bool fetched, float (&acc)[kRows][kSlots]) {
    if (threadIdx.x < kRows) {
      shared.row_max[threadIdx.x] = -kInfinity;
      shared.row_sum[threadIdx.x] = 0.0f;
    }
    for (int64_t tile = partition * kPartitionKeys; tile < (partition + 1) * kPartitionKeys; tile += kKeys) {
      if (begin_of(tile) >= end_of(tile)) continue;
      __syncthreads();  // the last tile's keys and scores are done with
      if (!fetched) fetch(tile);
      fetched = false;
      wait_for_copies();
      if constexpr (kSplit) {
        __syncthreads();
        add_new_keys();
      }
      __syncthreads();
      score(tile);
      __syncthreads();
      weigh();
      __syncthreads();
      add_values(tile, acc);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store_state(int64_t partition, int partitions, const float (&acc)[kRows][kSlots]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      float* state = state_of(p, partitions, item.first_token + r / heads, head_of(r), partition);
      if (threadIdx.x == 0) {
        state[dim] = shared.row_max[r];
        state[dim + 1] = shared.row_sum[r];
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int d = threadIdx.x + s * kThreads;
        if (d < dim) state[d] = acc[r][s];
      }
    }
  }
};

// A step of few tokens: one block per item and partition.
template <class T, int kKeys, int kSlots, int kRows>
__global__ void __launch_bounds__(kThreads)
    attend_split_kernel(ErrorSink sink, AttentionParams p, int heads_per_item, int partitions) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared<kKeys, kRows> shared;
  Block<T, kKeys, kSlots, kRows, true> block(p, shared, memory);
  if (threadIdx.x == 0) shared.item = item_of(p, 1);
  if (blockIdx.y == 0 && blockIdx.z == 0) check_step(sink, p, blockIdx.x, request_of(p, blockIdx.x));
  for (int i = threadIdx.x; i < p.num_tokens; i += kThreads) shared.slots[i] = p.slot_mapping[i];
  __syncthreads();
  block.set_item(heads_per_item);
  const Item& item = block.item;
  const int64_t first = item.first_key / kPartitionKeys, last = item.last_position / kPartitionKeys;
  const int64_t partition = blockIdx.z;
  if (partition < first || partition > last) return;
  block.fetch(max(partition * kPartitionKeys, item.first_key / kKeys * kKeys));  // what earlier steps have written
  wait_for_previous();
  block.make_queries(block.first_head == 0 && partition == last);
  float acc[kRows][kSlots] = {};
  block.attend(partition, true, acc);
  block.store_state(partition, partitions, acc);
  if (!is_last_block(p, item.first_token, static_cast<int>(last - first), shared.is_last)) return;
  merge_partitions<true>(p, item.first_token, block.kv_head * p.group + block.first_head, block.heads, first, last,
                         partitions);
}

// A step of many tokens: one block per item.
template <class T, int kKeys, int kSlots, int kRows>
__global__ void __launch_bounds__(kThreads) attend_kernel(AttentionParams p, int tokens_per_item, int heads_per_item) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared<kKeys, kRows> shared;
  Block<T, kKeys, kSlots, kRows, false> block(p, shared, memory);
  wait_for_previous();
  if (threadIdx.x == 0) shared.item = item_of(p, tokens_per_item);
  __syncthreads();
  block.set_item(heads_per_item);
  const Item& item = block.item;
  if (item.request < 0) return;
  block.load_queries();
  float total[kRows][kSlots] = {}, total_max[kRows], total_sum[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) total_max[r] = -kInfinity;
  for (int64_t i = item.first_key / kPartitionKeys; i <= item.last_position / kPartitionKeys; ++i) {
    float acc[kRows][kSlots] = {};
    block.attend(i, false, acc);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= block.rows) continue;
      const MergeScales scales = merge(total_max[r], total_sum[r], shared.row_max[r], shared.row_sum[r]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) total[r][s] = merged(scales, total[r][s], acc[r][s]);
    }
    __syncthreads();  // row_max and row_sum are reset next
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= block.rows) continue;
    const float scale = final_scale(p, block.head_of(r), total_max[r], total_sum[r]);
    float* out = p.out + ((item.first_token + r / block.heads) * p.num_heads + block.head_of(r)) * block.dim;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int d = threadIdx.x + s * kThreads;
      if (d < block.dim) out[d] = __fmul_rn(total[r][s], scale);
    }
  }
}

// --- Host ---------------------------------------------------------------------------------------------------------

template <class T, int kKeys, int kSlots, int kRows, bool kSplit>
cudaError_t start(const Launch& on, const ErrorSink& sink, const AttentionParams& p, int partitions) {
  const int heads = static_cast<int>(p.group < kRows ? p.group : kRows);
  const int tokens = kSplit ? 1 : kRows / heads;
  const int64_t items = tokens == 1 ? p.num_tokens : p.num_tokens / tokens + p.num_requests;
  const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(p.num_kv_heads * ((p.group + heads - 1) / heads)),
                  static_cast<unsigned>(partitions));
  const size_t floats = kRows * p.head_dim + kKeys * kRows + (kSplit ? kThreads / 32 * p.head_dim : 0);
  const size_t bytes = kKeys * (2 * p.head_dim * sizeof(T) + 16) + floats * sizeof(float);
  if constexpr (kSplit) {
    return launch(on, attend_split_kernel<T, kKeys, kSlots, kRows>, grid, dim3(kThreads), bytes, sink, p, heads,
                  partitions);
  } else {
    return launch(on, attend_kernel<T, kKeys, kSlots, kRows>, grid, dim3(kThreads), bytes, p, tokens, heads);
  }
}

template <class T, int kKeys, int kSlots>
cudaError_t start_rows(const Launch& on, const ErrorSink& sink, const AttentionParams& p, int partitions) {
  if (partitions == 0) return start<T, kKeys, kSlots, kMaxRows / kSlots, false>(on, sink, p, 1);
  if (p.group == 1) return start<T, kKeys, kSlots, 1, true>(on, sink, p, partitions);
  if (p.group <= 4) return start<T, kKeys, kSlots, 4, true>(on, sink, p, partitions);
  return start<T, kKeys, kSlots, kSlots == 4 ? 4 : 8, true>(on, sink, p, partitions);
}

// A tile has as many keys whatever the number of rows: where its borders lie is part of a row's bits.
template <class T>
cudaError_t start_dim(const Launch& on, const ErrorSink& sink, const AttentionParams& p, int partitions) {
  if (p.head_dim <= kThreads) return start_rows<T, 64, 1>(on, sink, p, partitions);
  if (p.head_dim <= 2 * kThreads) return start_rows<T, 32, 2>(on, sink, p, partitions);
  return start_rows<T, sizeof(T) == 4 ? 16 : 32, 4>(on, sink, p, partitions);
}

}  // namespace

cudaError_t attend_float(const Launch& on, ErrorSink sink, const AttentionParams& p, int partitions) {
  if (p.kv_dtype == KvDtype::kFloat32) return start_dim<float>(on, sink, p, partitions);
  if (p.kv_dtype == KvDtype::kFloat16) return start_dim<__half>(on, sink, p, partitions);
  if (p.kv_dtype == KvDtype::kBFloat16) return start_dim<__nv_bfloat16>(on, sink, p, partitions);
  return start_dim<E4M3>(on, sink, p, partitions);
}

}  // namespace trivet::cuda
