#pragma once

#include "../../common/op_rules.h"
#include "matmul.h"

namespace trivet {

// logits[S, vocab] = x @ weight^T, then soft_cap * tanh(logits / soft_cap) if soft_cap > 0.
class LogitsHead : public LogitsHeadSpec {
 public:
  LogitsHead(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);

 private:
  const SessionContext& session_;
  const HeadAttributes attributes_;
  const uint8_t* weight_ = nullptr;  // null: it comes with every call
  WeightChain chain_;
};

}  // namespace trivet
