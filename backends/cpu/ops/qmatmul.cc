#include "qmatmul.h"

namespace trivet {
namespace {

Epilogue parse_epilogue(const std::string& name) {
  if (name == "none") return Epilogue::kNone;
  if (name == "swiglu") return Epilogue::kSwiglu;
  if (name == "geglu") return Epilogue::kGeglu;
  throw OpError("epilogue: expected none, swiglu or geglu, got '" + name + "'");
}

}  // namespace

QMatMul::QMatMul(const KernelInfo& info, const SessionContext& session)
    : session_(session),
      in_features_(info.attr_int("in_features")),
      epilogue_(parse_epilogue(info.attr_string("epilogue"))) {
  const std::vector<std::string> formats = info.attr_names("formats");
  const std::vector<int64_t> out_features = info.attr_ints("out_features");
  for (const std::string& name : formats) check_row(weight_format(name), in_features_, "in_features");
  if (formats.empty() || formats.size() > kMaxWeights || formats.size() != out_features.size()) {
    throw OpError("formats and out_features: expected one entry per weight, 1 to 3, got " +
                  std::to_string(formats.size()) + " and " + std::to_string(out_features.size()));
  }
  for (int64_t n : out_features) {
    if (n < 1) throw OpError("out_features: expected positive numbers, got " + std::to_string(n));
    total_features_ += n;
  }
  if (epilogue_ != Epilogue::kNone && (formats.size() != 2 || out_features[0] != out_features[1])) {
    throw OpError("epilogue: a gated one needs two weights of the same out_features");
  }
  num_weights_ = formats.size();
  for (size_t i = 0; i < kMaxWeights; i++) {
    const bool given = info.has_input(kFirstWeight + i);
    if (given != (i < num_weights_)) {
      throw OpError("w" + std::to_string(i) + ": expected " + std::to_string(num_weights_) +
                    " weights as in `formats`, this one is " + (given ? "extra" : "absent"));
    }
    if (!given) continue;
    weights_[i] = {&weight_format(formats[i]), nullptr, out_features[i]};
    if (const auto constant = info.constant_input(kFirstWeight + i)) weights_[i].data = weight_data(i, *constant);
  }
  if (const auto constant = info.constant_input(kBias)) bias_ = bias_data(*constant);
  has_bias_ = bias_ == nullptr && info.has_input(kBias);
  chain_.join({{weights_, num_weights_}, in_features_, epilogue_ != Epilogue::kNone}, false);
}

const uint8_t* QMatMul::weight_data(size_t i, const Tensor& tensor) const {
  tensor.check_shape({weights_[i].n, weights_[i].format->row_bytes(in_features_)});
  return tensor.as<uint8_t>();
}

const float* QMatMul::bias_data(const Tensor& tensor) const {
  tensor.check_shape({total_features_});
  return tensor.as<float>();
}

void QMatMul::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0);
  x.check_shape({-1, in_features_});
  WeightMatrix weights[kMaxWeights];
  for (size_t i = 0; i < num_weights_; i++) {
    weights[i] = weights_[i];
    if (weights[i].data == nullptr) weights[i].data = weight_data(i, ctx.input(kFirstWeight + i));
  }
  const float* bias = has_bias_ ? bias_data(ctx.input(kBias)) : bias_;
  const int64_t columns = epilogue_ == Epilogue::kNone ? total_features_ : weights[0].n;
  const Tensor y = ctx.output(0, {x.shape[0], columns});
  matmul(session_, {x.as<float>(),
                    x.shape[0],
                    in_features_,
                    {weights, num_weights_},
                    bias,
                    epilogue_,
                    y.mutable_as<float>(),
                    columns,
                    chain_.next()});
}

}  // namespace trivet
