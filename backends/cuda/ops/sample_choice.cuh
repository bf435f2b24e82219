// Choosing: thresholds by radix selection, a draw by integer sums of weights.
#pragma once

#include "sample_block.cuh"

namespace trivet::cuda {
namespace {

// --- Uniform numbers: Philox4x32-10 with the seed as key and the offset as counter ---------------------------------

__device__ double uniform(int64_t seed, int64_t offset) {
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(static_cast<uint64_t>(offset) >> 32), c2 = 0,
           c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  for (int i = 0; i < 10; ++i) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint64_t bits = (static_cast<uint64_t>(c0) << 32 | c1) >> 11;
  return static_cast<double>(bits) * 1.1102230246251565e-16;  // 2^-53
}

// --- Choosing -----------------------------------------------------------------------------------------------------

// What may be drawn: values (logit / temperature) that reach `floor`; of those above the key `threshold` all, of those
// at it the first `ties` by id.
struct Choice {
  const float* logits;
  int64_t vocab;
  float temperature, highest;
  double floor;
  uint32_t threshold;
  unsigned long long ties;

  __device__ __forceinline__ float value(int64_t id) const { return __fdiv_rn(logits[id], temperature); }
  __device__ __forceinline__ bool candidate(float value) const { return static_cast<double>(value) >= floor; }
  __device__ __forceinline__ Key weight(float value) const {
    return static_cast<Key>(static_cast<double>(expf(__fsub_rn(value, highest))) * kWeightOne);
  }
};

// The bin, counted from the highest, in which the running sum of s.histogram reaches `wanted`; s.result: the sum before
// it.
__device__ int reach(Key wanted, Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) {
    Key before = 0;
    int bin = kBins - 1, last_used = 0;
    for (; bin >= 0; --bin) {
      if (s.histogram[bin] != 0) last_used = bin;
      if (before + s.histogram[bin] >= wanted) break;
      before += s.histogram[bin];
    }
    if (bin < 0) {  // not reached: all of it
      bin = last_used;
      before -= s.histogram[bin];
    }
    s.bin = bin;
    s.result = before;
  }
  __syncthreads();
  return s.bin;
}

// The key at which the sum over the values in descending order reaches `wanted`; `before`: the sum above it.
// amount(value) is 0 for values that do not count.
template <class Amount>
__device__ uint32_t select(const Choice& c, Key wanted, const Amount& amount, Key& before, Shared& s) {
  uint32_t prefix = 0;
  before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < kBins) s.histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t id = threadIdx.x; id < c.vocab; id += kThreads) {
      const float value = c.value(id);
      const uint32_t key = ordered(value);
      if (shift < 24 && key >> (shift + 8) != prefix >> (shift + 8)) continue;
      const Key more = amount(value);
      if (more != 0) atomicAdd(&s.histogram[key >> shift & 255u], more);
    }
    const int bin = reach(wanted - before, s);
    prefix |= static_cast<uint32_t>(bin) << shift;
    before += s.result;
  }
  return prefix;
}

__device__ void keep_top_p(Choice& c, float top_p, Shared& s) {
  const auto amount = [&](float value) { return c.candidate(value) ? c.weight(value) : Key{0}; };
  Key mine = 0;
  for (int64_t id = threadIdx.x; id < c.vocab; id += kThreads) mine += amount(c.value(id));
  __syncthreads();
  if (threadIdx.x == 0) s.result = 0;
  __syncthreads();
  atomicAdd(&s.result, mine);
  __syncthreads();
  const Key limit = static_cast<Key>(ceil(static_cast<double>(top_p) * static_cast<double>(s.result)));
  Key before;
  const uint32_t key = select(c, limit, amount, before, s);
  const uint32_t bits = key & 0x80000000u ? key & 0x7FFFFFFFu : ~key;
  const Key weight = c.weight(__uint_as_float(bits));
  c.threshold = key;
  c.ties = weight == 0 ? ~Key{0} : (limit - before + weight - 1) / weight;
}

// The token at which the running sum of weights, by ascending id, exceeds u * total. A warp has a run of ids.
__device__ int64_t draw(const Choice& c, double u, Shared& s) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t span = ((c.vocab + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int64_t first = warp * span, end = min(first + span, c.vocab);
  Key above = 0;
  int ties = 0;
  for (int64_t id = first + lane; id < end; id += 32) {
    const float value = c.value(id);
    if (!c.candidate(value)) continue;
    const uint32_t key = ordered(value);
    if (key > c.threshold) above += c.weight(value);
    if (key == c.threshold) ++ties;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    above += __shfl_xor_sync(~0u, above, offset);
    ties += __shfl_xor_sync(~0u, ties, offset);
  }
  __syncthreads();
  if (lane == 0) {
    s.warp_sums[warp] = above;
    s.warp_counts[warp] = ties;
  }
  __syncthreads();
  const uint32_t bits = c.threshold & 0x80000000u ? c.threshold & 0x7FFFFFFFu : ~c.threshold;
  const Key tie_weight = c.threshold == 0 ? 0 : c.weight(__uint_as_float(bits));
  Key total = 0;
  unsigned long long ties_left = c.ties;
  for (int w = 0; w < kWarps; ++w) {
    const unsigned long long kept = min(ties_left, static_cast<unsigned long long>(s.warp_counts[w]));
    total += s.warp_sums[w] + kept * tie_weight;
    ties_left -= kept;
  }
  Key target = static_cast<Key>(u * static_cast<double>(total));
  target = target >= total ? total - 1 : target;
  Key sum = 0;
  ties_left = c.ties;
  int chosen = 0;
  for (; chosen < kWarps - 1; ++chosen) {
    const unsigned long long kept = min(ties_left, static_cast<unsigned long long>(s.warp_counts[chosen]));
    const Key next = sum + s.warp_sums[chosen] + kept * tie_weight;
    if (next > target) break;
    sum = next;
    ties_left -= kept;
  }
  if (warp == chosen) {
    for (int64_t base = first; base < end; base += 32) {
      const int64_t id = base + lane;
      const float value = id < end ? c.value(id) : -kInfinity;
      const bool inside = id < end && c.candidate(value);
      const uint32_t key = ordered(value);
      const unsigned tied = __ballot_sync(~0u, inside && key == c.threshold);
      const bool kept_tie = inside && key == c.threshold && __popc(tied & ((1u << lane) - 1u)) < ties_left;
      Key running = inside && (key > c.threshold || kept_tie) ? c.weight(value) : 0;
#pragma unroll
      for (int offset = 1; offset < 32; offset <<= 1) {
        const Key other = __shfl_up_sync(~0u, running, offset);
        if (lane >= offset) running += other;
      }
      const unsigned past = __ballot_sync(~0u, sum + running > target);
      if (past != 0) {
        if (lane == 0) s.result = static_cast<Key>(base + __ffs(past) - 1);
        break;
      }
      sum += __shfl_sync(~0u, running, 31);
      ties_left -= min(ties_left, static_cast<unsigned long long>(__popc(tied)));
    }
  }
  __syncthreads();
  return static_cast<int64_t>(s.result);
}

}  // namespace
}  // namespace trivet::cuda
