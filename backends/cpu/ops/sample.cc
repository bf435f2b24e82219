// Sample: checks and onnxruntime glue; rows run in parallel. The algorithm is in sample_row.cc.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "../../common/op_messages.h"
#include "../dispatch.h"
#include "sample_row.h"

namespace trivet {
namespace {

constexpr TierTable<SampleKernels> kKernels = TRIVET_TIERS(kSample);

enum ScratchSlot : int { kRows = 7, kHighest };  // sample_row.cc uses those before

constexpr int64_t kRunLogits = 1 << 14;  // that one thread looks through: most lie in the caches of others

void check_list(const TokenList& list, int64_t rows, int64_t vocab) {
  if (list.loc[0] != 0 || list.loc[rows] != list.count) {
    throw OpError(messages::list_ends(list.loc_name, list.loc[0], list.loc[rows], list.count));
  }
  for (int64_t s = 0; s < rows; ++s) {
    const int32_t begin = list.loc[s], end = list.loc[s + 1];
    if (end < begin || end > list.count) {
      throw OpError(messages::list_loc(list.loc_name, s + 1, end, begin, list.count));
    }
    for (int32_t i = begin; i < end; ++i) {
      const int32_t id = list.ids[i];
      if (id < 0 || id >= vocab) throw OpError(messages::list_id(list.name, s, id, vocab));
    }
  }
}

std::span<const int32_t> ids_of(const TokenList& list, int64_t s) {
  return {list.ids + list.loc[s], static_cast<size_t>(list.loc[s + 1] - list.loc[s])};
}

void check_float(bool good, SampleNumber which, int64_t row, float got) {
  if (!good) throw OpError(messages::sample_float(which, row, got));
}

void set_floats(SampleRow& row, int64_t s, const float* values) {
  for (int32_t i = 0; i < kNumSampleFloats; ++i) {
    check_float(std::isfinite(values[i]), static_cast<SampleNumber>(i), s, values[i]);
  }
  row.temperature = values[kTemperature];
  row.top_p = values[kTopP];
  row.min_p = values[kMinP];
  row.repetition_penalty = values[kRepetitionPenalty];
  row.frequency_penalty = values[kFrequencyPenalty];
  row.presence_penalty = values[kPresencePenalty];
  check_float(row.temperature >= 0.0f, kTemperature, s, row.temperature);
  check_float(row.top_p > 0.0f && row.top_p <= 1.0f, kTopP, s, row.top_p);
  check_float(row.min_p >= 0.0f && row.min_p <= 1.0f, kMinP, s, row.min_p);
  check_float(row.repetition_penalty > 0.0f, kRepetitionPenalty, s, row.repetition_penalty);
}

void set_ints(SampleRow& row, int64_t s, const int64_t* values, int64_t max_num_logprobs,
              std::span<const int32_t> history) {
  const auto check = [&](SampleNumber which, int64_t low, int64_t high) {
    const int64_t value = values[which - kNumSampleFloats];
    if (value < low || value > high) throw OpError(messages::sample_int(which, s, value, high));
    return value;
  };
  row.top_k = check(kTopK, 0, INT64_MAX);
  row.seed = values[kSeed - kNumSampleFloats];
  row.offset = check(kOffset, 0, INT64_MAX);
  row.num_logprobs = check(kNumLogprobs, -1, max_num_logprobs);
  row.forced_token_id = check(kForcedTokenId, -1, row.vocab - 1);
  const auto prompt = static_cast<size_t>(check(kNumPromptTokens, 0, static_cast<int64_t>(history.size())));
  row.prompt = history.first(prompt);
  row.output = history.subspan(prompt);
}

// Sets the highest logit of each row.
void find_highest(ThreadPool& pool, const SampleKernels& kernels, SampleRow* row, int64_t rows, int64_t vocab) {
  const int64_t runs = (vocab + kRunLogits - 1) / kRunLogits;
  HighestLogit* highest = ThreadScratch::get<HighestLogit>(kHighest, rows * runs);
  pool.parallel_shares(rows * runs, [&](int64_t task, int) {
    const int64_t first = task % runs * kRunLogits;
    highest[task] = kernels.highest(row[task / runs].logits + first, std::min(kRunLogits, vocab - first));
    highest[task].id += first;
  });
  for (int64_t s = 0; s < rows; ++s) {
    HighestLogit& best = row[s].highest = highest[s * runs];
    for (int64_t i = s * runs + 1; i < (s + 1) * runs; ++i) {
      if (!highest[i].valid || (best.valid && highest[i].value > best.value)) best = highest[i];
    }
  }
}

}  // namespace

void Sample::compute(KernelContext& ctx) {
  const SampleInputs in = sample_inputs(ctx);
  const int64_t rows = in.rows, vocab = in.vocab, most = in.max_num_logprobs;
  for (const TokenList* list : {&in.history, &in.allowed, &in.banned, &in.bias}) check_list(*list, rows, vocab);

  SampleRow* row = ThreadScratch::get<SampleRow>(kRows, rows);
  for (int64_t s = 0; s < rows; ++s) {
    row[s] = SampleRow{};
    row[s].logits = in.logits + s * vocab;
    row[s].vocab = vocab;
    set_floats(row[s], s, in.floats + s * kNumSampleFloats);
    set_ints(row[s], s, in.ints + s * kNumSampleInts, most, ids_of(in.history, s));
    row[s].allowed = ids_of(in.allowed, s);
    row[s].banned = ids_of(in.banned, s);
    row[s].bias_ids = ids_of(in.bias, s);
    row[s].bias_values = in.bias_values + in.bias.loc[s];
    for (size_t i = 0; i < row[s].bias_ids.size(); ++i) {
      check_float(std::isfinite(row[s].bias_values[i]), kBiasValue, s, row[s].bias_values[i]);
    }
    if (in.bitmask != nullptr) row[s].bitmask = in.bitmask + s * in.mask_words;
  }
  int32_t* ids = ctx.output(0, {rows}).mutable_as<int32_t>();
  float* logprobs = ctx.output(1, {rows}).mutable_as<float>();
  int32_t* ranks = ctx.output(2, {rows}).mutable_as<int32_t>();
  int32_t* top_ids = ctx.output(3, {rows, most}).mutable_as<int32_t>();
  float* top_logprobs = ctx.output(4, {rows, most}).mutable_as<float>();
  std::fill_n(top_ids, rows * most, -1);
  std::fill_n(top_logprobs, rows * most, -HUGE_VALF);
  const SampleKernels& kernels = kKernels[session.tier];
  find_highest(session.pool, kernels, row, rows, vocab);
  session.pool.parallel_for(rows, [&](int64_t s, int) {
    try {
      const SampledToken token = sample_row(row[s], kernels, top_ids + s * most, top_logprobs + s * most);
      ids[s] = token.id;
      logprobs[s] = token.logprob;
      ranks[s] = token.rank;
    } catch (const OpError& error) {
      throw OpError(messages::in_row(s, error.what()));
    }
  });
}

}  // namespace trivet
