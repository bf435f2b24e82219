// Sample: a block per row; the order of operations is that of backends/contract/opset.py. Thresholds are found by radix
// selection over the bits of the values, never by sorting. Probabilities are summed as integers (weight * 2^44), so no
// sum depends on the order in which threads add.
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

// The highest logit; of what makes them invalid the first id is left in s.first_bad.
__device__ Best highest_of(const float* logits, int64_t vocab, Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.first_bad = ~0ull;
  __syncthreads();
  Key key = 0;
  int first_bad = -1;
#pragma unroll 8
  for (int id = threadIdx.x; id < static_cast<int>(vocab); id += kThreads) {
    const float x = logits[id];
    if (!(x < kInfinity) && first_bad < 0) first_bad = id;
    const Key mine = rank_key(x, id);
    key = mine > key ? mine : key;
  }
  if (first_bad >= 0) atomicMin(&s.first_bad, static_cast<unsigned long long>(first_bad));
  key = block_highest(key, s);
  const bool valid = s.first_bad == ~0ull;
  const int64_t id = id_of(key);
  return {valid ? logits[id] : 0.0f, id, valid};
}

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

// --- A row's parameters -------------------------------------------------------------------------------------------

struct List {
  const int32_t* ids;
  int64_t start, count;  // count -1: the boundaries are bad
};

// The block of row 0 reports what is wrong with the boundaries, for all rows.
__device__ void check_loc(const ErrorSink& sink, const int32_t* loc, int64_t rows, int64_t total, SampleList which) {
  if (threadIdx.x != 0) return;
  if (loc[0] != 0 || loc[rows] != total) report(sink, DeviceErrorCode::kSampleLocEnds, which, loc[0], loc[rows], total);
  for (int64_t s = 0; s < rows; ++s) {
    if (loc[s + 1] < loc[s] || loc[s + 1] > total) {
      report(sink, DeviceErrorCode::kSampleLoc, (s + 1) * kSampleLists + which, loc[s + 1], loc[s], total);
    }
  }
}

__device__ List list_of(const ErrorSink& sink, const int32_t* ids, const int32_t* loc, int64_t row, int64_t rows,
                        int64_t total, int64_t vocab, SampleList which, Shared& s) {
  const int64_t start = loc[row], end = loc[row + 1];
  if (row == 0) check_loc(sink, loc, rows, total, which);
  if (start < 0 || end < start || end > total || loc[0] != 0 || loc[rows] != total) {
    s.bad = 1;
    return {ids, 0, -1};
  }
  for (int64_t i = start + threadIdx.x; i < end; i += kThreads) {
    if (ids[i] >= 0 && ids[i] < vocab) continue;
    report(sink, DeviceErrorCode::kSampleId, row, which, ids[i], vocab);
    s.bad = 1;
  }
  return {ids + start, start, end - start};
}

__device__ void check(const ErrorSink& sink, bool good, int64_t row, SampleNumber which, int64_t whole, float value,
                      int64_t bound, Shared& s) {
  if (good) return;
  report(sink, DeviceErrorCode::kSampleNumber, row, which, whole, bound, value);
  s.bad = 1;
}

struct RowParams {
  float temperature, top_p, min_p, repetition, frequency, presence;
  int64_t top_k, seed, offset, num_logprobs, forced, num_prompt;
};

__device__ RowParams read_params(const SampleParams& p, int64_t row) {
  const float* f = p.floats + row * 6;
  const int64_t* i = p.ints + row * 6;
  return {f[0], f[1], f[2], f[3], f[4], f[5], i[0], i[1], i[2], i[3], i[4], i[5]};
}

__device__ void check_params(const ErrorSink& sink, const SampleParams& p, const RowParams& r, int64_t row,
                             int64_t history_count, Shared& s) {
  const float floats[6] = {r.temperature, r.top_p, r.min_p, r.repetition, r.frequency, r.presence};
  const bool good[6] = {r.temperature >= 0.0f,
                        r.top_p > 0.0f && r.top_p <= 1.0f,
                        r.min_p >= 0.0f && r.min_p <= 1.0f,
                        r.repetition > 0.0f,
                        true,
                        true};
  for (int i = 0; i < 6; ++i) {
    check(sink, isfinite(floats[i]) && good[i], row, static_cast<SampleNumber>(i), 0, floats[i], 0, s);
  }
  check(sink, r.top_k >= 0, row, kTopK, r.top_k, 0, 0, s);
  check(sink, r.offset >= 0, row, kOffset, r.offset, 0, 0, s);
  check(sink, r.num_logprobs >= -1 && r.num_logprobs <= p.max_num_logprobs, row, kNumLogprobs, r.num_logprobs, 0,
        p.max_num_logprobs, s);
  check(sink, r.forced >= -1 && r.forced < p.vocab, row, kForcedTokenId, r.forced, 0, p.vocab - 1, s);
  if (history_count < 0) return;  // the block of row 0 names the boundaries, and this one must not be first
  check(sink, r.num_prompt >= 0 && r.num_prompt <= history_count, row, kNumPromptTokens, r.num_prompt, 0, history_count,
        s);
}

// --- Processing of the logits -------------------------------------------------------------------------------------

__device__ void apply_penalties(const SampleParams& p, const RowParams& r, const List& history, int64_t row,
                                float* logits) {
  int32_t* counts = p.counts + row * 2 * p.vocab;  // in the output
  int32_t* seen = counts + p.vocab;
  for (int64_t i = threadIdx.x; i < history.count; i += kThreads) {
    counts[history.ids[i]] = 0;
    seen[history.ids[i]] = 0;
  }
  __syncthreads();
  for (int64_t i = r.num_prompt + threadIdx.x; i < history.count; i += kThreads) atomicAdd(counts + history.ids[i], 1);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < history.count; i += kThreads) {
    const int32_t id = history.ids[i];
    if (atomicExch(seen + id, 1) != 0) continue;
    const int count = atomicAdd(counts + id, 0);
    float x = logits[id];
    x = x > 0.0f ? __fdiv_rn(x, r.repetition) : __fmul_rn(x, r.repetition);
    x = __fsub_rn(x, __fmul_rn(r.frequency, static_cast<float>(count)));
    if (count > 0) x = __fsub_rn(x, r.presence);
    logits[id] = x;
  }
  __syncthreads();
}

__device__ void process(const SampleParams& p, const RowParams& r, const List& history, const List& allowed,
                        const List& banned, const List& bias, int64_t row, const float* raw, float* logits) {
  for (int64_t id = threadIdx.x; id < p.vocab; id += kThreads) logits[id] = allowed.count == 0 ? raw[id] : -kInfinity;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < allowed.count; i += kThreads) logits[allowed.ids[i]] = raw[allowed.ids[i]];
  __syncthreads();
  for (int64_t i = threadIdx.x; i < banned.count; i += kThreads) logits[banned.ids[i]] = -kInfinity;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < bias.count; i += kThreads) {
    atomicAdd(logits + bias.ids[i], p.bias_values[bias.start + i]);
  }
  __syncthreads();
  if (p.bitmask != nullptr) {
    const uint32_t* mask = p.bitmask + row * p.mask_words;
    for (int64_t id = threadIdx.x; id < p.vocab; id += kThreads) {
      if ((mask[id / 32] >> (id % 32) & 1u) == 0) logits[id] = -kInfinity;
    }
    __syncthreads();
  }
  if (r.repetition != 1.0f || r.frequency != 0.0f || r.presence != 0.0f) apply_penalties(p, r, history, row, logits);
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

// --- The kernel ---------------------------------------------------------------------------------------------------

__device__ void top_logprobs_by_scan(const SampleParams& p, const float* logits, int64_t row, int64_t n,
                                     double log_total, Shared& s) {
  Key bound = ~Key{0};
  for (int64_t i = 0; i < n; ++i) {
    Key key = 0;
    for (int64_t id = threadIdx.x; id < p.vocab; id += kThreads) {
      const Key mine = rank_key(logits[id], id);
      if (mine < bound && mine > key) key = mine;
    }
    bound = block_highest(key, s);
    if (threadIdx.x == 0) {
      const int64_t id = id_of(bound);
      p.top_ids[row * p.max_num_logprobs + i] = static_cast<int32_t>(id);
      p.top_logprobs[row * p.max_num_logprobs + i] = static_cast<float>(static_cast<double>(logits[id]) - log_total);
    }
  }
}

__device__ double log_total_of(const float* logits, int64_t vocab, float highest, Shared& s) {
  double sum = 0.0;
  for (int64_t id = threadIdx.x; id < vocab; id += kThreads) sum += static_cast<double>(expf(logits[id] - highest));
  return static_cast<double>(highest) + log(block_total(sum, s));
}

__device__ int64_t choose(const ErrorSink& sink, const SampleParams& p, const RowParams& r, int64_t row,
                          const float* raw, Best best, const List& history, const List& allowed, const List& banned,
                          const List& bias, Shared& s) {
  const bool penalty = r.repetition != 1.0f || r.frequency != 0.0f || r.presence != 0.0f;
  const float* logits = raw;
  if (allowed.count > 0 || banned.count > 0 || bias.count > 0 || p.bitmask != nullptr ||
      (penalty && history.count > 0)) {
    float* processed = p.processed + row * p.vocab;
    process(p, r, history, allowed, banned, bias, row, raw, processed);
    logits = processed;
    best = highest_of(logits, p.vocab, s);
    if (!best.valid || best.value == -kInfinity) {
      if (threadIdx.x == 0) {
        report(sink, best.valid ? DeviceErrorCode::kNothingLeft : DeviceErrorCode::kProcessedInvalid, row);
      }
      return 0;
    }
  }
  if (r.temperature < kGreedyBelow) return best.id;
  const float highest = __fdiv_rn(best.value, r.temperature);
  if (!isfinite(highest)) {
    if (threadIdx.x == 0) report(sink, DeviceErrorCode::kTemperatureOverflow, row);
    return 0;
  }
  Choice c{logits, p.vocab, r.temperature, highest, -1.7976931348623157e308, 0, 0};  // -infinity is never a candidate
  if (r.min_p > 0.0f) c.floor = static_cast<double>(highest) + log(static_cast<double>(r.min_p));
  if (r.top_k > 0 && r.top_k < p.vocab) {
    Key before;
    const uint32_t key = select(c, static_cast<Key>(r.top_k), [](float) { return Key{1}; }, before, s);
    const uint32_t bits = key & 0x80000000u ? key & 0x7FFFFFFFu : ~key;
    c.floor = fmax(c.floor, static_cast<double>(__uint_as_float(bits)));
  }
  if (r.top_p < 1.0f) keep_top_p(c, r.top_p, s);
  return draw(c, uniform(r.seed, r.offset), s);
}

__global__ void __launch_bounds__(kThreads) sample_kernel(ErrorSink sink, SampleParams p) {
  __shared__ Shared s;
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const float* raw = p.logits + row * p.vocab;
  const RowParams r = read_params(p, row);
  if (threadIdx.x == 0) s.bad = 0;
  for (int64_t i = threadIdx.x; i < p.max_num_logprobs; i += kThreads) {
    p.top_ids[row * p.max_num_logprobs + i] = -1;
    p.top_logprobs[row * p.max_num_logprobs + i] = -kInfinity;
  }
  __syncthreads();
  const List history = list_of(sink, p.history, p.history_loc, row, p.rows, p.history_count, p.vocab, kHistoryList, s);
  const List allowed = list_of(sink, p.allowed, p.allowed_loc, row, p.rows, p.allowed_count, p.vocab, kAllowedList, s);
  const List banned = list_of(sink, p.banned, p.banned_loc, row, p.rows, p.banned_count, p.vocab, kBannedList, s);
  const List bias = list_of(sink, p.bias_ids, p.bias_loc, row, p.rows, p.bias_count, p.vocab, kBiasList, s);
  for (int64_t i = threadIdx.x; i < bias.count; i += kThreads) {
    const float value = p.bias_values[bias.start + i];
    check(sink, isfinite(value), row, kBiasValue, 0, value, 0, s);
  }
  if (threadIdx.x == 0) check_params(sink, p, r, row, history.count, s);
  __syncthreads();
  int64_t id = kNoToken;
  bool usable = s.bad == 0;
  Best best{};
  if (usable) {
    best = highest_of(raw, p.vocab, s);
    usable = best.valid && best.value > -kInfinity;
  }
  if (usable) id = r.forced >= 0 ? r.forced : choose(sink, p, r, row, raw, best, history, allowed, banned, bias, s);
  float logprob = -kInfinity;
  int32_t rank = -1;
  if (usable && r.num_logprobs >= 0) {
    const double log_total = log_total_of(raw, p.vocab, best.value, s);
    const float value = raw[id];
    logprob = static_cast<float>(static_cast<double>(value) - log_total);
    double higher = 0.0;
    for (int64_t i = threadIdx.x; i < p.vocab; i += kThreads) {
      if (raw[i] > value || (raw[i] == value && i < id)) higher += 1.0;
    }
    rank = static_cast<int32_t>(block_total(higher, s)) + 1;
    if (r.num_logprobs <= kScanLogprobs) top_logprobs_by_scan(p, raw, row, r.num_logprobs, log_total, s);
  }
  if (threadIdx.x == 0) {
    p.token_ids[row] = static_cast<int32_t>(id);
    p.logprobs[row] = logprob;
    p.ranks[row] = rank;
  }
}

// Rows that want more than kScanLogprobs: every thread finds the rank of one token among all.
__global__ void __launch_bounds__(kThreads) top_kernel(SampleParams p) {
  __shared__ Shared s;
  __shared__ Key tile[kThreads];
  wait_for_previous();
  const int64_t row = blockIdx.y, n = p.ints[row * 6 + kNumLogprobs - kTopK];
  if (n <= kScanLogprobs || n > p.max_num_logprobs) return;
  const float* logits = p.logits + row * p.vocab;
  const Best best = highest_of(logits, p.vocab, s);
  if (!best.valid || best.value == -kInfinity) return;
  const double log_total = log_total_of(logits, p.vocab, best.value, s);
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Key mine = id < p.vocab ? rank_key(logits[id], id) : 0;
  int64_t rank = 0;
  for (int64_t base = 0; base < p.vocab; base += kThreads) {
    __syncthreads();
    tile[threadIdx.x] = base + threadIdx.x < p.vocab ? rank_key(logits[base + threadIdx.x], base + threadIdx.x) : 0;
    __syncthreads();
    for (int i = 0; i < kThreads; ++i) rank += tile[i] > mine ? 1 : 0;
  }
  if (id >= p.vocab || rank >= n) return;
  p.top_ids[row * p.max_num_logprobs + rank] = static_cast<int32_t>(id);
  p.top_logprobs[row * p.max_num_logprobs + rank] = static_cast<float>(static_cast<double>(logits[id]) - log_total);
}

}  // namespace

cudaError_t sample(const Launch& on, ErrorSink sink, const SampleParams& p) {
  if (p.rows == 0) return cudaSuccess;
  const cudaError_t status = launch(on, sample_kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), 0, sink, p);
  if (status != cudaSuccess || p.max_num_logprobs <= kScanLogprobs) return status;
  const dim3 grid(static_cast<unsigned>((p.vocab + kThreads - 1) / kThreads), static_cast<unsigned>(p.rows));
  return launch(on, top_kernel, grid, dim3(kThreads), 0, p);
}

}  // namespace trivet::cuda
