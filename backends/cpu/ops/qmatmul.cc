#include "qmatmul.h"

namespace trivet {
namespace {

constexpr size_t kFirstWeight = 2;  // index of w0 among the inputs

Epilogue parse_epilogue(const std::string& name) {
  if (name == "none") return Epilogue::kNone;
  if (name == "swiglu") return Epilogue::kSwiglu;
  if (name == "geglu") return Epilogue::kGeglu;
  throw OpError("epilogue: expected none, swiglu or geglu, got '" + name + "'");
}

}  // namespace

QMatMul::QMatMul(const KernelInfo& info, const SessionContext& session)
    : session_(session),
      out_features_(info.attr_ints("out_features")),
      in_features_(info.attr_int("in_features")),
      epilogue_(parse_epilogue(info.attr_string("epilogue"))) {
  for (const std::string& name : info.attr_names("formats")) {
    formats_.push_back(&weight_format(name));
    check_row(*formats_.back(), in_features_, "in_features");
  }
  if (formats_.empty() || formats_.size() > kMaxWeights || formats_.size() != out_features_.size()) {
    throw OpError("formats and out_features: expected one entry per weight, 1 to 3, got " +
                  std::to_string(formats_.size()) + " and " + std::to_string(out_features_.size()));
  }
  for (int64_t n : out_features_) {
    if (n < 1) throw OpError("out_features: expected positive numbers, got " + std::to_string(n));
  }
  if (epilogue_ != Epilogue::kNone && (formats_.size() != 2 || out_features_[0] != out_features_[1])) {
    throw OpError("epilogue: a gated one needs two weights of the same out_features");
  }
}

void QMatMul::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0);
  x.check_shape({-1, in_features_});
  WeightMatrix weights[kMaxWeights];
  int64_t total = 0;
  for (size_t i = 0; i < kMaxWeights; i++) {
    const bool given = ctx.has_input(kFirstWeight + i);
    if (given != (i < formats_.size())) {
      throw OpError("w" + std::to_string(i) + ": expected " + std::to_string(formats_.size()) +
                    " weights as in `formats`, this one is " + (given ? "extra" : "absent"));
    }
    if (!given) continue;
    const Tensor w = ctx.input(kFirstWeight + i);
    w.check_shape({out_features_[i], formats_[i]->row_bytes(in_features_)});
    weights[i] = {formats_[i], w.as<uint8_t>(), out_features_[i]};
    total += out_features_[i];
  }
  const float* bias = nullptr;
  if (ctx.has_input(1)) {
    const Tensor tensor = ctx.input(1);
    tensor.check_shape({total});
    bias = tensor.as<float>();
  }
  const int64_t columns = epilogue_ == Epilogue::kNone ? total : out_features_[0];
  const Tensor y = ctx.output(0, {x.shape[0], columns});
  matmul(session_, {x.as<float>(),
                    x.shape[0],
                    in_features_,
                    {weights, formats_.size()},
                    bias,
                    epilogue_,
                    y.mutable_as<float>(),
                    columns});
}

}  // namespace trivet
