// Sample: logits to token ids and log-probabilities; see "Sampling" in backends/contract/opset.py.
#pragma once

#include "../../common/op_rules.h"

namespace trivet {

struct Sample : SampleSpec {
  Sample(const KernelInfo&, const SessionContext& session) : session(session) {}
  void compute(KernelContext& ctx);
  const SessionContext& session;
};

}  // namespace trivet
