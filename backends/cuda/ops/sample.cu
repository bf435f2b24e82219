// Sample: a block per row; the order of operations is that of backends/contract/opset.py. Thresholds are found by radix
// selection over the bits of the values, never by sorting. Probabilities are summed as integers (weight * 2^44), so no
// sum depends on the order in which threads add.
#include "sample_choice.cuh"
#include "sample_params.cuh"

namespace trivet::cuda {
namespace {

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
