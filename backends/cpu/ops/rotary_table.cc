// RotaryTable: cos_sin[t] = (cos(angle), sin(angle)) * scale with angle = float32(position) * inv_freq rounded to
// float32, as the models are trained; the functions themselves are evaluated in double. Once per step, so one tier
// serves all.
#include "rotary_table.h"

#include <algorithm>
#include <cmath>

#include "../../common/op_messages.h"

namespace trivet {
namespace {

constexpr int64_t kTaskAngles = 128;  // some 5 microseconds

void rotary_row(int32_t position, const float* inv_freq, int64_t half, float scale, float* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float product = static_cast<float>(position) * inv_freq[i];
    const double angle = product;
    out[i] = static_cast<float>(std::cos(angle)) * scale;
    out[half + i] = static_cast<float>(std::sin(angle)) * scale;
  }
}

}  // namespace

RotaryTable::RotaryTable(const KernelInfo& info, const SessionContext& session)
    : session(session), scale(finite_attribute(info, "scale")) {}

void RotaryTable::compute(KernelContext& ctx) {
  const Tensor positions = ctx.input(0), inv_freq = ctx.input(1);
  positions.check_shape({-1});
  inv_freq.check_shape({-1});
  const int64_t rows = positions.shape[0], half = inv_freq.shape[0];
  const int32_t* position = positions.as<int32_t>();
  const float* frequency = inv_freq.as<float>();
  for (int64_t t = 0; t < rows; ++t) {
    if (position[t] < 0) throw OpError(messages::negative_position(t, position[t]));
  }
  float* out = ctx.output(0, {rows, 2 * half}).mutable_as<float>();
  const auto row = [&](int64_t t) { rotary_row(position[t], frequency, half, scale, out + t * 2 * half); };
  if (rows * half <= kTaskAngles) {
    for (int64_t t = 0; t < rows; ++t) row(t);
    return;
  }
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskAngles / half);
  session.pool.parallel_for((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t t = task * rows_per_task; t < end; ++t) row(t);
  });
}

}  // namespace trivet
