#include "embed_tokens.h"

#include "../../common/op_messages.h"
#include "weight_chain.h"

namespace trivet {

EmbedTokens::EmbedTokens(const KernelInfo& info, const SessionContext& session)
    : session_(session), attributes_(embed_attributes(info)) {
  WeightChain::begin();
}

void EmbedTokens::compute(KernelContext& ctx) {
  const auto& [spec, dim, scale] = attributes_;
  const WeightFormat& format = weight_format(spec.format);
  const Tensor ids_tensor = ctx.input(0);
  const Tensor weight_tensor = ctx.input(1);
  ids_tensor.check_shape({-1});
  const int64_t row_bytes = format.row_bytes(dim);
  weight_tensor.check_shape({-1, row_bytes});
  const int64_t tokens = ids_tensor.shape[0];
  const int64_t vocab = weight_tensor.shape[0];
  const int32_t* ids = ids_tensor.as<int32_t>();
  const uint8_t* weight = weight_tensor.as<uint8_t>();
  float* hidden = ctx.output(0, {tokens, dim}).mutable_as<float>();
  for (int64_t t = 0; t < tokens; t++) {
    if (ids[t] < 0 || ids[t] >= vocab) throw OpError(messages::token_id(t, ids[t], vocab));
  }
  session_.pool.parallel_for(tokens, [&, dim = dim, scale = scale](int64_t t, int) {
    float* row = hidden + t * dim;
    format.dequantize(weight + ids[t] * row_bytes, dim, row);
    for (int64_t i = 0; i < dim; i++) row[i] *= scale;
  });
}

}  // namespace trivet
