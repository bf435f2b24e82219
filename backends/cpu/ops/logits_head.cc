#include "logits_head.h"

#include <algorithm>

#include "matmul_activations.h"

namespace trivet {
namespace {

constexpr int64_t kCapRun = 4096;

}  // namespace

LogitsHead::LogitsHead(const KernelInfo& info, const SessionContext& session)
    : session_(session), attributes_(head_attributes(info)) {
  if (const auto constant = info.constant_input(1)) weight_ = head_weight(attributes_, *constant);
  const WeightMatrix matrix{&weight_format(attributes_.format.format), weight_, attributes_.vocab_size};
  chain_.join({{&matrix, 1}, attributes_.in_features, false}, true);
}

void LogitsHead::compute(KernelContext& ctx) {
  const HeadAttributes& a = attributes_;
  const Tensor x = ctx.input(0);
  x.check_shape({-1, a.in_features});
  const float* values = x.as<float>();
  const int64_t rows = x.shape[0];
  float* logits = ctx.output(0, {rows, a.vocab_size}).mutable_as<float>();
  const uint8_t* weight = weight_ != nullptr ? weight_ : head_weight(a, ctx.input(1));
  const WeightMatrix matrix{&weight_format(a.format.format), weight, a.vocab_size};
  matmul(session_,
         {values, rows, a.in_features, {&matrix, 1}, nullptr, Epilogue::kNone, logits, a.vocab_size, chain_.next()});
  if (a.soft_cap > 0.0f) {
    const MatMulKernels& kernels = matmul_kernels(session_.tier);
    const int64_t count = rows * a.vocab_size;
    session_.pool.parallel_for((count + kCapRun - 1) / kCapRun, [&](int64_t run, int) {
      kernels.soft_cap(a.soft_cap, logits + run * kCapRun, std::min(kCapRun, count - run * kCapRun));
    });
  }
}

}  // namespace trivet
