// Sample: checks and onnxruntime glue; rows run in parallel. The algorithm is in sample_row.cc.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "../dispatch.h"
#include "sample_row.h"

namespace trivet {
namespace {

constexpr TierTable<SampleKernels> kKernels = TRIVET_TIERS(kSample);

enum Input : size_t {
  kLogits,
  kFloats,
  kInts,
  kHistory,
  kHistoryLoc,
  kAllowed,
  kAllowedLoc,
  kBanned,
  kBannedLoc,
  kBiasIds,
  kBiasValues,
  kBiasLoc,
  kBitmask,
  kMaxNumLogprobs
};

constexpr int kRowsSlot = 7;  // of ThreadScratch; sample_row.cc uses the others
constexpr int64_t kNumFloats = 6, kNumInts = 6;
constexpr const char* kFloatNames[] = {"temperature",       "top_p",           "min_p", "repetition_penalty",
                                       "frequency_penalty", "presence_penalty"};
constexpr const char* kIntNames[] = {"top_k", "seed", "offset", "num_logprobs", "forced_token_id", "num_prompt_tokens"};

std::string in_row(const char* name, int64_t row) { return std::string(name) + " of row " + std::to_string(row); }

template <class T>
void check_number(bool good, const char* name, int64_t row, const std::string& expected, T got) {
  if (!good) throw OpError(in_row(name, row) + ": expected " + expected + ", got " + std::to_string(got));
}

// Token ids of rows, packed: those of row s are [loc[s], loc[s + 1]).
class TokenLists {
 public:
  TokenLists(KernelContext& ctx, Input ids, Input loc, int64_t rows, int64_t vocab) {
    const Tensor id_tensor = ctx.input(ids), loc_tensor = ctx.input(loc);
    id_tensor.check_shape({-1});
    loc_tensor.check_shape({rows + 1});
    ids_ = id_tensor.as<int32_t>();
    loc_ = loc_tensor.as<int32_t>();
    const int64_t count = id_tensor.shape[0];
    if (loc_[0] != 0 || loc_[rows] != count) {
      throw OpError(std::string(loc_tensor.name) + ": expected 0 first and " + std::to_string(count) + " last, got " +
                    std::to_string(loc_[0]) + " and " + std::to_string(loc_[rows]));
    }
    for (int64_t s = 0; s < rows; ++s) {
      if (loc_[s + 1] < loc_[s] || loc_[s + 1] > count) {
        throw OpError(std::string(loc_tensor.name) + "[" + std::to_string(s + 1) + "]: expected " +
                      std::to_string(loc_[s]) + " to " + std::to_string(count) + ", got " +
                      std::to_string(loc_[s + 1]));
      }
      for (const int32_t id : row(s)) {
        check_number(id >= 0 && id < vocab, id_tensor.name, s, "an id from 0 to " + std::to_string(vocab - 1), id);
      }
    }
  }

  std::span<const int32_t> row(int64_t s) const { return {ids_ + loc_[s], static_cast<size_t>(loc_[s + 1] - loc_[s])}; }
  int64_t start(int64_t s) const { return loc_[s]; }

 private:
  const int32_t* ids_;
  const int32_t* loc_;
};

void set_floats(SampleRow& row, int64_t s, const float* values) {
  for (int64_t i = 0; i < kNumFloats; ++i) {
    check_number(std::isfinite(values[i]), kFloatNames[i], s, "a finite number", values[i]);
  }
  check_number(values[0] >= 0.0f, kFloatNames[0], s, "0 or more", values[0]);
  check_number(values[1] > 0.0f && values[1] <= 1.0f, kFloatNames[1], s, "a number in (0, 1]", values[1]);
  check_number(values[2] >= 0.0f && values[2] <= 1.0f, kFloatNames[2], s, "a number in [0, 1]", values[2]);
  check_number(values[3] > 0.0f, kFloatNames[3], s, "a number above 0", values[3]);
  row.temperature = values[0];
  row.top_p = values[1];
  row.min_p = values[2];
  row.repetition_penalty = values[3];
  row.frequency_penalty = values[4];
  row.presence_penalty = values[5];
}

void set_ints(SampleRow& row, int64_t s, const int64_t* values, int64_t max_num_logprobs,
              std::span<const int32_t> history) {
  const auto to = [](int64_t low, int64_t high) { return std::to_string(low) + " to " + std::to_string(high); };
  const int64_t length = static_cast<int64_t>(history.size());
  check_number(values[0] >= 0, kIntNames[0], s, "0 or more", values[0]);
  check_number(values[2] >= 0, kIntNames[2], s, "0 or more", values[2]);
  check_number(values[3] >= -1 && values[3] <= max_num_logprobs, kIntNames[3], s, to(-1, max_num_logprobs), values[3]);
  check_number(values[4] >= -1 && values[4] < row.vocab, kIntNames[4], s, to(-1, row.vocab - 1), values[4]);
  check_number(values[5] >= 0 && values[5] <= length, kIntNames[5], s, to(0, length), values[5]);
  row.top_k = values[0];
  row.seed = values[1];
  row.offset = values[2];
  row.num_logprobs = values[3];
  row.forced_token_id = values[4];
  row.prompt = history.first(static_cast<size_t>(values[5]));
  row.output = history.subspan(static_cast<size_t>(values[5]));
}

}  // namespace

const TensorSpec Sample::kInputs[14] = {
    {"logits", kFloat},
    {"sampling_floats", kFloat},
    {"sampling_ints", kInt64},
    {"token_history", kInt32},
    {"token_history_loc", kInt32},
    {"allowed_token_ids", kInt32},
    {"allowed_token_ids_loc", kInt32},
    {"banned_token_ids", kInt32},
    {"banned_token_ids_loc", kInt32},
    {"bias_token_ids", kInt32},
    {"bias_values", kFloat},
    {"bias_loc", kInt32},
    {"bitmask", kInt32},
    {"max_num_logprobs", kInt32},
};
const TensorSpec Sample::kOutputs[5] = {{"sampled_token_ids", kInt32},
                                        {"sampled_logprobs", kFloat},
                                        {"sampled_ranks", kInt32},
                                        {"top_token_ids", kInt32},
                                        {"top_logprobs", kFloat}};

void Sample::compute(KernelContext& ctx) {
  const Tensor logits = ctx.input(kLogits), floats = ctx.input(kFloats), ints = ctx.input(kInts);
  logits.check_shape({-1, -1});
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  if (vocab < 1) throw OpError("logits: expected at least one column, got shape " + logits.shape_text());
  floats.check_shape({rows, kNumFloats});
  ints.check_shape({rows, kNumInts});
  const TokenLists history(ctx, kHistory, kHistoryLoc, rows, vocab), allowed(ctx, kAllowed, kAllowedLoc, rows, vocab);
  const TokenLists banned(ctx, kBanned, kBannedLoc, rows, vocab), bias(ctx, kBiasIds, kBiasLoc, rows, vocab);
  const Tensor bias_values = ctx.input(kBiasValues), bitmask = ctx.input(kBitmask), limit = ctx.input(kMaxNumLogprobs);
  bias_values.check_shape({bias.start(rows)});
  limit.check_shape({});
  const int64_t most = limit.as<int32_t>()[0];
  if (most < 0 || most > vocab) {
    throw OpError("max_num_logprobs: expected 0 to " + std::to_string(vocab) + ", got " + std::to_string(most));
  }
  const bool masked = bitmask.size() > 0 || bitmask.shape.size() != 2 || bitmask.shape[0] != 0;
  const int64_t mask_words = (vocab + 31) / 32;
  if (masked) bitmask.check_shape({rows, mask_words});

  SampleRow* row = ThreadScratch::get<SampleRow>(kRowsSlot, rows);
  for (int64_t s = 0; s < rows; ++s) {
    row[s] = SampleRow{};
    row[s].logits = logits.as<float>() + s * vocab;
    row[s].vocab = vocab;
    set_floats(row[s], s, floats.as<float>() + s * kNumFloats);
    set_ints(row[s], s, ints.as<int64_t>() + s * kNumInts, most, history.row(s));
    row[s].allowed = allowed.row(s);
    row[s].banned = banned.row(s);
    row[s].bias_ids = bias.row(s);
    row[s].bias_values = bias_values.as<float>() + bias.start(s);
    for (size_t i = 0; i < row[s].bias_ids.size(); ++i) {
      check_number(std::isfinite(row[s].bias_values[i]), "bias_values", s, "finite numbers", row[s].bias_values[i]);
    }
    if (masked) row[s].bitmask = reinterpret_cast<const uint32_t*>(bitmask.as<int32_t>()) + s * mask_words;
  }
  int32_t* ids = ctx.output(0, {rows}).mutable_as<int32_t>();
  float* logprobs = ctx.output(1, {rows}).mutable_as<float>();
  int32_t* ranks = ctx.output(2, {rows}).mutable_as<int32_t>();
  int32_t* top_ids = ctx.output(3, {rows, most}).mutable_as<int32_t>();
  float* top_logprobs = ctx.output(4, {rows, most}).mutable_as<float>();
  std::fill_n(top_ids, rows * most, -1);
  std::fill_n(top_logprobs, rows * most, -HUGE_VALF);
  session.pool.parallel_for(rows, [&](int64_t s, int) {
    try {
      const SampledToken token =
          sample_row(row[s], kKernels[session.tier], top_ids + s * most, top_logprobs + s * most);
      ids[s] = token.id;
      logprobs[s] = token.logprob;
      ranks[s] = token.rank;
    } catch (const OpError& error) {
      throw OpError("row " + std::to_string(s) + ": " + error.what());
    }
  });
}

}  // namespace trivet
