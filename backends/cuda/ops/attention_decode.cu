// PagedAttention of few tokens on tensor cores, for float16, bfloat16 and fp8_e4m3 caches. A block has a token, a KV
// head with its query heads as the 16 rows of a product, and a partition of 64 keys, 16 to a warp. What earlier steps
// have written is fetched before the previous kernel has ended; queries and keys of this step are made in here. The
// last block of a token and KV head merges the partitions.
#include "attention_mma.cuh"

namespace trivet::cuda {
namespace {

constexpr int kWarps = kThreads / 32, kWarpKeys = kPartitionKeys / kWarps, kRows = 16;
static_assert(kWarpKeys == 16);

// Keys and values of a warp; later the result takes their place.
template <int kDim>
struct __align__(16) WarpTile {
  uint8_t keys[kWarpKeys * kRowBytes<kDim>], values[kWarpKeys * kRowBytes<kDim>];
  __device__ __forceinline__ float* out(int row) { return reinterpret_cast<float*>(this) + row * kDim; }
};

template <int kDim>
struct Shared {
  uint8_t high[kRows * kRowBytes<kDim>], low[kRows * kRowBytes<kDim>];  // queries, and what rounding took from them
  WarpTile<kDim> tiles[kWarps];
  int64_t key_rows[kWarps][kWarpKeys];           // where the keys lie in the cache, or -1
  float staged[kWarps][kDim];                    // for prepare_head
  float max[kWarps][kRows], sum[kWarps][kRows];  // of the scores
  int slots[kSplitTokens];                       // that this step writes
  bool is_last;
};

// Row r of the queries of the block's KV head, or zeros.
template <class T, int kDim>
__device__ __forceinline__ void make_query(const AttentionParams& p, Shared<kDim>& shared, int64_t token,
                                           int64_t kv_head, int row) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const auto store = [&](int i, float value) {
    const float q = in_range<T>(value * p.scale);
    const T rounded = from_float<T>(q);
    const int at = place<kDim>(row, i & ~7) + (i & 7) * 2;
    *reinterpret_cast<T*>(shared.high + at) = rounded;
    *reinterpret_cast<T*>(shared.low + at) = from_float<T>(q - to_float(rounded));
  };
  if (row < p.group) {
    prepare_head<(kDim + 31) / 32>(p, token, kv_head * p.group + row, shared.staged[warp], store);
  } else {
    for (int i = lane; i < kDim; i += 32) store(i, 0.0f);
  }
}

// Scores of a warp's 16 keys.
template <class T, int kDim>
__device__ __forceinline__ void add_scores(float (&scores)[2][4], const Shared<kDim>& shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t q[4], rest[4], k[4];
    load_matrix<false>(q, shared.high + place<kDim>(lane & 15, d + (lane >> 4) * 8));
    load_matrix<false>(rest, shared.low + place<kDim>(lane & 15, d + (lane >> 4) * 8));
    load_matrix<false>(k, shared.tiles[warp].keys + place<kDim>((lane & 7) + (lane >> 4) * 8, d + (lane >> 3 & 1) * 8));
    multiply<T>(scores[0], q, k[0], k[1]);
    multiply<T>(scores[1], q, k[2], k[3]);
    multiply<T>(scores[0], rest, k[0], k[1]);
    multiply<T>(scores[1], rest, k[2], k[3]);
  }
}

// Scores as weights, each the sum of high and low; fills the warp's part of max and sum.
template <class T, int kDim>
__device__ __forceinline__ void weigh(const AttentionParams& p, Shared<kDim>& shared, const Item& item,
                                      int64_t first_key, float (&scores)[2][4], uint32_t (&high)[4],
                                      uint32_t (&low)[4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = -kInfinity;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = first_key + i / 2 * 8 + lane % 4 * 2 + i % 2;
      float& score = scores[i / 2][half * 2 + i % 2];
      if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);
      if (key < item.first_key || key > item.last_position) score = -kInfinity;
      highest = fmaxf(highest, score);
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    const float base = highest == -kInfinity ? 0.0f : highest;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float x = __expf(scores[n][half * 2] - base), y = __expf(scores[n][half * 2 + 1] - base);
      const Split<T> parts = split<T>(x, y);
      high[n * 2 + half] = parts.high;
      low[n * 2 + half] = parts.low;
      sum += x + y;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) {
      shared.max[warp][lane / 4 + half * 8] = highest;
      shared.sum[warp][lane / 4 + half * 8] = sum;
    }
  }
}

// The weighted sum of a warp's values takes the place of its keys and values.
template <class T, int kDim>
__device__ __forceinline__ void weighted_values(Shared<kDim>& shared, int rows, const uint32_t (&high)[4],
                                                const uint32_t (&low)[4]) {
  const int lane = threadIdx.x & 31;
  WarpTile<kDim>& tile = shared.tiles[threadIdx.x >> 5];
  float out[kDim / 8][4] = {};
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t v[4];
    load_matrix<true>(v, tile.values + place<kDim>(lane & 15, n * 16 + (lane >> 4) * 8));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply<T>(out[2 * n + i], high, v[2 * i], v[2 * i + 1]);
      multiply<T>(out[2 * n + i], low, v[2 * i], v[2 * i + 1]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(tile.out(row) + n * 8 + lane % 4 * 2) =
          make_float2(out[n][2 * half], out[n][2 * half + 1]);
    }
  }
}

// The warps' parts become the state of the partition.
template <int kDim>
__device__ __forceinline__ void store_state(const AttentionParams& p, Shared<kDim>& shared, int64_t token,
                                            int64_t kv_head, int64_t partition, int partitions) {
  for (int i = threadIdx.x; i < p.group * (kDim / 4); i += kThreads) {
    const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
    float max = -kInfinity, sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const MergeScales scales = merge(max, sum, shared.max[w][row], shared.sum[w][row]);
      const float4 part = *reinterpret_cast<const float4*>(shared.tiles[w].out(row) + d);
      out = make_float4(merged(scales, out.x, part.x), merged(scales, out.y, part.y), merged(scales, out.z, part.z),
                        merged(scales, out.w, part.w));
    }
    float* state = state_of(p, partitions, token, kv_head * p.group + row, partition);
    *reinterpret_cast<float4*>(state + d) = out;
    if (d == 0) *reinterpret_cast<float2*>(state + kDim) = make_float2(max, sum);
  }
}

// Lanes 0 to 15 look up the keys of the warp: shared.key_rows, and the token of this step that makes the key, or -1.
template <int kDim>
__device__ __forceinline__ int find_keys(const AttentionParams& p, Shared<kDim>& shared, const Item& item,
                                         int64_t kv_head, int64_t first_key) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int maker = -1;
  if (lane < kWarpKeys) {
    const unsigned key = static_cast<unsigned>(first_key + lane), size = static_cast<unsigned>(p.block_size);
    int64_t row = -1;
    if (key >= item.first_key && key <= item.last_position) {
      const int64_t block = block_at(p, item.request, key);
      const int slot = static_cast<int>(block * size + key % size);
      for (int t = 0; t < p.num_tokens; ++t) maker = shared.slots[t] == slot ? t : maker;
      if (maker < 0) row = kv_index(p, block, 0, kv_head, key % size);
    }
    shared.key_rows[warp][lane] = row;
  }
  __syncwarp();
  return maker;
}

// Keys and values of this step among the warp's, as they are rounded on their way into the cache. The block whose token
// they belong to writes them there.
template <class S, int kDim>
__device__ __forceinline__ void make_keys(const AttentionParams& p, Shared<kDim>& shared, const Item& item,
                                          int64_t kv_head, int64_t first_key, int maker) {
  using T = Factor<S>;
  const int warp = threadIdx.x >> 5;
  const int64_t token = item.first_token;
  const auto make = [&](int64_t from, int is_value, const auto& store) {
    prepare_head<(kDim + 31) / 32>(p, from, p.num_heads + is_value * p.num_kv_heads + kv_head, shared.staged[warp],
                                   store);
  };
  for (unsigned made = __ballot_sync(~0u, maker >= 0); made != 0; made &= made - 1) {
    const int key = __ffs(static_cast<int>(made)) - 1;
    const int64_t from = __shfl_sync(~0u, maker, key);
    for (int is_value = 0; is_value < 2; ++is_value) {
      uint8_t* target = is_value != 0 ? shared.tiles[warp].values : shared.tiles[warp].keys;
      S* slot = from == token ? slot_of<S>(p, token, is_value, kv_head) : nullptr;
      make(from, is_value, [&](int i, float value) {
        const S rounded = from_float<S>(value);
        *reinterpret_cast<T*>(target + place<kDim>(key, i & ~7) + (i & 7) * 2) = from_float<T>(to_float(rounded));
        if (slot != nullptr) slot[i] = rounded;
      });
    }
  }
  const int own = static_cast<int>(item.last_position - first_key);
  if (own >= 0 && own < kWarpKeys && __shfl_sync(~0u, maker, own) != token) {  // its slot is not where it looks for it
    for (int is_value = 0; is_value < 2; ++is_value) {
      S* slot = slot_of<S>(p, token, is_value, kv_head);
      if (slot != nullptr) make(token, is_value, [&](int i, float value) { slot[i] = from_float<S>(value); });
    }
  }
}

template <class S, int kDim>
__global__ void __launch_bounds__(kThreads) attend_decode_kernel(ErrorSink sink, AttentionParams p, int partitions) {
  using T = Factor<S>;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  const int64_t token = blockIdx.x, kv_head = blockIdx.y, partition = blockIdx.z;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  if (kv_head == 0 && partition == 0) check_step(sink, p, token);
  const Item item = item_of(p, 1);
  const int64_t first = item.first_key / kPartitionKeys, last = item.last_position / kPartitionKeys;
  if (partition < first || partition > last) return;
  for (int i = thread; i < p.num_tokens; i += kThreads) shared.slots[i] = p.slot_mapping[i];
  __syncthreads();

  const int64_t first_key = partition * kPartitionKeys + warp * kWarpKeys;
  const int maker = find_keys(p, shared, item, kv_head, first_key);
  const S* keys = static_cast<const S*>(p.kv_cache);
  const S* values = keys + p.num_kv_heads * p.block_size * p.head_dim;
  WarpTile<kDim>& tile = shared.tiles[warp];
  RowsInFlight<S, kDim, kWarpKeys, 32> keys_in_flight, values_in_flight;
  keys_in_flight.begin(keys, shared.key_rows[warp], tile.keys, lane);
  values_in_flight.begin(values, shared.key_rows[warp], tile.values, lane);
  wait_for_previous();

  for (int r = warp; r < kRows; r += kWarps) make_query<T, kDim>(p, shared, token, kv_head, r);
  keys_in_flight.end(tile.keys, lane);
  values_in_flight.end(tile.values, lane);
  __syncwarp();
  make_keys<S>(p, shared, item, kv_head, first_key, maker);
  __syncthreads();

  float scores[2][4] = {};
  uint32_t high[4], low[4];
  add_scores<T>(scores, shared);
  weigh<T>(p, shared, item, first_key, scores, high, low);
  weighted_values<T>(shared, static_cast<int>(p.group), high, low);
  __syncthreads();
  store_state(p, shared, token, kv_head, partition, partitions);
  if (is_last_block(p, token, static_cast<int>(last - first), shared.is_last)) {
    merge_partitions(p, token, kv_head * p.group, static_cast<int>(p.group), first, last, partitions);
  }
}

template <class S, int kDim>
cudaError_t start(const Launch& on, const ErrorSink& sink, const AttentionParams& p, int partitions) {
  static_assert(sizeof(Shared<kDim>) <= 99 * 1024 && sizeof(WarpTile<kDim>) >= kRows * kDim * sizeof(float));
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(partitions));
  return launch(on, attend_decode_kernel<S, kDim>, grid, dim3(kThreads), sizeof(Shared<kDim>), sink, p, partitions);
}

template <class S>
cudaError_t start_dim(const Launch& on, const ErrorSink& sink, const AttentionParams& p, int partitions) {
  if (p.head_dim == 64) return start<S, 64>(on, sink, p, partitions);
  if (p.head_dim == 80) return start<S, 80>(on, sink, p, partitions);
  if (p.head_dim == 96) return start<S, 96>(on, sink, p, partitions);
  if (p.head_dim == 128) return start<S, 128>(on, sink, p, partitions);
  return start<S, 256>(on, sink, p, partitions);
}

}  // namespace

bool decodes_on_tensor_cores(const AttentionParams& p) { return attends_on_tensor_cores(p) && p.group <= kRows; }

cudaError_t attend_decode(const Launch& on, ErrorSink sink, const AttentionParams& p, int partitions) {
  if (p.kv_dtype == KvDtype::kFloat16) return start_dim<__half>(on, sink, p, partitions);
  if (p.kv_dtype == KvDtype::kBFloat16) return start_dim<__nv_bfloat16>(on, sink, p, partitions);
  return start_dim<E4M3>(on, sink, p, partitions);
}

}  // namespace trivet::cuda
