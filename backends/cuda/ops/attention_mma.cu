// PagedAttention of many tokens on tensor cores, for float16 and bfloat16 caches. A block has an item (some consecutive
// tokens of a request, all query heads of one KV head) as up to 128 rows, 16 to a warp, and goes over tiles of 64 keys:
// the next tile is on its way while this one is used. Keys and values are multiplied as they are stored; a query or a
// weight goes in as the sum of two numbers of that type, so that the result is as good as float32 arithmetic.
#include "attention_mma.cuh"

namespace trivet::cuda {
namespace {

constexpr int kWarps = 8, kBlockRows = kWarps * 16, kKeys = 64;

struct Item {
  int64_t request, first_token, first_position, last_position, first_tile;
  int rows;
};

__device__ __forceinline__ Item item_of(const AttentionParams& p, int tokens_per_item) {
  Item item{-1, 0, 0, 0, 0, 0};
  int64_t left = blockIdx.x;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const int64_t start = p.query_start_loc[r], count = p.query_start_loc[r + 1] - start;
    const int64_t items = (count + tokens_per_item - 1) / tokens_per_item;
    if (left >= items) {
      left -= items;
      continue;
    }
    item.request = r;
    item.first_token = start + (items - 1 - left) * tokens_per_item;  // the longest first
    const int64_t tokens = min(static_cast<int64_t>(tokens_per_item), start + count - item.first_token);
    const int64_t limit = p.max_blocks * p.block_size - 1;
    item.first_position = max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.positions[item.first_token]), limit));
    item.last_position = min(item.first_position + tokens - 1, limit);
    item.rows = static_cast<int>(tokens * p.group);
    if (p.sliding_window > 0) {
      item.first_tile = max(static_cast<int64_t>(0), item.first_position - p.sliding_window + 1) / kKeys * kKeys;
    }
    break;
  }
  return item;
}

// A warp's 16 rows: running maximum and sum of rows lane / 4 and lane / 4 + 8, and what they have gathered of values.
template <int kDim>
struct Rows16 {
  float max[2] = {-kInfinity, -kInfinity}, sum[2] = {};
  float out[kDim / 8][4] = {};
};

template <class T, int kDim>
__device__ __forceinline__ void add_scores(float (&scores)[kKeys / 8][4], const uint8_t* high, const uint8_t* low,
                                           const uint8_t* keys) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t q[4], rest[4];
    load_matrix<false>(q, high + place<kDim>(lane & 15, d + (lane >> 4) * 8));
    load_matrix<false>(rest, low + place<kDim>(lane & 15, d + (lane >> 4) * 8));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t k[4];
      load_matrix<false>(k, keys + place<kDim>(n * 16 + (lane & 7) + (lane >> 4) * 8, d + (lane >> 3 & 1) * 8));
      multiply<T>(scores[2 * n], q, k[0], k[1]);
      multiply<T>(scores[2 * n + 1], q, k[2], k[3]);
      multiply<T>(scores[2 * n], rest, k[0], k[1]);
      multiply<T>(scores[2 * n + 1], rest, k[2], k[3]);
    }
  }
}

// Scores to weights: e^(score - maximum); what was gathered before is brought to the new maximum.
template <int kDim>
__device__ __forceinline__ void weigh(Rows16<kDim>& rows, float (&scores)[kKeys / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = rows.max[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      highest = fmaxf(highest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    const float base = highest == -kInfinity ? 0.0f : highest;
    const float rescale = __expf(rows.max[half] - base);
    rows.max[half] = highest;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
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
__device__ __forceinline__ void add_values(Rows16<kDim>& rows, const float (&weights)[kKeys / 8][4],
                                           const uint8_t* values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
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
      load_matrix<true>(v, values + place<kDim>(k * 16 + (lane & 15), n * 16 + (lane >> 4) * 8));
      multiply<T>(rows.out[2 * n], high, v[0], v[1]);
      multiply<T>(rows.out[2 * n + 1], high, v[2], v[3]);
      multiply<T>(rows.out[2 * n], low, v[0], v[1]);
      multiply<T>(rows.out[2 * n + 1], low, v[2], v[3]);
    }
  }
}

// Soft cap, then what a row may not see becomes -infinity.
__device__ __forceinline__ void mask(const AttentionParams& p, const Item& item, int64_t tile, int first_row,
                                     float (&scores)[kKeys / 8][4]) {
  const int lane = threadIdx.x & 31, group = static_cast<int>(p.group);
  if (p.soft_cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = p.soft_cap * tanhf(scores[n][e] / p.soft_cap);
    }
  }
  const bool all_seen = tile + kKeys <= item.first_position + 1 &&
                        (p.sliding_window == 0 || tile > item.last_position - p.sliding_window);
  if (all_seen) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int64_t position = item.first_position + (first_row + lane / 4 + e / 2 * 8) / group;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const int64_t at = tile + n * 8 + lane % 4 * 2 + e % 2;
      const bool seen =
          at <= position && at <= item.last_position && (p.sliding_window == 0 || at > position - p.sliding_window);
      if (!seen) scores[n][e] = -kInfinity;
    }
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kWarps * 32, 1) attend_mma_kernel(AttentionParams p, int tokens_per_item) {
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr int kTileBytes = kKeys * kDim * 2, kQueryBytes = kBlockRows * kDim * 2;
  uint8_t* high = memory;              // queries [kBlockRows][kDim]
  uint8_t* low = high + kQueryBytes;   // what rounding took from them
  uint8_t* tiles = low + kQueryBytes;  // [2][keys, values][kKeys][kDim]
  __shared__ int64_t key_rows[2][kKeys];
  __shared__ Item shared_item;
  wait_for_previous();
  const int thread = threadIdx.x, lane = thread & 31, first_row = thread / 32 * 16, group = static_cast<int>(p.group);
  if (thread == 0) shared_item = item_of(p, tokens_per_item);
  __syncthreads();
  const Item item = shared_item;
  if (item.request < 0) return;
  const int64_t kv_head = blockIdx.y;
  const T* cache = static_cast<const T*>(p.kv_cache);
  const int64_t to_values = p.num_kv_heads * p.block_size * p.head_dim;

  const auto find_keys = [&](int64_t tile, int buffer) {
    if (thread >= kKeys) return;
    const int64_t at = tile + thread;
    key_rows[buffer][thread] =
        at > item.last_position ? -1 : kv_index(p, block_at(p, item.request, at), 0, kv_head, at % p.block_size);
  };
  const auto fetch = [&](int buffer) {
    uint8_t* keys = tiles + buffer * 2 * kTileBytes;
#pragma unroll
    for (int i = 0; i < kKeys * kDim / 8 / (kWarps * 32); ++i) {
      const int at = thread + i * kWarps * 32, key = at / (kDim / 8), part = at % (kDim / 8);
      const int64_t row = key_rows[buffer][key];
      const T* from = cache + (row >= 0 ? row + part * 8 : 0);
      copy_async(keys + place<kDim>(key, part * 8), from, row >= 0);
      copy_async(keys + kTileBytes + place<kDim>(key, part * 8), row >= 0 ? from + to_values : from, row >= 0);
    }
  };
  find_keys(item.first_tile, 0);
  __syncthreads();
  fetch(0);
  for (int i = thread; i < kBlockRows * kDim / 2; i += kWarps * 32) {
    const int row = i / (kDim / 2), d = i % (kDim / 2) * 2;
    float2 q = make_float2(0.0f, 0.0f);
    if (row < item.rows) {
      const int64_t head = (item.first_token + row / group) * p.num_heads + kv_head * group + row % group;
      q = *reinterpret_cast<const float2*>(p.queries + head * kDim + d);
    }
    const Split<T> parts = split<T>(in_range<T>(q.x), in_range<T>(q.y));
    const int at = place<kDim>(row, d & ~7) + (d & 7) * 2;
    *reinterpret_cast<uint32_t*>(high + at) = parts.high;
    *reinterpret_cast<uint32_t*>(low + at) = parts.low;
  }

  Rows16<kDim> rows;
  int buffer = 0;
  for (int64_t tile = item.first_tile; tile <= item.last_position; tile += kKeys, buffer ^= 1) {
    const bool more = tile + kKeys <= item.last_position;
    if (more) find_keys(tile + kKeys, buffer ^ 1);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // this tile is here, and all warps are done with the other one
    if (more) fetch(buffer ^ 1);
    if (first_row >= item.rows) continue;
    const uint8_t* keys = tiles + buffer * 2 * kTileBytes;
    float scores[kKeys / 8][4] = {};
    add_scores<T, kDim>(scores, high + first_row * kDim * 2, low + first_row * kDim * 2, keys);
    mask(p, item, tile, first_row, scores);
    weigh(rows, scores);
    add_values<T, kDim>(rows, scores, keys + kTileBytes);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = first_row + lane / 4 + half * 8;
    if (row >= item.rows) continue;
    const int64_t head = kv_head * group + row % group;
    const float scale = final_scale(p, head, rows.max[half], sum);
    float* out = p.out + ((item.first_token + row / group) * p.num_heads + head) * kDim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(out + n * 8) =
          make_float2(rows.out[n][2 * half] * scale, rows.out[n][2 * half + 1] * scale);
    }
  }
}

template <class T, int kDim>
cudaError_t start(const Launch& on, const AttentionParams& p) {
  const int tokens = kBlockRows / static_cast<int>(p.group);
  const dim3 grid(static_cast<unsigned>(p.num_tokens / tokens + p.num_requests), static_cast<unsigned>(p.num_kv_heads));
  constexpr size_t kBytes = (2 * kBlockRows + 4 * kKeys) * kDim * 2;
  return launch(on, attend_mma_kernel<T, kDim>, grid, dim3(kWarps * 32), kBytes, p, tokens);
}

}  // namespace

bool attends_on_tensor_cores(const AttentionParams& p) {
  return p.tensor_cores && p.kv_dtype != 0 && (p.head_dim == 64 || p.head_dim == 128) && p.group <= kBlockRows;
}

cudaError_t attend_mma(const Launch& on, const AttentionParams& p) {
  if (p.kv_dtype == 1) return p.head_dim == 64 ? start<__half, 64>(on, p) : start<__half, 128>(on, p);
  return p.head_dim == 64 ? start<__nv_bfloat16, 64>(on, p) : start<__nv_bfloat16, 128>(on, p);
}

}  // namespace trivet::cuda
