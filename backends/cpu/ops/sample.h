// Sample: logits to token ids and log-probabilities; see "Sampling" in backends/contract/opset.py.
#pragma once

#include "../../common/ort_op.h"

namespace trivet {

struct Sample {
  static constexpr const char* kName = "Sample";
  static const TensorSpec kInputs[14];
  static const TensorSpec kOutputs[5];
  Sample(const KernelInfo&, const SessionContext& session) : session(session) {}
  void compute(KernelContext& ctx);
  const SessionContext& session;
};

}  // namespace trivet
