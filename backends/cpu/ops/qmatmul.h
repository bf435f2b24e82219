#pragma once

#include "../../common/ort_op.h"
#include "matmul.h"

namespace trivet {

// y = concat(x @ w_i^T) (+ bias) for 1..3 weights of any formats, activated by `epilogue`.
class QMatMul {
 public:
  static constexpr const char* kName = "QMatMul";
  static constexpr TensorSpec kInputs[] = {
      {"x", kFloat}, {"bias", kFloat, true}, {"w0", kUint8}, {"w1", kUint8, true}, {"w2", kUint8, true}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};

  QMatMul(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);

 private:
  static constexpr size_t kBias = 1;  // indices of inputs
  static constexpr size_t kFirstWeight = 2;

  const uint8_t* weight_data(size_t i, const Tensor& tensor) const;
  const float* bias_data(const Tensor& tensor) const;

  const SessionContext& session_;
  size_t num_weights_ = 0;
  WeightMatrix weights_[kMaxWeights] = {};  // data is null if it comes with every call
  const float* bias_ = nullptr;
  bool has_bias_;  // one that comes with every call
  int64_t total_features_ = 0;
  int64_t in_features_;
  Epilogue epilogue_;
  WeightChain chain_;
};

}  // namespace trivet
