#pragma once

#include "../../common/ort_op.h"
#include "weight_formats.h"

namespace trivet {

// hidden[T, dim] = dequantize(weight[input_ids[t]]) * scale. An id outside the table is an error.
class EmbedTokens {
 public:
  static constexpr const char* kName = "EmbedTokens";
  static constexpr TensorSpec kInputs[] = {{"input_ids", kInt32}, {"weight", kUint8}};
  static constexpr TensorSpec kOutputs[] = {{"hidden", kFloat}};

  EmbedTokens(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);

 private:
  const SessionContext& session_;
  const WeightFormat& format_;
  int64_t dim_;
  float scale_;
};

}  // namespace trivet
