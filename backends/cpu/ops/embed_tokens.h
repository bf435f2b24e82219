#pragma once

#include "../../common/op_rules.h"
#include "weight_formats.h"

namespace trivet {

// hidden[T, dim] = dequantize(weight[input_ids[t]]) * scale. An id outside the table is an error.
class EmbedTokens : public EmbedTokensSpec {
 public:
  EmbedTokens(const KernelInfo& info, const SessionContext& session);
  void compute(KernelContext& ctx);

 private:
  const SessionContext& session_;
  const EmbedAttributes attributes_;
};

}  // namespace trivet
