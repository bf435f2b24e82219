// PagedAttention of few tokens on tensor cores, for float16, bfloat16 and fp8_e4m3 caches. A block has a token, a KV
// head with its query heads as the 16 rows of a product, and a partition of 64 keys, 16 to a warp. What earlier steps
// have written is fetched before the previous kernel has ended; queries and keys of this step are made in here. The
// last block of a token and KV head merges the partitions. What counts is how long one block takes: loads that do not
// depend on each other are under way together, and what depends on this step's kernels comes as late as it can.
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
  float staged[kWarps][kDim];                    // for HeadInFlight
  float max[kWarps][kRows], sum[kWarps][kRows];  // of the scores
  bool is_last;
};

// How many blocks share a multiprocessor where many sequences are decoded: what its memory and registers allow.
template <class S, int kDim>
constexpr int kBlocks = kDim > 128                ? 2
                        : std::is_same_v<S, E4M3> ? 4
                                                  : 5;

// As request_of, by all lanes of a warp.
__device__ __forceinline__ int64_t request_by_warp(const AttentionParams& p, int64_t token) {
  int started = 0;
#pragma unroll 1
  for (int64_t first = 0; first < p.num_requests; first += 32) {
    const int64_t r = first + (threadIdx.x & 31);
    started += __popc(__ballot_sync(~0u, r < p.num_requests && p.query_start_loc[r] <= token));
  }
  return max(started - 1, 0);
}

// HeadInFlight for what most models have: no norms, and halves that are rotated as a whole. A lane has the same
// elements of both halves, so that none changes lanes; the results are the same bits.
template <int kDim>
class HalvesInFlight {
 public:
  static __device__ __forceinline__ bool fits(const AttentionParams& p) {
    return p.rotary_dim == kDim && !p.rope_interleaved && p.q_norm == nullptr && p.k_norm == nullptr;
  }

  __device__ __forceinline__ void begin(const AttentionParams& p, int64_t token, int64_t head) {
    const float* source = p.qkv + (token * (p.num_heads + 2 * p.num_kv_heads) + head) * kDim + first();
    const float* cosines = p.cos_sin + token * kDim + first();
    is_value_ = head >= p.num_heads + p.num_kv_heads;
    load(low_, source);
    load(high_, source + kDim / 2);
    load(cosine_, cosines);
    load(sine_, cosines + kDim / 2);
  }

  template <class Store>
  __device__ __forceinline__ void finish(const Store& store) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float low = __fsub_rn(__fmul_rn(low_[e], cosine_[e]), __fmul_rn(high_[e], sine_[e]));
      const float high = __fadd_rn(__fmul_rn(high_[e], cosine_[e]), __fmul_rn(low_[e], sine_[e]));
      store(first() + e, is_value_ ? low_[e] : low);
      store(first() + e + kDim / 2, is_value_ ? high_[e] : high);
    }
  }

 private:
  static constexpr int kEach = kDim / 64;  // of a half
  struct alignas(kEach * sizeof(float)) Floats {
    float values[kEach];
  };

  static __device__ __forceinline__ int first() { return (threadIdx.x & 31) * kEach; }
  static __device__ __forceinline__ void load(float (&to)[kEach], const float* from) {
    const Floats floats = *reinterpret_cast<const Floats*>(from);
#pragma unroll
    for (int e = 0; e < kEach; ++e) to[e] = floats.values[e];
  }

  float low_[kEach], high_[kEach], cosine_[kEach], sine_[kEach];
  bool is_value_;
};

// Two heads of a token, whose loads overlap: store(0, i, value) and store(1, i, value). No second one where that is
// negative.
template <int kDim, class Store>
__device__ __forceinline__ void prepare_heads(const AttentionParams& p, int64_t token, int64_t head, int64_t second,
                                              float* staged, const Store& store) {
  if constexpr (kDim % 64 == 0) {
    if (HalvesInFlight<kDim>::fits(p)) {
      HalvesInFlight<kDim> heads[2];
      heads[0].begin(p, token, head);
      if (second >= 0) heads[1].begin(p, token, second);
      heads[0].finish([&](int i, float value) { store(0, i, value); });
      if (second >= 0) heads[1].finish([&](int i, float value) { store(1, i, value); });
      return;
    }
  }
  HeadInFlight<(kDim + 31) / 32> heads[2];
  heads[0].begin(p, token, head);
  if (second >= 0) heads[1].begin(p, token, second);
  heads[0].finish(p, staged, [&](int i, float value) { store(0, i, value); });
  if (second >= 0) heads[1].finish(p, staged, [&](int i, float value) { store(1, i, value); });
}

// The queries of the block's KV head. Where a warp has keys of its own to make, the others make all of them.
template <class T, int kDim>
__device__ __forceinline__ void make_queries(const AttentionParams& p, Shared<kDim>& shared, int64_t token,
                                             int64_t kv_head, int busy_warp) {
  const int warp = threadIdx.x >> 5, rows = static_cast<int>(p.group);
  if (warp == busy_warp) return;
  const int makers = busy_warp < kWarps ? kWarps - 1 : kWarps;
  for (int row = warp > busy_warp ? warp - 1 : warp; row < rows; row += 2 * makers) {
    const int64_t head = kv_head * p.group + row;
    const auto store = [&](int second, int i, float value) {
      const float q = in_range<T>(value * p.scale);
      const T rounded = from_float<T>(q);
      const int at = place<kDim>(row + second * makers, i & ~7) + (i & 7) * 2;
      *reinterpret_cast<T*>(shared.high + at) = rounded;
      *reinterpret_cast<T*>(shared.low + at) = from_float<T>(q - to_float(rounded));
    };
    prepare_heads<kDim>(p, token, head, row + makers < rows ? head + makers : -1, shared.staged[warp], store);
  }
}

// Scores of a warp's 16 keys. The rows of the product after the last query repeat it; nothing looks at them.
template <class T, int kDim>
__device__ __forceinline__ void make_scores(const AttentionParams& p, const Shared<kDim>& shared,
                                            float (&scores)[2][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = min(lane & 15, static_cast<int>(p.group) - 1);
  float rests[2][4] = {};
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t q[4], rest[4], k[4];
    load_matrix<false>(q, shared.high + place<kDim>(row, d + (lane >> 4) * 8));
    load_matrix<false>(rest, shared.low + place<kDim>(row, d + (lane >> 4) * 8));
    load_matrix<false>(k, shared.tiles[warp].keys + place<kDim>((lane & 7) + (lane >> 4) * 8, d + (lane >> 3 & 1) * 8));
    multiply<T>(scores[0], q, k[0], k[1]);
    multiply<T>(scores[1], q, k[2], k[3]);
    multiply<T>(rests[0], rest, k[0], k[1]);
    multiply<T>(rests[1], rest, k[2], k[3]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& score = scores[i / 4][i % 4];
    score += rests[i / 4][i % 4];
    if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);
  }
}

// Scores as weights, each the sum of high and low; fills the warp's part of max and sum.
template <class T, int kDim>
__device__ __forceinline__ void weigh(Shared<kDim>& shared, const Item& item, int64_t first_key, float (&scores)[2][4],
                                      uint32_t (&high)[4], uint32_t (&low)[4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_seen = static_cast<int>(item.first_key - first_key);
  const int last_seen = static_cast<int>(item.last_position - first_key);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = -kInfinity;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float& score = scores[i / 2][half * 2 + i % 2];
      if (key < first_seen || key > last_seen) score = -kInfinity;
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
      out = merged(scales, out, *reinterpret_cast<const float4*>(shared.tiles[w].out(row) + d));
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
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tokens = static_cast<int>(p.num_tokens);
  const unsigned key = static_cast<unsigned>(first_key + lane), size = static_cast<unsigned>(p.block_size);
  int slot = -1, maker = -1;
  int64_t row = -1;
  if (lane < kWarpKeys && key >= item.first_key && key <= item.last_position) {
    const int64_t block = block_at(p, item.request, key);
    slot = static_cast<int>(block * size + key % size);
    row = kv_index(p, block, 0, kv_head, key % size);
  }
  const unsigned lowest = __reduce_min_sync(~0u, static_cast<unsigned>(slot)), highest = __reduce_max_sync(~0u, slot);
#pragma unroll 1
  for (int first = 0; first < tokens; first += 32) {
    const int written = first + lane < tokens ? p.slot_mapping[first + lane] : -1;
    const bool may_match = written >= 0 && static_cast<unsigned>(written) - lowest <= highest - lowest;
    for (unsigned left = __ballot_sync(~0u, may_match); left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1, other = __shfl_sync(~0u, written, from);
      if (slot == other) maker = first + from;
    }
  }
  if (lane < kWarpKeys) shared.key_rows[warp][lane] = maker < 0 ? row : -1;
  __syncwarp();
  return maker;
}

// Keys and values of this step among the warp's, as they are rounded on their way into the cache. Where the block's
// token is among those of the warp, own_key and own_value is where it goes in the cache, or null.
template <class S, int kDim>
__device__ __forceinline__ void make_keys(const AttentionParams& p, Shared<kDim>& shared, const Item& item,
                                          int64_t kv_head, int own, int maker, S* own_key) {
  using T = Factor<S>;
  const int warp = threadIdx.x >> 5;
  const int64_t token = item.first_token, head = p.num_heads + kv_head, second = head + p.num_kv_heads;
  const bool writes_apart = own_key != nullptr && __shfl_sync(~0u, maker, own) != token;  // not where it looks for it
  S* own_value = own_key != nullptr ? own_key + p.num_kv_heads * p.block_size * p.head_dim : nullptr;
  WarpTile<kDim>& tile = shared.tiles[warp];
  unsigned made = __ballot_sync(~0u, maker >= 0) | (writes_apart ? 1u << kWarpKeys : 0u);
  for (; made != 0; made &= made - 1) {
    const int key = __ffs(static_cast<int>(made)) - 1;
    const int64_t from = key < kWarpKeys ? __shfl_sync(~0u, maker, key) : token;
    const bool writes = from == token && own_key != nullptr;
    prepare_heads<kDim>(p, from, head, second, shared.staged[warp], [&](int is_value, int i, float value) {
      const S rounded = from_float<S>(value);
      uint8_t* row = is_value != 0 ? tile.values : tile.keys;
      T* target = reinterpret_cast<T*>(row + place<kDim>(key, i & ~7)) + (i & 7);
      if (key < kWarpKeys) *target = from_float<T>(to_float(rounded));
      if (writes) (is_value != 0 ? own_value : own_key)[i] = rounded;
    });
  }
}

template <class S, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocks<S, kDim>)
    attend_decode_kernel(ErrorSink sink, AttentionParams p, int partitions) {
  using T = Factor<S>;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  p.head_dim = kDim;  // a constant now
  const int64_t token = blockIdx.x, kv_head = blockIdx.y, partition = blockIdx.z;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Item item = item_at(p, request_by_warp(p, token), token, 1);
  if (kv_head == 0 && partition == 0) check_step(sink, p, token, item.request);
  const int first = static_cast<int>(item.first_key / kPartitionKeys);
  const int last = static_cast<int>(item.last_position / kPartitionKeys);
  if (partition < first || partition > last) return;

  const int64_t first_key = partition * kPartitionKeys + warp * kWarpKeys;
  const int own = static_cast<int>(item.last_position % kWarpKeys);  // the token's key, of the owner's
  const int owner = partition == last ? static_cast<int>(item.last_position % kPartitionKeys) / kWarpKeys : kWarps;
  const int maker = find_keys(p, shared, item, kv_head, first_key);
  const S* keys = static_cast<const S*>(p.kv_cache);
  const S* values = keys + p.num_kv_heads * p.block_size * p.head_dim;
  WarpTile<kDim>& tile = shared.tiles[warp];
  RowsInFlight<S, kDim, kWarpKeys, 32> keys_in_flight, values_in_flight;
  keys_in_flight.begin(keys, shared.key_rows[warp], tile.keys, lane);
  values_in_flight.begin(values, shared.key_rows[warp], tile.values, lane);
  S* own_key = warp == owner ? slot_of<S>(p, token, 0, kv_head) : nullptr;
  wait_for_previous();

  make_queries<T>(p, shared, token, kv_head, owner);
  keys_in_flight.end(tile.keys, lane);
  values_in_flight.end(tile.values, lane);
  __syncwarp();
  make_keys<S>(p, shared, item, kv_head, own, maker, own_key);
  __syncthreads();

  float scores[2][4] = {};
  uint32_t high[4], low[4];
  make_scores<T>(p, shared, scores);
  weigh<T>(shared, item, first_key, scores, high, low);
  weighted_values<T>(shared, static_cast<int>(p.group), high, low);
  __syncthreads();
  store_state(p, shared, token, kv_head, partition, partitions);
  if (is_last_block(p, token, last - first, shared.is_last)) {
    merge_partitions<false>(p, token, kv_head * p.group, static_cast<int>(p.group), first, last, partitions);
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
