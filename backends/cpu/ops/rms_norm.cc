// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight. AddRMSNorm: residual_out = x + residual, or RMSNorm(x, post_weight)
// + residual; y = RMSNorm(residual_out, weight). The arithmetic is in rms_norm_rows.h and gives the same bits in every
// tier.
#include "rms_norm.h"

#include <algorithm>
#include <cmath>

#include "../dispatch.h"
#include "rms_norm_kernel.h"

namespace trivet {
namespace {

constexpr TierTable<RmsNormKernels> kKernels = TRIVET_TIERS(kRmsNorm);

constexpr int64_t kTaskFloats = 1 << 14;  // one thread does this much in the time it takes to wake another

// f(row) for every row, several rows to a task.
template <class F>
void for_each_row(ThreadPool& pool, int64_t rows, int64_t n, const F& f) {
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskFloats / std::max<int64_t>(n, 1));
  const int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
  const auto run = [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) f(row);
  };
  if (tasks == 1) return run(0);
  pool.parallel_for(tasks, [&](int64_t task, int) { run(task); });
}

float eps_attribute(const KernelInfo& info) {
  const float eps = info.attr_float("eps");
  if (!std::isfinite(eps) || eps < 0) {
    throw OpError("attribute 'eps': expected a finite number from 0, got " + std::to_string(eps));
  }
  return eps;
}

}  // namespace

RMSNorm::RMSNorm(const KernelInfo& info, const SessionContext& session) : session(session), eps(eps_attribute(info)) {}

void RMSNorm::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0), weight = ctx.input(1);
  x.check_shape({-1, -1});
  const int64_t rows = x.shape[0], n = x.shape[1];
  weight.check_shape({n});
  const float* in = x.as<float>();
  const float* w = weight.as<float>();
  float* y = ctx.output(0, x.shape).mutable_as<float>();
  const RmsNormKernels& kernels = kKernels[session.tier];
  for_each_row(session.pool, rows, n, [&](int64_t r) { kernels.norm(in + r * n, w, n, eps, y + r * n); });
}

AddRMSNorm::AddRMSNorm(const KernelInfo& info, const SessionContext& session)
    : session(session), eps(eps_attribute(info)) {}

void AddRMSNorm::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0), residual = ctx.input(1), weight = ctx.input(2);
  x.check_shape({-1, -1});
  const int64_t rows = x.shape[0], n = x.shape[1];
  residual.check_shape({rows, n});
  weight.check_shape({n});
  const float* post = nullptr;
  if (ctx.has_input(3)) {
    const Tensor post_weight = ctx.input(3);
    post_weight.check_shape({n});
    post = post_weight.as<float>();
  }
  const float* in = x.as<float>();
  const float* add = residual.as<float>();
  const float* w = weight.as<float>();
  float* y = ctx.output(0, x.shape).mutable_as<float>();
  float* sum = ctx.output(1, x.shape).mutable_as<float>();
  const RmsNormKernels& kernels = kKernels[session.tier];
  for_each_row(session.pool, rows, n, [&](int64_t r) {
    const float* term = in + r * n;
    if (post != nullptr) {
      kernels.norm(term, post, n, eps, y + r * n);
      term = y + r * n;
    }
    kernels.add(term, add + r * n, n, sum + r * n);
    kernels.norm(sum + r * n, w, n, eps, y + r * n);
  });
}

}  // namespace trivet
