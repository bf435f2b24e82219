// What the kernels of PagedAttention share: elements of the cache and where they lie, the tokens that a block attends
// for, norm and rotation of a head, merging of partial results.
#pragma once

#include <cuda_fp8.h>

#include "activation.cuh"

namespace trivet::cuda {

constexpr int kThreads = 128;
constexpr int kPartitionKeys = 64;
constexpr int64_t kSplitTokens = 64;  // steps of at most so many tokens are split over partitions
constexpr float kInfinity = __builtin_huge_valf();

// --- The cache ----------------------------------------------------------------------------------------------------

// An element of an fp8_e4m3 cache. There are no scales; what it cannot hold becomes the largest that it can.
struct E4M3 {
  uint8_t bits;
};

// Two of them as float16, which holds all their values.
__device__ __forceinline__ uint32_t to_halves(uint16_t pair) {
#if __CUDA_ARCH__ >= 890
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  return static_cast<uint32_t>(halves.x) | static_cast<uint32_t>(halves.y) << 16;
#else
  // The same bits as a float16 are the number times 2^-8, except that all ones are NaN.
  const uint32_t wide = pair, magnitudes = (wide & 0x7F) << 7 | (wide & 0x7F00) << 15;
  const __half2 scaled = __hmul2(reinterpret_cast<const __half2&>(magnitudes), __float2half2_rn(256.0f));
  const uint32_t is_nan = __vcmpeq2(magnitudes, 0x3F803F80);
  return reinterpret_cast<const uint32_t&>(scaled) | (is_nan & 0x7FFF7FFF) | (wide & 0x80) << 8 | (wide & 0x8000) << 16;
#endif
}

__device__ __forceinline__ float to_float(E4M3 x) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(to_halves(x.bits))));
}
template <>
__device__ __forceinline__ E4M3 from_float<E4M3>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool given) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(given ? 16 : 0)
               : "memory");
}

// Until all copies that this thread has begun are there, for this thread.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ int64_t kv_index(const AttentionParams& p, int64_t block, int64_t k_or_v, int64_t kv_head,
                                            int64_t offset) {
  const int64_t head_row = (k_or_v * p.num_kv_heads + kv_head) * p.block_size + offset;
  return block * p.block_stride + p.kv_offset * p.block_size + head_row * p.head_dim;
}

// The block of a request that holds `position`; an id outside the cache, which is reported elsewhere, becomes 0.
__device__ __forceinline__ int64_t block_at(const AttentionParams& p, int64_t request, int64_t position) {
  const unsigned column = static_cast<unsigned>(position) / static_cast<unsigned>(p.block_size);
  const int64_t block = p.block_table[request * p.max_blocks + column];
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

// --- Items --------------------------------------------------------------------------------------------------------

// Consecutive tokens of a request that a block attends for.
struct Item {
  int64_t request;  // -1: none
  int64_t first_token, first_position, last_position;
  int64_t first_key;  // the first position that one of them sees
  int tokens;
};

// What `tokens` of a request from first_token on see.
__device__ __forceinline__ Item item_at(const AttentionParams& p, int64_t request, int64_t first_token, int tokens) {
  Item item{request, first_token, 0, 0, 0, tokens};
  const int64_t limit = p.max_blocks * p.block_size - 1;
  item.first_position = max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.positions[first_token]), limit));
  item.last_position = min(item.first_position + tokens - 1, limit);
  if (p.sliding_window > 0) item.first_key = max(static_cast<int64_t>(0), item.first_position - p.sliding_window + 1);
  return item;
}

// Blocks (x) go over the items of all requests, the longest of a request first; the last ones find none.
__device__ __forceinline__ Item item_of(const AttentionParams& p, int tokens_per_item) {
  int64_t left = blockIdx.x;
  if (tokens_per_item == 1) return item_at(p, request_of(p, left), left, 1);
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const int64_t start = max(static_cast<int64_t>(0), min(static_cast<int64_t>(p.query_start_loc[r]), p.num_tokens));
    const int64_t count = min(static_cast<int64_t>(p.query_start_loc[r + 1]), p.num_tokens) - start;
    const int64_t items = (count + tokens_per_item - 1) / tokens_per_item;
    if (left < items) {
      const int64_t skipped = (items - 1 - left) * tokens_per_item;
      return item_at(p, r, start + skipped,
                     static_cast<int>(min(static_cast<int64_t>(tokens_per_item), count - skipped)));
    }
    left -= items;
  }
  return {-1, 0, 0, 0, 0, 0};
}

// --- Checks -------------------------------------------------------------------------------------------------------

// By all threads of a block, of a token and its request r. Where the borders of the requests make no sense, token 0
// reports that and the others are not judged by them.
__device__ __forceinline__ void check_step(const ErrorSink& sink, const AttentionParams& p, int64_t token, int64_t r) {
  const int64_t last = p.query_start_loc[p.num_requests];
  if (token == 0) {
    for (int64_t i = threadIdx.x; i < p.num_requests; i += blockDim.x) {
      const int64_t start = p.query_start_loc[i], end = p.query_start_loc[i + 1];
      if (i == 0 && start != 0) report(sink, DeviceErrorCode::kQueryStartFirst, 0, start);
      if (end < start || end > p.num_tokens)
        report(sink, DeviceErrorCode::kQueryStart, i + 1, end, start, p.num_tokens);
      if (p.seq_lens[i] < end - start) report(sink, DeviceErrorCode::kSeqLen, i, p.seq_lens[i], end - start);
    }
    if (threadIdx.x == 0 && last != p.num_tokens) {
      report(sink, DeviceErrorCode::kQueryStartLast, p.num_requests, last, p.num_tokens);
    }
  }
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

// A head of a token, made by a warp. begin() has the loads of several heads under way together; finish() calls
// store(i, value) with what the head holds after norm and rotation. head_dim is at most 32 * kEach. Heads count query
// heads, then key heads, then value heads.
template <int kEach>
class HeadInFlight {
 public:
  __device__ __forceinline__ void begin(const AttentionParams& p, int64_t token, int64_t head) {
    const int lane = threadIdx.x & 31, dim = static_cast<int>(p.head_dim);
    const float* source = p.qkv + (token * (p.num_heads + 2 * p.num_kv_heads) + head) * p.head_dim;
    const bool is_value = head >= p.num_heads + p.num_kv_heads;
    const float* norm = is_value ? nullptr : head < p.num_heads ? p.q_norm : p.k_norm;
    has_norm_ = norm != nullptr;
    rotary_dim_ = is_value ? 0 : static_cast<int>(p.rotary_dim);
    const int half = rotary_dim_ / 2;
    const float* cosines = p.cos_sin + token * p.rotary_dim;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + 32 * e;
      values_[e] = i < dim ? source[i] : 0.0f;
      weights_[e] = norm != nullptr && i < dim ? norm[i] : 1.0f;
      const int pair = p.rope_interleaved ? i / 2 : i < half ? i : i - half;
      cosine_[e] = i < rotary_dim_ ? cosines[pair] : 1.0f;
      sine_[e] = i < rotary_dim_ ? cosines[half + pair] : 0.0f;
    }
  }

  // `x` is memory of the warp for head_dim floats.
  template <class Store>
  __device__ __forceinline__ void finish(const AttentionParams& p, float* x, const Store& store) {
    const int lane = threadIdx.x & 31, dim = static_cast<int>(p.head_dim);
    if (has_norm_) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum = fmaf(values_[e], values_[e], sum);
      const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + p.norm_eps);
#pragma unroll
      for (int e = 0; e < kEach; ++e) values_[e] = values_[e] * scale * weights_[e];
    }
    if (rotary_dim_ > 0) rotate(p, x);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (lane + 32 * e < dim) store(lane + 32 * e, values_[e]);
    }
  }

 private:
  __device__ __forceinline__ void rotate(const AttentionParams& p, float* x) {
    const int lane = threadIdx.x & 31, half = rotary_dim_ / 2;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (lane + 32 * e < rotary_dim_) x[lane + 32 * e] = values_[e];
    }
    __syncwarp();
    float others[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + 32 * e, other = p.rope_interleaved ? i ^ 1 : i >= half ? i - half : i + half;
      others[e] = i < rotary_dim_ ? x[other] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = lane + 32 * e;
      const float turned = __fmul_rn(others[e], sine_[e]), kept = __fmul_rn(values_[e], cosine_[e]);
      const bool second = p.rope_interleaved ? (i & 1) != 0 : i >= half;
      const float rotated = second ? __fadd_rn(kept, turned) : __fsub_rn(kept, turned);
      values_[e] = i < rotary_dim_ ? rotated : values_[e];
    }
    __syncwarp();  // x is free again
  }

  float values_[kEach], weights_[kEach], cosine_[kEach], sine_[kEach];
  int rotary_dim_;
  bool has_norm_;
};

template <int kEach, class Store>
__device__ __forceinline__ void prepare_head(const AttentionParams& p, int64_t token, int64_t head, float* x,
                                             const Store& store) {
  HeadInFlight<kEach> in_flight;
  in_flight.begin(p, token, head);
  in_flight.finish(p, x, store);
}

// Where the key (or value) of a token goes in the cache; null if it is not written.
template <class T>
__device__ __forceinline__ T* slot_of(const AttentionParams& p, int64_t token, int64_t k_or_v, int64_t kv_head) {
  const int32_t slot = p.slot_mapping[token];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return nullptr;
  const unsigned at = static_cast<unsigned>(slot), size = static_cast<unsigned>(p.block_size);
  return static_cast<T*>(p.kv_cache) + kv_index(p, at / size, k_or_v, kv_head, at % size);
}

// --- Partial results ----------------------------------------------------------------------------------------------

// State of a row in a partition: head_dim accumulated values, maximum, sum.
constexpr int64_t kStateExtra = 4;  // floats; keeps states 16-byte aligned

__device__ __forceinline__ float* state_of(const AttentionParams& p, int64_t partitions, int64_t token, int64_t head,
                                           int64_t partition) {
  return p.states + ((token * p.num_heads + head) * partitions + partition) * (p.head_dim + kStateExtra);
}

// exp(a - b) where both may be -infinity.
__device__ __forceinline__ float exp_difference(float a, float b) { return expf(a == b ? 0.0f : __fsub_rn(a, b)); }

struct MergeScales {
  float old_scale, part_scale;
};

// One more partition into (max, sum); a partition of which the row sees nothing has sum 0 and changes nothing. No
// branches: the loads and exponentials of several partitions overlap.
__device__ __forceinline__ MergeScales merge(float& max, float& sum, float part_max, float part_sum) {
  const bool seen = part_sum != 0.0f;
  const float highest = seen ? fmaxf(max, part_max) : max;
  const MergeScales scales{exp_difference(max, highest), seen ? exp_difference(part_max, highest) : 0.0f};
  sum = __fadd_rn(__fmul_rn(sum, scales.old_scale), __fmul_rn(part_sum, scales.part_scale));
  max = highest;
  return scales;
}

__device__ __forceinline__ float merged(MergeScales s, float old, float part) {
  const float kept = __fmul_rn(old, s.old_scale);
  return s.part_scale == 0.0f ? kept : __fadd_rn(kept, __fmul_rn(part, s.part_scale));
}

__device__ __forceinline__ float4 merged(MergeScales s, float4 old, float4 part) {
  return make_float4(merged(s, old.x, part.x), merged(s, old.y, part.y), merged(s, old.z, part.z),
                     merged(s, old.w, part.w));
}

__device__ __forceinline__ float final_scale(const AttentionParams& p, int64_t head, float max, float sum) {
  if (p.sinks == nullptr) return 1.0f / sum;
  const float sink = p.sinks[head], highest = fmaxf(max, sink);  // one more logit in the denominator, without a value
  const float rescale = exp_difference(max, highest);
  return rescale / __fadd_rn(__fmul_rn(sum, rescale), exp_difference(sink, highest));
}

// Whether this block is the last one of `others + 1` that have stored states of a token and blockIdx.y.
__device__ __forceinline__ bool is_last_block(const AttentionParams& p, int64_t token, int others, bool& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences order what the barriers order: what every thread stored and what it will load
    int* arrived = p.arrived + token * gridDim.y + blockIdx.y;
    __threadfence();
    shared = atomicAdd(arrived, 1) == others;
    if (shared) *arrived = 0;  // for the next step
    __threadfence();
  }
  __syncthreads();
  return shared;
}

// Elements d to d + 3 of a head from its partitions, in order, and its (max, sum). Several partitions are loaded at a
// time. kOneByOne: merged as in a step that is not split, for the same bits; else scaled at the same time, too.
template <bool kOneByOne>
__device__ __forceinline__ float4 merge_states(const AttentionParams& p, const float* state, int64_t count, int64_t d,
                                               float& max, float& sum) {
  constexpr int kBatch = kOneByOne ? 4 : 10;
  const int64_t stride = p.head_dim + kStateExtra;
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int64_t from = 0; from < count; from += kBatch) {
    float4 parts[kBatch];
    float2 ends[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* part = state + (from + i < count ? from + i : from) * stride;
      parts[i] = __ldcg(reinterpret_cast<const float4*>(part + d));
      ends[i] = __ldcg(reinterpret_cast<const float2*>(part + p.head_dim));
      if (from + i >= count) ends[i].y = 0.0f;
    }
    if constexpr (kOneByOne) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) out = merged(merge(max, sum, ends[i].x, ends[i].y), out, parts[i]);
    } else {
      float highest = max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) highest = ends[i].y != 0.0f ? fmaxf(highest, ends[i].x) : highest;
      const float kept = exp_difference(max, highest);
      out = make_float4(__fmul_rn(out.x, kept), __fmul_rn(out.y, kept), __fmul_rn(out.z, kept), __fmul_rn(out.w, kept));
      sum = __fmul_rn(sum, kept);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float scale = ends[i].y != 0.0f ? exp_difference(ends[i].x, highest) : 0.0f;
        out = merged({1.0f, scale}, out, parts[i]);
        sum = __fadd_rn(sum, __fmul_rn(ends[i].y, scale));
      }
      max = highest;
    }
  }
  return out;
}

// The rows of an item from their partitions; a thread has four dimensions of a head.
template <bool kOneByOne>
__device__ __forceinline__ void merge_partitions(const AttentionParams& p, int64_t token, int64_t first_head, int heads,
                                                 int64_t first, int64_t last, int partitions) {
  const int dim = static_cast<int>(p.head_dim), quads = heads * dim / 4;
  for (int start = 0; start < quads; start += kThreads) {
    const int at = start + static_cast<int>(threadIdx.x);
    const bool inside = at < quads;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (inside) {
      const int64_t head = first_head + at * 4 / dim;
      float max = -kInfinity, sum = 0.0f;
      const float* states = state_of(p, partitions, token, head, first);
      out = merge_states<kOneByOne>(p, states, last - first + 1, at * 4 % dim, max, sum);
      const float scale = final_scale(p, head, max, sum);
      out = make_float4(__fmul_rn(out.x, scale), __fmul_rn(out.y, scale), __fmul_rn(out.z, scale),
                        __fmul_rn(out.w, scale));
      const int64_t row = (token * p.num_heads + first_head) * dim;
      reinterpret_cast<float4*>(p.out + row)[at] = out;
      if (p.rounded != nullptr) {
        __nv_bfloat162* rounded = static_cast<__nv_bfloat162*>(p.rounded) + row / 2 + 2 * at;
        rounded[0] = __floats2bfloat162_rn(out.x, out.y);
        rounded[1] = __floats2bfloat162_rn(out.z, out.w);
      }
    }
    if (p.quantized.values == nullptr) continue;
    const Quantized8 q = quantize_quad(out);
    if (inside) store_quantized(p.quantized, token, p.num_heads * dim, first_head * dim / 4 + at, q);
  }
}

}  // namespace trivet::cuda
