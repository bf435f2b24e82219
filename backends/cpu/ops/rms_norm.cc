// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight. AddRMSNorm: residual_out = x + residual, or RMSNorm(x, post_weight)
// + residual, of all rows or those given; y = RMSNorm(residual_out, weight). The arithmetic is in rms_norm_rows.h and
// gives the same bits in every tier.
#include "rms_norm.h"

#include <algorithm>

#include "../../common/op_messages.h"
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

}  // namespace

RMSNorm::RMSNorm(const KernelInfo& info, const SessionContext& session) : session(session), eps(eps_attribute(info)) {}

void RMSNorm::compute(KernelContext& ctx) {
  const NormInputs in = norm_inputs(ctx);
  const int64_t n = in.n;
  float* y = ctx.output(0, {in.rows, n}).mutable_as<float>();
  const RmsNormKernels& kernels = kKernels[session.tier];
  for_each_row(session.pool, in.rows, n, [&](int64_t r) { kernels.norm(in.x + r * n, in.weight, n, eps, y + r * n); });
}

AddRMSNorm::AddRMSNorm(const KernelInfo& info, const SessionContext& session)
    : session(session), eps(eps_attribute(info)) {}

void AddRMSNorm::compute(KernelContext& ctx) {
  const NormInputs in = add_norm_inputs(ctx);
  const int64_t n = in.n;
  float* y = ctx.output(0, {in.rows, n}).mutable_as<float>();
  float* sum = ctx.output(1, {in.rows, n}).mutable_as<float>();
  for (int64_t r = 0; in.index != nullptr && r < in.rows; ++r) {
    if (in.index[r] < 0 || in.index[r] >= in.x_rows) {
      throw OpError(messages::row_index(r, in.index[r], in.x_rows));
    }
  }
  const RmsNormKernels& kernels = kKernels[session.tier];
  for_each_row(session.pool, in.rows, n, [&](int64_t r) {
    const int64_t from = (in.index == nullptr ? r : in.index[r]) * n;
    const float* term = in.x + from;
    if (in.post_weight != nullptr) {
      kernels.norm(term, in.post_weight, n, eps, y + r * n);
      term = y + r * n;
    }
    kernels.add(term, in.residual + from, n, sum + r * n);
    kernels.norm(sum + r * n, in.weight, n, eps, y + r * n);
  });
}

}  // namespace trivet
