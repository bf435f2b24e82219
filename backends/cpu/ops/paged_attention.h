// PagedAttention: rope, KV-cache write and causal attention over a block table; see backends/contract/opset.py.
#pragma once

#include "../../common/ort_op.h"
#include "paged_attention_kernel.h"

namespace trivet {

struct PagedAttention {
  static constexpr const char* kName = "PagedAttention";
  static const TensorSpec kInputs[12];
  static const TensorSpec kOutputs[2];
  static constexpr AliasSpec kAliases[] = {{1, 1}};  // kv_cache -> kv_cache_out
  PagedAttention(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);
  const SessionContext& session;
  PagedAttentionParams attributes;  // the fields that are known when the kernel is made
};

}  // namespace trivet
