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
  const SessionContext& session_;
  std::vector<const WeightFormat*> formats_;
  std::vector<int64_t> out_features_;
  int64_t in_features_;
  Epilogue epilogue_;
};

}  // namespace trivet
