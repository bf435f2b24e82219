#pragma once

#include "../../common/op_rules.h"
#include "matmul.h"

namespace trivet {

// y = concat(x @ w_i^T) (+ bias) for 1..3 weights of any formats, activated by `epilogue`.
class QMatMul : public QMatMulSpec {
 public:
  QMatMul(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);

 private:
  const SessionContext& session_;
  const ProductAttributes attributes_;
  WeightMatrix weights_[kMaxWeights] = {};  // data is null if it comes with every call
  const float* bias_ = nullptr;
  bool has_bias_;  // one that comes with every call
  WeightChain chain_;
};

}  // namespace trivet
