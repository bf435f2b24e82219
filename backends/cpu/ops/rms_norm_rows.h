// The kernels of RMSNorm and AddRMSNorm over the Vec of the including tier (after vec_*.h).
#pragma once

#include "rms_norm_kernel.h"
#include "vec_math.h"

namespace {

void add_rows(const float* a, const float* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) add(Vec::load(a + i), Vec::load(b + i)).store(out + i);
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

constexpr trivet::RmsNormKernels kRmsNormKernels{rms_norm_row, add_rows};

}  // namespace
