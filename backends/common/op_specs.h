// Names, inputs and outputs of the ops of backends/contract/opset.py, for the kernel classes of every back end.
#pragma once

#include "ort_op.h"

namespace trivet {

struct EmbedTokensSpec {
  static constexpr const char* kName = "EmbedTokens";
  static constexpr TensorSpec kInputs[] = {{"input_ids", kInt32}, {"weight", kUint8}};
  static constexpr TensorSpec kOutputs[] = {{"hidden", kFloat}};
};

struct RotaryTableSpec {
  static constexpr const char* kName = "RotaryTable";
  static constexpr TensorSpec kInputs[] = {{"positions", kInt32}, {"inv_freq", kFloat}};
  static constexpr TensorSpec kOutputs[] = {{"cos_sin", kFloat}};
};

struct RMSNormSpec {
  static constexpr const char* kName = "RMSNorm";
  static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"weight", kFloat}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};
};

struct AddRMSNormSpec {
  static constexpr const char* kName = "AddRMSNorm";
  static constexpr TensorSpec kInputs[] = {
      {"x", kFloat}, {"residual", kFloat}, {"weight", kFloat}, {"post_weight", kFloat, true}, {"rows", kInt32, true}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}, {"residual_out", kFloat}};
};

struct QMatMulSpec {
  static constexpr const char* kName = "QMatMul";
  static constexpr TensorSpec kInputs[] = {
      {"x", kFloat}, {"bias", kFloat, true}, {"w0", kUint8}, {"w1", kUint8, true}, {"w2", kUint8, true}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};
  enum Input : size_t { kX, kBias, kFirstWeight };
};

struct LogitsHeadSpec {
  static constexpr const char* kName = "LogitsHead";
  static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"weight", kUint8}};
  static constexpr TensorSpec kOutputs[] = {{"logits", kFloat}};
};

struct PagedAttentionSpec {
  static constexpr const char* kName = "PagedAttention";
  static constexpr TensorSpec kInputs[] = {
      {"qkv", kFloat},       {"kv_cache", kUint8},     {"kv_layout", kInt32},    {"cos_sin", kFloat},
      {"positions", kInt32}, {"slot_mapping", kInt32}, {"block_table", kInt32},  {"query_start_loc", kInt32},
      {"seq_lens", kInt32},  {"q_norm", kFloat, true}, {"k_norm", kFloat, true}, {"sinks", kFloat, true},
  };
  static constexpr TensorSpec kOutputs[] = {{"out", kFloat}, {"kv_cache_out", kUint8}};
  static constexpr AliasSpec kAliases[] = {{1, 1}};  // kv_cache -> kv_cache_out
  enum Input : size_t {
    kQkv,
    kKvCache,
    kKvLayout,
    kCosSin,
    kPositions,
    kSlotMapping,
    kBlockTable,
    kQueryStartLoc,
    kSeqLens,
    kQNorm,
    kKNorm,
    kSinks
  };
};

struct SampleSpec {
  static constexpr const char* kName = "Sample";
  static constexpr TensorSpec kInputs[] = {
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
  static constexpr TensorSpec kOutputs[] = {{"sampled_token_ids", kInt32},
                                            {"sampled_logprobs", kFloat},
                                            {"sampled_ranks", kInt32},
                                            {"top_token_ids", kInt32},
                                            {"top_logprobs", kFloat}};
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
};

}  // namespace trivet
