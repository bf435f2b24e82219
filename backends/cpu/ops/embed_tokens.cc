#include "embed_tokens.h"

namespace trivet {

EmbedTokens::EmbedTokens(const KernelInfo& info, const SessionContext& session)
    : session_(session),
      format_(weight_format(info.attr_string("format"))),
      dim_(info.attr_int("dim")),
      scale_(info.attr_float("scale")) {
  check_row(format_, dim_, "dim");
}

void EmbedTokens::compute(KernelContext& ctx) {
  const Tensor ids_tensor = ctx.input(0);
  const Tensor weight_tensor = ctx.input(1);
  ids_tensor.check_shape({-1});
  const int64_t row_bytes = format_.row_bytes(dim_);
  weight_tensor.check_shape({-1, row_bytes});
  const int64_t tokens = ids_tensor.shape[0];
  const int64_t vocab = weight_tensor.shape[0];
  const int32_t* ids = ids_tensor.as<int32_t>();
  const uint8_t* weight = weight_tensor.as<uint8_t>();
  float* hidden = ctx.output(0, {tokens, dim_}).mutable_as<float>();
  for (int64_t t = 0; t < tokens; t++) {
    if (ids[t] < 0 || ids[t] >= vocab) {
      throw OpError("input_ids[" + std::to_string(t) + "]: expected an id from 0 to " + std::to_string(vocab - 1) +
                    ", got " + std::to_string(ids[t]));
    }
  }
  session_.pool.parallel_for(tokens, [&](int64_t t, int) {
    float* row = hidden + t * dim_;
    format_.dequantize(weight + ids[t] * row_bytes, dim_, row);
    for (int64_t i = 0; i < dim_; i++) row[i] *= scale_;
  });
}

}  // namespace trivet
