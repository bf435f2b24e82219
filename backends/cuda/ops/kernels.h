// The kernel classes: checks of shapes and attributes on the host, then launches. Values are checked on the device.
#pragma once

#include <string_view>

#include "../kernel.h"

namespace trivet::cuda {

struct WeightFormat {
  const char* name;
  Format format;
  int64_t block_size, block_bytes;
  bool is_block() const { return block_size > 1; }
  int64_t row_bytes(int64_t n) const { return n / block_size * block_bytes; }
};

// Throws OpError listing the known names.
const WeightFormat& weight_format(std::string_view name);
// Throws OpError unless n is a positive whole number of blocks.
void check_row(const WeightFormat& format, int64_t n, const char* what);

// Whether products of so many rows take them as int8 in this session.
bool wants_int8(const Session& session, int64_t rows);

struct EmbedTokens {
  static constexpr const char* kName = "EmbedTokens";
  static constexpr TensorSpec kInputs[] = {{"input_ids", kInt32}, {"weight", kUint8}};
  static constexpr TensorSpec kOutputs[] = {{"hidden", kFloat}};
  EmbedTokens(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const WeightFormat& format;
  const int64_t dim;
  const float scale;
};

struct RotaryTable {
  static constexpr const char* kName = "RotaryTable";
  static constexpr TensorSpec kInputs[] = {{"positions", kInt32}, {"inv_freq", kFloat}};
  static constexpr TensorSpec kOutputs[] = {{"cos_sin", kFloat}};
  RotaryTable(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const float scale;
};

struct RMSNorm {
  static constexpr const char* kName = "RMSNorm";
  static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"weight", kFloat}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};
  RMSNorm(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const float eps;
};

struct AddRMSNorm {
  static constexpr const char* kName = "AddRMSNorm";
  static constexpr TensorSpec kInputs[] = {
      {"x", kFloat}, {"residual", kFloat}, {"weight", kFloat}, {"post_weight", kFloat, true}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}, {"residual_out", kFloat}};
  AddRMSNorm(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const float eps;
};

struct QMatMul {
  static constexpr const char* kName = "QMatMul";
  static constexpr TensorSpec kInputs[] = {
      {"x", kFloat}, {"bias", kFloat, true}, {"w0", kUint8}, {"w1", kUint8, true}, {"w2", kUint8, true}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};
  QMatMul(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  std::vector<const WeightFormat*> formats;
  const std::vector<int64_t> out_features;
  const int64_t in_features;
  const Epilogue epilogue;
};

struct LogitsHead {
  static constexpr const char* kName = "LogitsHead";
  static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"logits_indices", kInt32}, {"weight", kUint8}};
  static constexpr TensorSpec kOutputs[] = {{"logits", kFloat}};
  LogitsHead(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const WeightFormat& format;
  const int64_t in_features, vocab_size;
  const float soft_cap;
};

struct PagedAttention {
  static constexpr const char* kName = "PagedAttention";
  static constexpr TensorSpec kInputs[] = {
      {"qkv", kFloat},       {"kv_cache", kUint8},     {"kv_layout", kInt32},    {"cos_sin", kFloat},
      {"positions", kInt32}, {"slot_mapping", kInt32}, {"block_table", kInt32},  {"query_start_loc", kInt32},
      {"seq_lens", kInt32},  {"q_norm", kFloat, true}, {"k_norm", kFloat, true}, {"sinks", kFloat, true},
  };
  static constexpr TensorSpec kOutputs[] = {{"out", kFloat}, {"kv_cache_out", kUint8}};
  PagedAttention(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  AttentionParams attributes{};
};

struct Sample {
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
  Sample(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
};

}  // namespace trivet::cuda
