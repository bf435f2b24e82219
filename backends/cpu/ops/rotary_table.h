// RotaryTable: cos and sin of the rotary angles of each token; see backends/contract/opset.py.
#pragma once

#include "../../common/ort_op.h"

namespace trivet {

struct RotaryTable {
  static constexpr const char* kName = "RotaryTable";
  static constexpr TensorSpec kInputs[] = {{"positions", kInt32}, {"inv_freq", kFloat}};
  static constexpr TensorSpec kOutputs[] = {{"cos_sin", kFloat}};
  RotaryTable(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  float scale;
};

}  // namespace trivet
