// PagedAttention of many tokens on tensor cores, for float16, bfloat16 and fp8_e4m3 caches. A block has an item (some
// consecutive tokens of a request, all query heads of one KV head) as rows, 16 to a warp, and goes over tiles of keys:
// the next keys are on their way while values are used, and the other way round. Keys and values are multiplied as they
// are stored; a query or a weight goes in as the sum of two numbers, so that the result is as good as float32
// arithmetic.
#include "attention_mma.cuh"

namespace trivet::cuda {
namespace {

// For heads of kDim. Its memory fits in the 99 KiB that a block may have on every SM.
template <int kDim>
struct Block {
  static constexpr int kWarps = kDim <= 128 ? 8 : 4, kThreadCount = kWarps * 32, kRows = kWarps * 16;
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;  // of a tile

  uint8_t high[kRows * kRowBytes<kDim>];  // queries
  uint8_t low[kRows * kRowBytes<kDim>];   // what rounding took from them
  uint8_t keys[kKeys * kRowBytes<kDim>], values[kKeys * kRowBytes<kDim>];
  int64_t key_rows[2][kKeys];  // of this tile and the next
  Item item;
};

// A warp's 16 rows: running maximum and sum of rows lane / 4 and lane / 4 + 8, and what they have gathered of values.
template <int kDim>
struct Rows16 {
  float max[2] = {-kInfinity, -kInfinity}, sum[2] = {};
  float out[kDim / 8][4] = {};
};

// Scores of a warp's 16 rows: of column 8 * n + lane % 4 * 2 + e % 2 for row lane / 4 + e / 2 * 8.
template <int kDim>
using Scores = float[Block<kDim>::kKeys / 8][4];

template <class T, int kDim>
__device__ __forceinline__ void load_queries(const AttentionParams& p, Block<kDim>& block, int64_t kv_head, int rows) {
  const int group = static_cast<int>(p.group);
  for (int i = threadIdx.x; i < Block<kDim>::kRows * kDim / 2; i += Block<kDim>::kThreadCount) {
    const int row = i / (kDim / 2), d = i % (kDim / 2) * 2;
    float2 q = make_float2(0.0f, 0.0f);
    if (row < rows) {
      const int64_t head = (block.item.first_token + row / group) * p.num_heads + kv_head * group + row % group;
      q = *reinterpret_cast<const float2*>(p.queries + head * kDim + d);
    }
    const Split<T> parts = split<T>(in_range<T>(q.x), in_range<T>(q.y));
    const int at = place<kDim>(row, d & ~7) + (d & 7) * 2;
    *reinterpret_cast<uint32_t*>(block.high + at) = parts.high;
    *reinterpret_cast<uint32_t*>(block.low + at) = parts.low;
  }
}

template <class T, int kDim>
__device__ __forceinline__ void add_scores(Scores<kDim>& scores, const Block<kDim>& block, int first_row) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t q[4], rest[4];
    load_matrix<false>(q, block.high + place<kDim>(first_row + (lane & 15), d + (lane >> 4) * 8));
    load_matrix<false>(rest, block.low + place<kDim>(first_row + (lane & 15), d + (lane >> 4) * 8));
#pragma unroll
    for (int n = 0; n < Block<kDim>::kKeys / 16; ++n) {
      uint32_t k[4];
      load_matrix<false>(k, block.keys + place<kDim>(n * 16 + (lane & 7) + (lane >> 4) * 8, d + (lane >> 3 & 1) * 8));
      multiply<T>(scores[2 * n], q, k[0], k[1]);
      multiply<T>(scores[2 * n + 1], q, k[2], k[3]);
      multiply<T>(scores[2 * n], rest, k[0], k[1]);
      multiply<T>(scores[2 * n + 1], rest, k[2], k[3]);
    }
  }
}

// Scores to weights: e^(score - maximum); what was gathered before is brought to the new maximum.
template <int kDim>
__device__ __forceinline__ void weigh(Rows16<kDim>& rows, Scores<kDim>& scores) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = rows.max[half];
#pragma unroll
    for (int n = 0; n < Block<kDim>::kKeys / 8; ++n) {
      highest = fmaxf(highest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    const float base = highest == -kInfinity ? 0.0f : highest;
    const float rescale = __expf(rows.max[half] - base);
    rows.max[half] = highest;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Block<kDim>::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[n][e] = __expf(scores[n][e] - base);
        sum += scores[n][e];
      }
    }
    rows.sum[half] = rows.sum[half] * rescale + sum;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      rows.out[n][2 * half] *= rescale;
      rows.out[n][2 * half + 1] *= rescale;
    }
  }
}

template <class T, int kDim>
__device__ __forceinline__ void add_values(Rows16<kDim>& rows, const Scores<kDim>& weights, const Block<kDim>& block) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < Block<kDim>::kKeys / 16; ++k) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&w)[4] = weights[2 * k + i / 2];
      const Split<T> parts = split<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
      high[i] = parts.high;
      low[i] = parts.low;
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t v[4];
      load_matrix<true>(v, block.values + place<kDim>(k * 16 + (lane & 15), n * 16 + (lane >> 4) * 8));
      multiply<T>(rows.out[2 * n], high, v[0], v[1]);
      multiply<T>(rows.out[2 * n + 1], high, v[2], v[3]);
      multiply<T>(rows.out[2 * n], low, v[0], v[1]);
      multiply<T>(rows.out[2 * n + 1], low, v[2], v[3]);
    }
  }
}

// Soft cap, then what a row may not see becomes -infinity.
template <int kDim>
__device__ __forceinline__ void mask(const AttentionParams& p, const Item& item, int64_t tile, int first_row,
                                     Scores<kDim>& scores) {
  const int lane = threadIdx.x & 31, group = static_cast<int>(p.group);
  if (p.soft_cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < Block<kDim>::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = p.soft_cap * tanhf(scores[n][e] / p.soft_cap);
    }
  }
  const bool all_seen = tile + Block<kDim>::kKeys <= item.first_position + 1 &&
                        (p.sliding_window == 0 || tile > item.last_position - p.sliding_window);
  if (all_seen) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int64_t position = item.first_position + (first_row + lane / 4 + e / 2 * 8) / group;
#pragma unroll
    for (int n = 0; n < Block<kDim>::kKeys / 8; ++n) {
      const int64_t at = tile + n * 8 + lane % 4 * 2 + e % 2;
      const bool seen =
          at <= position && at <= item.last_position && (p.sliding_window == 0 || at > position - p.sliding_window);
      if (!seen) scores[n][e] = -kInfinity;
    }
  }
}

template <class T, int kDim>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const Item& item, const Rows16<kDim>& rows,
                                           int64_t kv_head, int first_row) {
  const int lane = threadIdx.x & 31, group = static_cast<int>(p.group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = first_row + lane / 4 + half * 8;
    if (row >= item.tokens * group) continue;
    const int64_t head = kv_head * group + row % group;
    const float scale = final_scale(p, head, rows.max[half], sum);
    const int64_t at = ((item.first_token + row / group) * p.num_heads + head) * kDim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 out = make_float2(rows.out[n][2 * half] * scale, rows.out[n][2 * half + 1] * scale);
      *reinterpret_cast<float2*>(p.out + at + n * 8) = out;
      if (p.rounded == nullptr) continue;
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.rounded) + at + n * 8) =
          __floats2bfloat162_rn(out.x, out.y);
    }
  }
}

template <class S, int kDim>
__global__ void __launch_bounds__(Block<kDim>::kThreadCount, 1)
    attend_mma_kernel(AttentionParams p, int tokens_per_item) {
  using T = Factor<S>;
  constexpr int kKeys = Block<kDim>::kKeys;
  extern __shared__ __align__(128) uint8_t memory[];
  Block<kDim>& block = *reinterpret_cast<Block<kDim>*>(memory);
  wait_for_previous();
  const int thread = threadIdx.x, first_row = thread / 32 * 16;
  if (thread == 0) block.item = item_of(p, tokens_per_item);
  __syncthreads();
  const Item item = block.item;
  if (item.request < 0) return;
  const int64_t kv_head = blockIdx.y;
  const S* keys = static_cast<const S*>(p.kv_cache);
  const S* values = keys + p.num_kv_heads * p.block_size * p.head_dim;
  const int rows = item.tokens * static_cast<int>(p.group);

  const auto find_keys = [&](int64_t tile, int buffer) {
    if (thread >= kKeys) return;
    const int64_t at = tile + thread;
    const bool seen = at >= item.first_key && at <= item.last_position;
    block.key_rows[buffer][thread] =
        seen ? kv_index(p, block_at(p, item.request, at), 0, kv_head, at % p.block_size) : -1;
  };
  RowsInFlight<S, kDim, kKeys, Block<kDim>::kThreadCount> keys_in_flight, values_in_flight;
  int64_t tile = item.first_key / kKeys * kKeys;
  find_keys(tile, 0);
  __syncthreads();
  keys_in_flight.begin(keys, block.key_rows[0], block.keys, thread);
  load_queries<T>(p, block, kv_head, rows);
  Rows16<kDim> gathered;
  for (int buffer = 0; tile <= item.last_position; tile += kKeys, buffer ^= 1) {
    const bool more = tile + kKeys <= item.last_position, has_rows = first_row < rows;
    keys_in_flight.end(block.keys, thread);
    __syncthreads();  // these keys are here, and all warps are done with the values before
    values_in_flight.begin(values, block.key_rows[buffer], block.values, thread);
    if (more) find_keys(tile + kKeys, buffer ^ 1);
    Scores<kDim> scores = {};
    if (has_rows) add_scores<T>(scores, block, first_row);
    values_in_flight.end(block.values, thread);
    __syncthreads();  // the values are here, and all warps are done with the keys
    if (more) keys_in_flight.begin(keys, block.key_rows[buffer ^ 1], block.keys, thread);
    if (!has_rows) continue;
    mask<kDim>(p, item, tile, first_row, scores);
    weigh(gathered, scores);
    add_values<T>(gathered, scores, block);
  }
  store_rows<T>(p, item, gathered, kv_head, first_row);
}

template <class S, int kDim>
cudaError_t start(const Launch& on, const AttentionParams& p) {
  static_assert(sizeof(Block<kDim>) <= 99 * 1024);
  const int tokens = Block<kDim>::kRows / static_cast<int>(p.group);
  const dim3 grid(static_cast<unsigned>(p.num_tokens / tokens + p.num_requests), static_cast<unsigned>(p.num_kv_heads));
  return launch(on, attend_mma_kernel<S, kDim>, grid, dim3(Block<kDim>::kThreadCount), sizeof(Block<kDim>), p, tokens);
}

template <class S>
cudaError_t start_dim(const Launch& on, const AttentionParams& p) {
  if (p.head_dim == 64) return start<S, 64>(on, p);
  if (p.head_dim == 80) return start<S, 80>(on, p);
  if (p.head_dim == 96) return start<S, 96>(on, p);
  if (p.head_dim == 128) return start<S, 128>(on, p);
  return start<S, 256>(on, p);
}

}  // namespace

bool attends_on_tensor_cores(const AttentionParams& p) {
  const int64_t dim = p.head_dim;
  const bool has_dim = dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256;
  return p.tensor_cores && p.kv_dtype != KvDtype::kFloat32 && has_dim && p.group <= Block<256>::kRows;
}

cudaError_t attend_mma(const Launch& on, const AttentionParams& p) {
  if (p.kv_dtype == KvDtype::kFloat16) return start_dim<__half>(on, p);
  if (p.kv_dtype == KvDtype::kBFloat16) return start_dim<__nv_bfloat16>(on, p);
  return start_dim<E4M3>(on, p);
}

}  // namespace trivet::cuda
