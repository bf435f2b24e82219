// The kernels of RMSNorm and AddRMSNorm that a tier offers. All pointers are rows of n floats.
#pragma once

#include <cstdint>

namespace trivet {

struct RmsNormKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
  void (*norm)(const float* x, const float* weight, int64_t n, float eps, float* y);
  // out = a + b; out may be a or b.
  void (*add)(const float* a, const float* b, int64_t n, float* out);
};

extern const RmsNormKernels kRmsNormScalar, kRmsNormBaseline, kRmsNormAvx2, kRmsNormAvx512Vnni, kRmsNormNeon;

}  // namespace trivet
