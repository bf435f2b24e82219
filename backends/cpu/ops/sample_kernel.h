// The kernels of Sample that a tier offers. The same bits in every tier, so a seed gives the same token everywhere.
#pragma once

#include <cstdint>

namespace trivet {

struct HighestLogit {
  float value;  // -infinity if no logit is finite
  int64_t id;   // the lowest id that has it
  bool valid;   // false: some logit is NaN or +infinity, and the other fields mean nothing
};

struct SampleKernels {
  HighestLogit (*highest)(const float* logits, int64_t n);
  // Highest of n > 0 values without NaN.
  float (*highest_value)(const float* values, int64_t n);
  // weights[i] = exp(values[i] - offset) for values <= offset.
  void (*weigh)(const float* values, int64_t n, float offset, float* weights);
  // Sum of exp(values[i] - offset) for values <= offset.
  double (*sum_exp)(const float* values, int64_t n, float offset);
};

extern const SampleKernels kSampleScalar, kSampleBaseline, kSampleAvx2, kSampleAvx512Vnni, kSampleNeon;

}  // namespace trivet
