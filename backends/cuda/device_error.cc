// Messages of the errors that kernels report: what came, what was expected. The same words as the CPU's.
#include "context.h"

namespace trivet::cuda {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

std::string at(const char* name, int64_t index) { return std::string(name) + "[" + text(index) + "]"; }

std::string between(const std::string& what, int64_t low, int64_t high, int64_t got) {
  return what + ": expected " + text(low) + " to " + text(high) + ", got " + text(got);
}

std::string describe_sample_number(const DeviceError& e) {
  static constexpr const char* kNames[] = {
      "temperature", "top_p",  "min_p",        "repetition_penalty", "frequency_penalty", "presence_penalty", "top_k",
      "seed",        "offset", "num_logprobs", "forced_token_id",    "num_prompt_tokens", "bias_values"};
  const std::string what = std::string(kNames[e.b]) + " of row " + text(e.a);
  const std::string value = std::to_string(e.value);
  switch (static_cast<SampleNumber>(e.b)) {
    case kTopK:
    case kOffset:
      return what + ": expected 0 or more, got " + text(e.c);
    case kNumLogprobs:
    case kForcedTokenId:
      return between(what, -1, e.d, e.c);
    case kNumPromptTokens:
      return between(what, 0, e.d, e.c);
    default:
      break;
  }
  if (!(e.value - e.value == 0.0f)) return what + ": expected a finite number, got " + value;
  switch (static_cast<SampleNumber>(e.b)) {
    case kTemperature:
      return what + ": expected 0 or more, got " + value;
    case kTopP:
      return what + ": expected a number in (0, 1], got " + value;
    case kMinP:
      return what + ": expected a number in [0, 1], got " + value;
    default:
      return what + ": expected a number above 0, got " + value;
  }
}

constexpr const char* kLists[] = {"token_history", "allowed_token_ids", "banned_token_ids", "bias_token_ids"};
constexpr const char* kLocs[] = {"token_history_loc", "allowed_token_ids_loc", "banned_token_ids_loc", "bias_loc"};

}  // namespace

std::string describe(const DeviceError& e) {
  switch (e.code) {
    case DeviceErrorCode::kTokenId:
      return at("input_ids", e.a) + ": expected an id from 0 to " + text(e.c - 1) + ", got " + text(e.b);
    case DeviceErrorCode::kLogitsIndex:
      return at("logits_indices", e.a) + ": expected a row from 0 to " + text(e.c - 1) + ", got " + text(e.b);
    case DeviceErrorCode::kPosition:
      return at("positions", e.a) + ": expected " + text(e.c) + " (the scheduled tokens are the last of " +
             at("seq_lens", e.d) + "), got " + text(e.b);
    case DeviceErrorCode::kNegativePosition:
      return at("positions", e.a) + ": expected 0 or more, got " + text(e.b);
    case DeviceErrorCode::kQueryStartFirst:
      return "query_start_loc[0]: expected 0, got " + text(e.b);
    case DeviceErrorCode::kQueryStart:
      return between(at("query_start_loc", e.a), e.c, e.d, e.b);
    case DeviceErrorCode::kQueryStartLast:
      return at("query_start_loc", e.a) + ": expected the number of tokens, " + text(e.c) + ", got " + text(e.b);
    case DeviceErrorCode::kSeqLen:
      return at("seq_lens", e.a) + ": expected at least the request's " + text(e.c) + " scheduled tokens, got " +
             text(e.b);
    case DeviceErrorCode::kSlot:
      return between(at("slot_mapping", e.a), -1, e.c, e.b);
    case DeviceErrorCode::kBlock:
      return between(at("block_table", e.a) + "[" + text(e.b) + "]", 0, e.d, e.c);
    case DeviceErrorCode::kBlockColumns:
      return "block_table: expected at least " + text(e.a) + " columns for " + at("seq_lens", e.b) + " = " + text(e.c) +
             ", got " + text(e.d);
    case DeviceErrorCode::kSampleNumber:
      return describe_sample_number(e);
    case DeviceErrorCode::kSampleLocEnds:
      return std::string(kLocs[e.a]) + ": expected 0 first and " + text(e.d) + " last, got " + text(e.b) + " and " +
             text(e.c);
    case DeviceErrorCode::kSampleLoc:
      return between(at(kLocs[e.a % kSampleLists], e.a / kSampleLists), e.c, e.d, e.b);
    case DeviceErrorCode::kSampleId:
      return std::string(kLists[e.b]) + " of row " + text(e.a) + ": expected an id from 0 to " + text(e.d - 1) +
             ", got " + text(e.c);
    case DeviceErrorCode::kNothingLeft:
      return "row " + text(e.a) +
             ": no token is left: allowed_token_ids, banned_token_ids and bitmask exclude every finite logit";
    case DeviceErrorCode::kProcessedInvalid:
      return "row " + text(e.a) + ": bias and penalties made a logit NaN or infinite";
    case DeviceErrorCode::kTemperatureOverflow:
      return "row " + text(e.a) + ": logits divided by the temperature overflow float32";
    case DeviceErrorCode::kNone:
      break;
  }
  return "unknown error";
}

}  // namespace trivet::cuda
