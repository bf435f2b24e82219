// RMSNorm and AddRMSNorm; see backends/contract/opset.py.
#pragma once

#include "../../common/ort_op.h"

namespace trivet {

struct RMSNorm {
  static constexpr const char* kName = "RMSNorm";
  static constexpr TensorSpec kInputs[] = {{"x", kFloat}, {"weight", kFloat}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}};
  RMSNorm(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  float eps;
};

struct AddRMSNorm {
  static constexpr const char* kName = "AddRMSNorm";
  static constexpr TensorSpec kInputs[] = {
      {"x", kFloat}, {"residual", kFloat}, {"weight", kFloat}, {"post_weight", kFloat, true}};
  static constexpr TensorSpec kOutputs[] = {{"y", kFloat}, {"residual_out", kFloat}};
  AddRMSNorm(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  float eps;
};

}  // namespace trivet
