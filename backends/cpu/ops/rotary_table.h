// RotaryTable: cos and sin of the rotary angles of each token; see backends/contract/opset.py.
#pragma once

#include "../../common/op_rules.h"

namespace trivet {

struct RotaryTable : RotaryTableSpec {
  RotaryTable(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  float scale;
};

}  // namespace trivet
