// Sample for one row, in the order of backends/contract/opset.py. Thresholds are found by selection, never by sorting
// the vocabulary; candidates stay in the order of their ids, in which the draw walks the cumulative distribution.
#include "sample_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "../../common/op_messages.h"
#include "../../common/ort_op.h"

namespace trivet {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kGreedyBelow = 1e-5f;  // temperature
constexpr int32_t kNoToken = -1;

enum ScratchSlot : int { kLogits, kCounts, kSeen, kIds, kValues, kWeights, kSelection };

// --- Uniform numbers ----------------------------------------------------------------------------------------------

struct Philox {
  uint32_t counter[4];
  uint32_t key[2];

  void round() {
    const uint64_t a = uint64_t{0xd2511f53u} * counter[0], b = uint64_t{0xcd9e8d57u} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy_n(next, 4, counter);
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
};

// --- Processing of the logits -------------------------------------------------------------------------------------

bool has_penalty(const SampleRow& row) {
  return row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
}

bool is_processed(const SampleRow& row) {
  return !row.allowed.empty() || !row.banned.empty() || !row.bias_ids.empty() || row.bitmask != nullptr ||
         (has_penalty(row) && row.prompt.size() + row.output.size() > 0);
}

void apply_bitmask(const SampleRow& row, float* logits) {
  for (int64_t word = 0; word * 32 < row.vocab; ++word) {
    const uint32_t bits = row.bitmask[word];
    if (bits == 0xffffffffu) continue;
    const int64_t end = std::min<int64_t>(row.vocab, word * 32 + 32);
    for (int64_t id = word * 32; id < end; ++id) {
      if ((bits >> (id % 32) & 1u) == 0) logits[id] = kMinusInfinity;
    }
  }
}

void apply_penalties(const SampleRow& row, float* logits) {
  int32_t* counts = ThreadScratch::get<int32_t>(kCounts, row.vocab);  // in the output
  uint8_t* seen = ThreadScratch::get<uint8_t>(kSeen, row.vocab);
  std::fill_n(counts, row.vocab, 0);
  std::fill_n(seen, row.vocab, uint8_t{0});
  for (int32_t id : row.output) ++counts[id];
  const auto apply = [&](int32_t id) {
    if (seen[id] != 0) return;
    seen[id] = 1;
    float x = logits[id];
    x = x > 0.0f ? x / row.repetition_penalty : x * row.repetition_penalty;
    x -= row.frequency_penalty * static_cast<float>(counts[id]);
    if (counts[id] > 0) x -= row.presence_penalty;
    logits[id] = x;
  };
  std::for_each(row.prompt.begin(), row.prompt.end(), apply);
  std::for_each(row.output.begin(), row.output.end(), apply);
}

float* processed_logits(const SampleRow& row) {
  float* logits = ThreadScratch::get<float>(kLogits, row.vocab);
  if (row.allowed.empty()) {
    std::copy_n(row.logits, row.vocab, logits);
  } else {
    std::fill_n(logits, row.vocab, kMinusInfinity);
    for (int32_t id : row.allowed) logits[id] = row.logits[id];
  }
  for (int32_t id : row.banned) logits[id] = kMinusInfinity;
  for (size_t i = 0; i < row.bias_ids.size(); ++i) logits[row.bias_ids[i]] += row.bias_values[i];
  if (row.bitmask != nullptr) apply_bitmask(row, logits);
  if (has_penalty(row)) apply_penalties(row, logits);
  return logits;
}

// --- Selection ----------------------------------------------------------------------------------------------------

// Tokens that may be drawn, by ascending id.
struct Candidates {
  int32_t* ids;
  float* values;   // logits / temperature
  float* weights;  // exp(value - highest)
  int64_t count;

  template <class F>
  void keep_if(const F& keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!keep(i)) continue;
      ids[kept] = ids[i];
      values[kept] = values[i];
      weights[kept] = weights[i];
      ++kept;
    }
    count = kept;
  }
};

// A value that at least k of the n values reach: the k-th highest of the maxima of short blocks. Cheap, and few more
// than k values reach it.
float bound_of_kth(const float* values, int64_t n, int64_t k, const SampleKernels& kernels) {
  const int64_t block = std::min<int64_t>(256, n / (2 * k));
  if (block < 2) return kMinusInfinity;
  const int64_t blocks = n / block;
  float* maxima = ThreadScratch::get<float>(kSelection, blocks);
  for (int64_t b = 0; b < blocks; ++b) maxima[b] = kernels.highest_value(values + b * block, block);
  std::nth_element(maxima, maxima + (k - 1), maxima + blocks, std::greater<>());
  return maxima[k - 1];
}

// The k-th highest of n > k values.
float kth_highest(const float* values, int64_t n, int64_t k, const SampleKernels& kernels) {
  const float bound = bound_of_kth(values, n, k, kernels);
  float* reached = ThreadScratch::get<float>(kSelection, n);
  float* end = std::copy_if(values, values + n, reached, [&](float x) { return x >= bound; });
  std::nth_element(reached, reached + (k - 1), end, std::greater<>());
  return reached[k - 1];
}

// Keeps the most likely tokens (ties: lower ids first) until their share reaches top_p: a token stays while the share
// of those before it is below top_p. A histogram of shares over the values finds the bucket where that happens.
void keep_top_p(Candidates& c, float highest, float top_p) {
  constexpr int kBuckets = 1024;
  constexpr float kBucketsPerNat = 32.0f;
  const auto bucket_of = [&](float value) {
    return static_cast<int>(std::min((highest - value) * kBucketsPerNat, static_cast<float>(kBuckets - 1)));
  };
  double shares[kBuckets] = {};
  for (int64_t i = 0; i < c.count; ++i) shares[bucket_of(c.values[i])] += static_cast<double>(c.weights[i]);
  const double limit = static_cast<double>(top_p) * std::accumulate(shares, shares + kBuckets, 0.0);
  double before = 0.0;
  int bucket = 0;
  while (bucket < kBuckets && before + shares[bucket] < limit) before += shares[bucket++];
  if (bucket == kBuckets) return;  // rounding left top_p just out of reach
  int64_t* edge = ThreadScratch::get<int64_t>(kSelection, c.count);
  int64_t edge_size = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    if (bucket_of(c.values[i]) == bucket) edge[edge_size++] = i;
  }
  std::sort(edge, edge + edge_size,
            [&](int64_t a, int64_t b) { return c.values[a] != c.values[b] ? c.values[a] > c.values[b] : a < b; });
  int64_t last = edge[0];
  for (int64_t i = 0; i < edge_size && before < limit; ++i) {
    last = edge[i];
    before += static_cast<double>(c.weights[last]);
  }
  const float value = c.values[last];
  const int32_t id = c.ids[last];
  c.keep_if([&](int64_t i) { return c.values[i] > value || (c.values[i] == value && c.ids[i] <= id); });
}

Candidates candidates_of(const SampleRow& row, const float* logits, float highest, const SampleKernels& kernels) {
  Candidates c{ThreadScratch::get<int32_t>(kIds, row.vocab), ThreadScratch::get<float>(kValues, row.vocab),
               ThreadScratch::get<float>(kWeights, row.vocab), row.vocab};
  for (int64_t id = 0; id < row.vocab; ++id) c.values[id] = logits[id] / row.temperature;
  double floor = std::numeric_limits<double>::lowest();  // -infinity is never a candidate
  if (row.min_p > 0.0f) floor = static_cast<double>(highest) + std::log(static_cast<double>(row.min_p));
  if (row.top_k > 0 && row.top_k < row.vocab) {
    floor = std::max(floor, static_cast<double>(kth_highest(c.values, row.vocab, row.top_k, kernels)));
  }
  c.count = 0;
  for (int64_t id = 0; id < row.vocab; ++id) {
    const float value = c.values[id];
    if (!(static_cast<double>(value) >= floor)) continue;
    c.ids[c.count] = static_cast<int32_t>(id);
    c.values[c.count++] = value;
  }
  kernels.weigh(c.values, c.count, highest, c.weights);
  if (row.top_p < 1.0f) keep_top_p(c, highest, row.top_p);
  return c;
}

int32_t draw(const Candidates& c, double u) {
  double total = 0.0;
  for (int64_t i = 0; i < c.count; ++i) total += static_cast<double>(c.weights[i]);
  const double target = u * total;
  double sum = 0.0;
  int32_t last = c.ids[0];
  for (int64_t i = 0; i < c.count; ++i) {
    if (c.weights[i] == 0.0f) continue;
    last = c.ids[i];
    sum += static_cast<double>(c.weights[i]);
    if (sum > target) break;
  }
  return last;
}

int32_t choose(const SampleRow& row, HighestLogit raw, const SampleKernels& kernels) {
  const float* logits = row.logits;
  HighestLogit best = raw;
  if (is_processed(row)) {
    logits = processed_logits(row);
    best = kernels.highest(logits, row.vocab);
    if (!best.valid) throw OpError(messages::kProcessedInvalid);
    if (best.value == kMinusInfinity) {
      throw OpError(messages::kNoTokenLeft);
    }
  }
  if (row.temperature < kGreedyBelow) return static_cast<int32_t>(best.id);
  const float highest = best.value / row.temperature;
  if (!std::isfinite(highest)) throw OpError(messages::kTemperatureOverflow);
  return draw(candidates_of(row, logits, highest, kernels), uniform(row.seed, row.offset));
}

// --- Log-probabilities of the raw logits --------------------------------------------------------------------------

int32_t rank_of(const SampleRow& row, int32_t id) {
  const float value = row.logits[id];
  int32_t higher = 0;
  for (int64_t i = 0; i < row.vocab; ++i) higher += row.logits[i] > value ? 1 : 0;
  for (int64_t i = 0; i < id; ++i) higher += row.logits[i] == value ? 1 : 0;
  return higher + 1;
}

void top_logprobs_of(const SampleRow& row, double log_total, const SampleKernels& kernels, int32_t* ids,
                     float* logprobs) {
  const int64_t n = row.num_logprobs;
  const float bound = bound_of_kth(row.logits, row.vocab, n, kernels);
  int32_t* reached = ThreadScratch::get<int32_t>(kIds, row.vocab);
  int64_t count = 0;
  for (int64_t id = 0; id < row.vocab; ++id) {
    if (row.logits[id] >= bound) reached[count++] = static_cast<int32_t>(id);
  }
  std::partial_sort(reached, reached + n, reached + count, [&](int32_t a, int32_t b) {
    return row.logits[a] != row.logits[b] ? row.logits[a] > row.logits[b] : a < b;
  });
  for (int64_t i = 0; i < n; ++i) {
    ids[i] = reached[i];
    logprobs[i] = static_cast<float>(static_cast<double>(row.logits[reached[i]]) - log_total);
  }
}

}  // namespace

double uniform(int64_t seed, int64_t offset) {
  const uint64_t key = static_cast<uint64_t>(seed), counter = static_cast<uint64_t>(offset);
  Philox philox{{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0},
                {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}};
  for (int i = 0; i < 10; ++i) philox.round();
  const uint64_t bits = (static_cast<uint64_t>(philox.counter[0]) << 32 | philox.counter[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

SampledToken sample_row(const SampleRow& row, const SampleKernels& kernels, int32_t* top_ids, float* top_logprobs) {
  const HighestLogit& raw = row.highest;
  if (!raw.valid || raw.value == kMinusInfinity) return {kNoToken, kMinusInfinity, -1};
  const bool forced = row.forced_token_id >= 0;
  SampledToken token{forced ? static_cast<int32_t>(row.forced_token_id) : choose(row, raw, kernels), kMinusInfinity,
                     -1};
  if (row.num_logprobs < 0) return token;
  const double log_total = static_cast<double>(raw.value) + std::log(kernels.sum_exp(row.logits, row.vocab, raw.value));
  token.logprob = static_cast<float>(static_cast<double>(row.logits[token.id]) - log_total);
  token.rank = rank_of(row, token.id);
  if (row.num_logprobs > 0) top_logprobs_of(row, log_total, kernels, top_ids, top_logprobs);
  return token;
}

}  // namespace trivet
