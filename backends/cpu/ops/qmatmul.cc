#include "qmatmul.h"

namespace trivet {

QMatMul::QMatMul(const KernelInfo& info, const SessionContext& session)
    : session_(session), attributes_(product_attributes(info)) {
  const ProductAttributes& a = attributes_;
  for (size_t i = 0; i < kMaxWeights; i++) {
    check_weight_given(a, i, info.has_input(kFirstWeight + i));
    if (i >= a.formats.size()) continue;
    weights_[i] = {&weight_format(a.formats[i]->format), nullptr, a.out_features[i]};
    if (const auto constant = info.constant_input(kFirstWeight + i)) weights_[i].data = product_weight(a, i, *constant);
  }
  if (const auto constant = info.constant_input(kBias)) bias_ = product_bias(a, *constant);
  has_bias_ = bias_ == nullptr && info.has_input(kBias);
  chain_.join({{weights_, a.formats.size()}, a.in_features, a.epilogue != Epilogue::kNone}, false);
}

void QMatMul::compute(KernelContext& ctx) {
  const ProductAttributes& a = attributes_;
  const Tensor x = ctx.input(kX);
  x.check_shape({-1, a.in_features});
  WeightMatrix weights[kMaxWeights];
  for (size_t i = 0; i < a.formats.size(); i++) {
    weights[i] = weights_[i];
    if (weights[i].data == nullptr) weights[i].data = product_weight(a, i, ctx.input(kFirstWeight + i));
  }
  const float* bias = has_bias_ ? product_bias(a, ctx.input(kBias)) : bias_;
  const Tensor y = ctx.output(0, {x.shape[0], a.columns()});
  matmul(session_, {x.as<float>(),
                    x.shape[0],
                    a.in_features,
                    {weights, a.formats.size()},
                    bias,
                    a.epilogue,
                    y.mutable_as<float>(),
                    a.columns(),
                    chain_.next()});
}

}  // namespace trivet
