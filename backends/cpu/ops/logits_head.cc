#include "logits_head.h"

#include <algorithm>

namespace trivet {
namespace {

constexpr int kSlotRows = 7;  // of ThreadScratch; matmul.cc uses the low ones
constexpr int64_t kCapRun = 4096;

}  // namespace

LogitsHead::LogitsHead(const KernelInfo& info, const SessionContext& session)
    : session_(session),
      format_(weight_format(info.attr_string("format"))),
      in_features_(info.attr_int("in_features")),
      vocab_size_(info.attr_int("vocab_size")),
      soft_cap_(info.attr_float("soft_cap")) {
  check_row(format_, in_features_, "in_features");
  if (vocab_size_ < 1) throw OpError("vocab_size: expected a positive number, got " + std::to_string(vocab_size_));
  if (const auto constant = info.constant_input(2)) weight_ = weight_data(*constant);
  const WeightMatrix matrix{&format_, weight_, vocab_size_};
  chain_.join({{&matrix, 1}, in_features_, false}, true);
  if (!(soft_cap_ >= 0.0f)) throw OpError("soft_cap: expected 0 or more, got " + std::to_string(soft_cap_));
}

const uint8_t* LogitsHead::weight_data(const Tensor& tensor) const {
  tensor.check_shape({vocab_size_, format_.row_bytes(in_features_)});
  return tensor.as<uint8_t>();
}

void LogitsHead::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0);
  const Tensor indices = ctx.input(1);
  x.check_shape({-1, in_features_});
  indices.check_shape({-1});
  const int64_t rows = indices.shape[0];
  const int32_t* index = indices.as<int32_t>();
  float* gathered = ThreadScratch::get<float>(kSlotRows, rows * in_features_);
  for (int64_t s = 0; s < rows; s++) {
    if (index[s] < 0 || index[s] >= x.shape[0]) {
      throw OpError("logits_indices[" + std::to_string(s) + "]: expected a row from 0 to " +
                    std::to_string(x.shape[0] - 1) + ", got " + std::to_string(index[s]));
    }
    std::copy_n(x.as<float>() + index[s] * in_features_, in_features_, gathered + s * in_features_);
  }
  float* logits = ctx.output(0, {rows, vocab_size_}).mutable_as<float>();
  const WeightMatrix matrix{&format_, weight_ != nullptr ? weight_ : weight_data(ctx.input(2)), vocab_size_};
  matmul(session_,
         {gathered, rows, in_features_, {&matrix, 1}, nullptr, Epilogue::kNone, logits, vocab_size_, chain_.next()});
  if (soft_cap_ > 0.0f) {
    const MatMulKernels& kernels = matmul_kernels(session_.tier);
    const int64_t count = rows * vocab_size_;
    session_.pool.parallel_for((count + kCapRun - 1) / kCapRun, [&](int64_t run, int) {
      kernels.soft_cap(soft_cap_, logits + run * kCapRun, std::min(kCapRun, count - run * kCapRun));
    });
  }
}

}  // namespace trivet
