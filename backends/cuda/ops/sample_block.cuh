// What the parts of Sample share: a block has a row of logits, and this is how its threads agree on something.
#pragma once

#include "device.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 256;
constexpr int64_t kNoToken = -1;
constexpr int kScanLogprobs = 64;                  // more are ranked by a kernel of their own
constexpr double kWeightOne = 1.7592186044416e13;  // 2^44
constexpr float kGreedyBelow = 1e-5f;              // temperature
constexpr float kInfinity = __builtin_huge_valf();

using Key = unsigned long long;

// Bits in the order of the values; the two zeros are one.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Higher value first, then lower id.
__device__ __forceinline__ Key rank_key(float x, int64_t id) {
  return static_cast<Key>(ordered(x)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

__device__ __forceinline__ int64_t id_of(Key key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

struct Shared {
  Key warp_keys[kWarps];
  Key histogram[kBins];
  Key warp_sums[kWarps];
  double warp_doubles[kWarps];
  int warp_counts[kWarps];
  Key result;
  double total;
  int bad, bin;
  unsigned long long first_bad;
};

__device__ Key block_highest(Key key, Shared& s) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const Key other = __shfl_xor_sync(~0u, key, offset);
    key = other > key ? other : key;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) s.warp_keys[threadIdx.x >> 5] = key;
  __syncthreads();
  key = s.warp_keys[threadIdx.x & 31];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const Key other = __shfl_xor_sync(~0u, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

__device__ double block_total(double x, Shared& s) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) s.warp_doubles[threadIdx.x >> 5] = x;
  __syncthreads();
  x = s.warp_doubles[threadIdx.x & 31];
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

struct Best {
  float value;
  int64_t id;
  bool valid;  // no NaN, no +infinity
};

// The highest logit, the first of several; of what makes them invalid the first id is left in s.first_bad.
__device__ Best highest_of(const float* logits, int64_t vocab, Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.first_bad = ~0ull;
  __syncthreads();
  float highest = -kInfinity;
  int highest_id = -1, first_bad = -1;
  const auto take = [&](float x, int id) {  // in the order of the ids
    if (!(x < kInfinity) && first_bad < 0) first_bad = id;
    if (x > highest || highest_id < 0) {
      highest = x;
      highest_id = id;
    }
  };
  const int count = static_cast<int>(vocab), thread = threadIdx.x;
  if (count % 4 == 0) {  // rows are whole 16-byte words
#pragma unroll 8
    for (int i = thread; i < count / 4; i += kThreads) {
      const float4 x = reinterpret_cast<const float4*>(logits)[i];
      take(x.x, 4 * i);
      take(x.y, 4 * i + 1);
      take(x.z, 4 * i + 2);
      take(x.w, 4 * i + 3);
    }
  } else {
#pragma unroll 8
    for (int id = thread; id < count; id += kThreads) take(logits[id], id);
  }
  if (first_bad >= 0) atomicMin(&s.first_bad, static_cast<unsigned long long>(first_bad));
  const Key key = block_highest(highest_id < 0 ? Key{0} : rank_key(highest, highest_id), s);
  const bool valid = s.first_bad == ~0ull;
  const int64_t id = id_of(key);
  return {valid ? logits[id] : 0.0f, id, valid};
}

}  // namespace
}  // namespace trivet::cuda
