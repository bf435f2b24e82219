// The kernels of Sample over the Vec of the including tier (after vec_*.h).
#pragma once

#include "sample_kernel.h"
#include "vec_math.h"

namespace {

constexpr int64_t kScanBlock = 1024;  // the first block that holds the maximum is searched for its id
constexpr int64_t kSumBlock = 256;    // summed in float32, the blocks in double

float highest_value(const float* values, int64_t n) {
  Vec best = Vec::set(-HUGE_VALF);
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) best = max(best, Vec::load(values + i));
  float highest = reduce_max(best);
  for (; i < n; ++i) highest = values[i] > highest ? values[i] : highest;
  return highest;
}

bool all_below_infinity(const float* values, int64_t n) {
  const Vec infinity = Vec::set(HUGE_VALF);
  bool bad = false;
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) bad |= any_not_less(Vec::load(values + i), infinity);
  for (; i < n; ++i) bad |= !(values[i] < HUGE_VALF);
  return !bad;
}

trivet::HighestLogit highest_logit(const float* logits, int64_t n) {
  float best = -HUGE_VALF;
  int64_t best_block = 0;
  for (int64_t start = 0; start < n; start += kScanBlock) {
    const int64_t size = n - start < kScanBlock ? n - start : kScanBlock;
    if (!all_below_infinity(logits + start, size)) return {0.0f, 0, false};
    const float highest = highest_value(logits + start, size);
    if (highest > best) {
      best = highest;
      best_block = start;
    }
  }
  int64_t id = best_block;
  while (id < n - 1 && logits[id] != best) ++id;
  return {best, id, true};
}

void weigh(const float* values, int64_t n, float offset, float* weights) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth)
    exp_of(sub(Vec::load(values + i), Vec::set(offset))).store(weights + i);
  for (; i < n; ++i) weights[i] = exp_of(values[i] - offset);
}

double sum_exp(const float* values, int64_t n, float offset) {
  constexpr int kVecs = 16 / Vec::kWidth;
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kSumBlock) {
    const int64_t end = n - start < kSumBlock ? n : start + kSumBlock;
    Vec sums[kVecs];
    for (Vec& s : sums) s = Vec::set(0.0f);
    for (int64_t i = start; i < end; i += 16) {
      for (int j = 0; j < kVecs && i + j * Vec::kWidth < end; ++j) {
        const int64_t first = i + j * Vec::kWidth, left = end - first;
        const Vec x = sub(load_first(values + first, left), Vec::set(offset));
        const Vec weight = exp_of(x);
        sums[j] = add(sums[j], left < Vec::kWidth ? keep_lanes(weight, 0, static_cast<int>(left), 0.0f) : weight);
      }
    }
    for (int half = kVecs / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) sums[j] = add(sums[j], sums[j + half]);
    }
    total += static_cast<double>(reduce_add(sums[0]));
  }
  return total;
}

constexpr trivet::SampleKernels kSampleKernels{highest_logit, highest_value, weigh, sum_exp};

}  // namespace
