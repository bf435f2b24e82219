#pragma once

#include "../../common/ort_op.h"
#include "matmul.h"

namespace trivet {

// logits[S, vocab] = x[logits_indices] @ weight^T, then soft_cap * tanh(logits / soft_cap) if soft_cap > 0.
class LogitsHead {
 public:
  static constexpr const char* kName = "LogitsHead";
  static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"logits_indices", kInt32}, {"weight", kUint8}};
  static constexpr TensorSpec kOutputs[] = {{"logits", kFloat}};

  LogitsHead(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);

 private:
  const uint8_t* weight_data(const Tensor& tensor) const;

  const SessionContext& session_;
  const WeightFormat& format_;
  int64_t in_features_;
  int64_t vocab_size_;
  float soft_cap_;
  const uint8_t* weight_ = nullptr;  // null: it comes with every call
  WeightChain chain_;
};

}  // namespace trivet
