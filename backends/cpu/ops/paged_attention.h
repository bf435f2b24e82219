// PagedAttention: rope, KV-cache write and causal attention over a block table; see backends/contract/opset.py.
#pragma once

#include "../../common/op_rules.h"
#include "paged_attention_kernel.h"

namespace trivet {

struct PagedAttention : PagedAttentionSpec {
  PagedAttention(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  const AttentionAttributes attributes;
};

}  // namespace trivet
