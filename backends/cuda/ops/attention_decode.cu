// PagedAttention of few tokens on tensor cores, for float16 and bfloat16 caches. A block has a token, a KV head with
// its query heads as the 16 rows of a product, and a partition of 64 keys, 16 to a warp. What earlier steps have
// written is fetched before the previous kernel has ended; queries and keys of this step are made in here. The last
// block of a token and KV head merges the partitions.
#include "attention_mma.cuh"

namespace trivet::cuda {
namespace {

constexpr int kWarps = kThreads / 32, kWarpKeys = kPartitionKeys / kWarps, kRows = 16;
static_assert(kWarpKeys == 16);

template <int kDim>
struct Shared {
  uint8_t high[kRows * kDim * 2], low[kRows * kDim * 2];  // queries, and what rounding took from them
  uint8_t keys[kWarps][kWarpKeys * kDim * 2], values[kWarps][kWarpKeys * kDim * 2];
  float staged[kWarps][kDim];                                              // for prepare_head
  float out[kWarps][kRows][kDim], max[kWarps][kRows], sum[kWarps][kRows];  // of the warps
  int slots[kSplitTokens];                                                 // that this step writes
  bool is_last;
};

struct Place {
  int64_t request, position, start;  // of the token, and the first key that it sees
};

__device__ __forceinline__ Place place_of(const AttentionParams& p, int64_t token) {
  Place place;
  place.request = request_of(p, token);
  const int64_t limit = p.max_blocks * p.block_size;
  place.position = max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.positions[token]), limit - 1));
  place.start = p.sliding_window > 0 ? max(static_cast<int64_t>(0), place.position - p.sliding_window + 1) : 0;
  return place;
}

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
    prepare_head<kDim / 32>(p, token, kv_head * p.group + row, shared.staged[warp], store);
  } else {
    for (int i = lane; i < kDim; i += 32) store(i, 0.0f);
  }
}

// A warp's scores of its 16 keys, as weights; fills its part of max, sum and out.
template <class T, int kDim>
__device__ __forceinline__ void attend_keys(const AttentionParams& p, Shared<kDim>& shared, const Place& where,
                                            int64_t first_key) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float scores[2][4] = {};
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t q[4], rest[4], k[4];
    load_matrix<false>(q, shared.high + place<kDim>(lane & 15, d + (lane >> 4) * 8));
    load_matrix<false>(rest, shared.low + place<kDim>(lane & 15, d + (lane >> 4) * 8));
    load_matrix<false>(k, shared.keys[warp] + place<kDim>((lane & 7) + (lane >> 4) * 8, d + (lane >> 3 & 1) * 8));
    multiply<T>(scores[0], q, k[0], k[1]);
    multiply<T>(scores[1], q, k[2], k[3]);
    multiply<T>(scores[0], rest, k[0], k[1]);
    multiply<T>(scores[1], rest, k[2], k[3]);
  }
  uint32_t high[4], low[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = -kInfinity;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = first_key + i / 2 * 8 + lane % 4 * 2 + i % 2;
      float& score = scores[i / 2][half * 2 + i % 2];
      if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);
      if (key < where.start || key > where.position) score = -kInfinity;
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
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t v[4];
    float out[2][4] = {};
    load_matrix<true>(v, shared.values[warp] + place<kDim>(lane & 15, n * 16 + (lane >> 4) * 8));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply<T>(out[i], high, v[2 * i], v[2 * i + 1]);
      multiply<T>(out[i], low, v[2 * i], v[2 * i + 1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        if (row >= p.group) continue;
        float* target = &shared.out[warp][row][n * 16 + i * 8 + lane % 4 * 2];
        *reinterpret_cast<float2*>(target) = make_float2(out[i][2 * half], out[i][2 * half + 1]);
      }
    }
  }
}

// The warps' parts become the state of the partition.
template <int kDim>
__device__ __forceinline__ void store_state(const AttentionParams& p, const Shared<kDim>& shared, int64_t token,
                                            int64_t kv_head, int64_t partition, int partitions) {
  for (int i = threadIdx.x; i < p.group * (kDim / 4); i += kThreads) {
    const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
    float max = -kInfinity, sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const MergeScales scales = merge(max, sum, shared.max[w][row], shared.sum[w][row]);
      const float4 part = *reinterpret_cast<const float4*>(&shared.out[w][row][d]);
      out = make_float4(merged(scales, out.x, part.x), merged(scales, out.y, part.y), merged(scales, out.z, part.z),
                        merged(scales, out.w, part.w));
    }
    float* state = state_of(p, partitions, token, kv_head * p.group + row, partition);
    *reinterpret_cast<float4*>(state + d) = out;
    if (d == 0) *reinterpret_cast<float2*>(state + kDim) = make_float2(max, sum);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) attend_decode_kernel(ErrorSink sink, AttentionParams p, int partitions) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  const int64_t token = blockIdx.x, kv_head = blockIdx.y, partition = blockIdx.z;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  if (kv_head == 0 && partition == 0) check_step(sink, p, token);
  const Place where = place_of(p, token);
  const int64_t first = where.start / kPartitionKeys, last = where.position / kPartitionKeys;
  if (partition < first || partition > last) return;
  for (int i = thread; i < p.num_tokens; i += kThreads) shared.slots[i] = p.slot_mapping[i];
  __syncthreads();

  // Lanes 0 to 15 look up the keys of the warp: where a key lies in the cache, or else the token of this step that
  // makes it.
  const int64_t first_key = partition * kPartitionKeys + warp * kWarpKeys;
  int64_t row = -1;
  int maker = -1;
  if (lane < kWarpKeys) {
    const unsigned key = static_cast<unsigned>(first_key + lane), size = static_cast<unsigned>(p.block_size);
    if (key >= where.start && key <= where.position) {
      const int64_t block = block_at(p, where.request, key);
      const int slot = static_cast<int>(block * size + key % size);
      for (int t = 0; t < p.num_tokens; ++t) maker = shared.slots[t] == slot ? t : maker;
      if (maker < 0) row = kv_index(p, block, 0, kv_head, key % size);
    }
  }
  const T* cache = static_cast<const T*>(p.kv_cache);
  const int64_t to_values = p.num_kv_heads * p.block_size * p.head_dim;
#pragma unroll
  for (int i = 0; i < kWarpKeys * kDim / 8 / 32; ++i) {
    const int at = lane + i * 32, key = at / (kDim / 8), part = at % (kDim / 8);
    const int64_t from_row = __shfl_sync(~0u, row, key);
    const T* from = cache + (from_row >= 0 ? from_row + part * 8 : 0);
    copy_async(shared.keys[warp] + place<kDim>(key, part * 8), from, from_row >= 0);
    copy_async(shared.values[warp] + place<kDim>(key, part * 8), from_row >= 0 ? from + to_values : from,
               from_row >= 0);
  }
  wait_for_previous();

  for (int r = warp; r < kRows; r += kWarps) make_query<T, kDim>(p, shared, token, kv_head, r);
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  const auto make = [&](int64_t from, int is_value, const auto& store) {
    prepare_head<kDim / 32>(p, from, p.num_heads + is_value * p.num_kv_heads + kv_head, shared.staged[warp], store);
  };
  for (unsigned made = __ballot_sync(~0u, maker >= 0); made != 0; made &= made - 1) {
    const int key = __ffs(static_cast<int>(made)) - 1;
    const int64_t from = __shfl_sync(~0u, maker, key);
    for (int is_value = 0; is_value < 2; ++is_value) {
      uint8_t* target = is_value != 0 ? shared.values[warp] : shared.keys[warp];
      T* slot = from == token ? slot_of<T>(p, token, is_value, kv_head) : nullptr;
      make(from, is_value, [&](int i, float value) {
        const T rounded = from_float<T>(value);
        *reinterpret_cast<T*>(target + place<kDim>(key, i & ~7) + (i & 7) * 2) = rounded;
        if (slot != nullptr) slot[i] = rounded;
      });
    }
  }
  const int own = static_cast<int>(where.position - first_key);
  if (own >= 0 && own < kWarpKeys && __shfl_sync(~0u, maker, own) != token) {  // its slot is not where it looks for it
    for (int is_value = 0; is_value < 2; ++is_value) {
      T* slot = slot_of<T>(p, token, is_value, kv_head);
      if (slot != nullptr) make(token, is_value, [&](int i, float value) { slot[i] = from_float<T>(value); });
    }
  }
  __syncthreads();
  attend_keys<T, kDim>(p, shared, where, first_key);
  __syncthreads();
  store_state(p, shared, token, kv_head, partition, partitions);
  if (is_last_block(p, token, static_cast<int>(last - first), shared.is_last)) {
    merge_partitions(p, token, kv_head * p.group, static_cast<int>(p.group), first, last, partitions);
  }
}

template <class T, int kDim>
cudaError_t start(const Launch& on, const ErrorSink& sink, const AttentionParams& p, int partitions) {
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(partitions));
  return launch(on, attend_decode_kernel<T, kDim>, grid, dim3(kThreads), sizeof(Shared<kDim>), sink, p, partitions);
}

}  // namespace

bool decodes_on_tensor_cores(const AttentionParams& p) { return attends_on_tensor_cores(p) && p.group <= kRows; }

cudaError_t attend_decode(const Launch& on, ErrorSink sink, const AttentionParams& p, int partitions) {
  if (p.kv_dtype == 1) {
    return p.head_dim == 64 ? start<__half, 64>(on, sink, p, partitions) : start<__half, 128>(on, sink, p, partitions);
  }
  return p.head_dim == 64 ? start<__nv_bfloat16, 64>(on, sink, p, partitions)
                          : start<__nv_bfloat16, 128>(on, sink, p, partitions);
}

}  // namespace trivet::cuda
