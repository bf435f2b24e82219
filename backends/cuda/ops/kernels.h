// The kernel classes: checks of shapes and attributes on the host, then launches. Values are checked on the device.
#pragma once

#include "../../common/op_rules.h"
#include "../kernel.h"

namespace trivet::cuda {

using WeightFormat = FormatSpec;

// Whether products of so many rows take them as int8, or as bfloat16, in this session.
bool wants_int8(const Session& session, int64_t rows);
bool wants_bfloat16(const Session& session, int64_t rows);

struct EmbedTokens : EmbedTokensSpec {
  EmbedTokens(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const EmbedAttributes attributes;
};

struct RotaryTable : RotaryTableSpec {
  RotaryTable(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const float scale;
};

struct RMSNorm : RMSNormSpec {
  RMSNorm(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const float eps;
};

struct AddRMSNorm : AddRMSNormSpec {
  AddRMSNorm(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const float eps;
};

struct QMatMul : QMatMulSpec {
  QMatMul(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const ProductAttributes attributes;
};

struct LogitsHead : LogitsHeadSpec {
  LogitsHead(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const HeadAttributes attributes;
};

struct PagedAttention : PagedAttentionSpec {
  PagedAttention(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
  const AttentionAttributes attributes;
};

struct Sample : SampleSpec {
  Sample(const KernelInfo& info, Session& session, int32_t node);
  void compute(KernelContext& ctx);
  Session& session;
  const int32_t node;
};

}  // namespace trivet::cuda
