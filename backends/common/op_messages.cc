#include "op_messages.h"

#include <cmath>

namespace trivet::messages {
namespace {

constexpr const char* kSampleNames[] = {
    "temperature", "top_p",  "min_p",        "repetition_penalty", "frequency_penalty", "presence_penalty", "top_k",
    "seed",        "offset", "num_logprobs", "forced_token_id",    "num_prompt_tokens", "bias_values"};

template <class T>
std::string text(T value) {
  return std::to_string(value);
}

std::string at(const char* name, int64_t index) { return std::string(name) + "[" + text(index) + "]"; }

std::string expected(const std::string& what, const std::string& wanted, const std::string& got) {
  return what + ": expected " + wanted + ", got " + got;
}

std::string between(const std::string& what, int64_t low, int64_t high, int64_t got) {
  return expected(what, text(low) + " to " + text(high), text(got));
}

std::string in_row(const char* name, int64_t row) { return std::string(name) + " of row " + text(row); }

const char* float_range(SampleNumber which) {
  switch (which) {
    case kTemperature:
      return "0 or more";
    case kTopP:
      return "a number in (0, 1]";
    case kMinP:
      return "a number in [0, 1]";
    case kRepetitionPenalty:
      return "a number above 0";
    default:
      return "a finite number";
  }
}

}  // namespace

std::string token_id(int64_t index, int64_t got, int64_t table_rows) {
  return expected(at("input_ids", index), "an id from 0 to " + text(table_rows - 1), text(got));
}

std::string row_index(int64_t index, int64_t got, int64_t x_rows) {
  return expected(at("rows", index), "a row of x from 0 to " + text(x_rows - 1), text(got));
}

std::string negative_position(int64_t index, int64_t got) {
  return expected(at("positions", index), "0 or more", text(got));
}

std::string position(int64_t index, int64_t got, int64_t wanted, int64_t request) {
  const std::string why = " (the scheduled tokens are the last of " + at("seq_lens", request) + ")";
  return expected(at("positions", index), text(wanted) + why, text(got));
}

std::string query_start_first(int64_t got) { return expected("query_start_loc[0]", "0", text(got)); }

std::string query_start(int64_t index, int64_t got, int64_t low, int64_t high) {
  return between(at("query_start_loc", index), low, high, got);
}

std::string query_start_last(int64_t index, int64_t got, int64_t num_tokens) {
  return expected(at("query_start_loc", index), "the number of tokens, " + text(num_tokens), text(got));
}

std::string seq_len(int64_t request, int64_t got, int64_t num_scheduled) {
  const std::string wanted = "at least the request's " + text(num_scheduled) + " scheduled tokens";
  return expected(at("seq_lens", request), wanted, text(got));
}

std::string slot(int64_t index, int64_t got, int64_t last) { return between(at("slot_mapping", index), -1, last, got); }

std::string block(int64_t request, int64_t column, int64_t got, int64_t last) {
  return between(at("block_table", request) + "[" + text(column) + "]", 0, last, got);
}

std::string block_columns(int64_t needed, int64_t request, int64_t seq_len, int64_t got) {
  const std::string why = " columns for " + at("seq_lens", request) + " = " + text(seq_len);
  return expected("block_table", "at least " + text(needed) + why, text(got));
}

std::string sample_float(SampleNumber which, int64_t row, float got) {
  const char* wanted = std::isfinite(got) ? float_range(which) : "a finite number";
  return expected(in_row(kSampleNames[which], row), wanted, text(got));
}

std::string sample_int(SampleNumber which, int64_t row, int64_t got, int64_t bound) {
  const std::string what = in_row(kSampleNames[which], row);
  if (which == kNumLogprobs || which == kForcedTokenId) return between(what, -1, bound, got);
  if (which == kNumPromptTokens) return between(what, 0, bound, got);
  return expected(what, "0 or more", text(got));
}

std::string list_ends(const char* loc_name, int64_t first, int64_t last, int64_t count) {
  return expected(loc_name, "0 first and " + text(count) + " last", text(first) + " and " + text(last));
}

std::string list_loc(const char* loc_name, int64_t index, int64_t got, int64_t low, int64_t high) {
  return between(at(loc_name, index), low, high, got);
}

std::string list_id(const char* name, int64_t row, int64_t got, int64_t vocab) {
  return expected(in_row(name, row), "an id from 0 to " + text(vocab - 1), text(got));
}

std::string in_row(int64_t row, const char* message) { return "row " + text(row) + ": " + message; }

}  // namespace trivet::messages
