// RMSNorm and AddRMSNorm; see backends/contract/opset.py.
#pragma once

#include "../../common/op_rules.h"

namespace trivet {

struct RMSNorm : RMSNormSpec {
  RMSNorm(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  float eps;
};

struct AddRMSNorm : AddRMSNormSpec {
  AddRMSNorm(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  float eps;
};

}  // namespace trivet
