// One row of Sample: a token and its log-probabilities from a row of logits. sample.cc checks and feeds it.
#pragma once

#include <cstdint>
#include <span>

#include "sample_kernel.h"

namespace trivet {

struct SampleRow {
  const float* logits;  // [vocab]
  int64_t vocab;
  HighestLogit highest;  // of the logits
  float temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty;
  int64_t top_k, seed, offset, num_logprobs, forced_token_id;
  std::span<const int32_t> prompt, output;  // token history; empty when no penalty is on
  std::span<const int32_t> allowed, banned, bias_ids;
  const float* bias_values;  // [bias_ids.size()]
  const uint32_t* bitmask;   // [ceil(vocab / 32)] or null
};

struct SampledToken {
  int32_t id;     // -1: the logits cannot be sampled, a logit is NaN or +infinity or all are -infinity
  float logprob;  // -infinity and rank -1 when no logprobs are wanted, or there is no token
  int32_t rank;   // 1 = highest
};

// top_ids, top_logprobs [row.num_logprobs] are written when that is positive and there is a token. Throws OpError when
// processing leaves nothing to sample. Ids must be in [0, vocab), numbers in the ranges that sample.cc checks.
SampledToken sample_row(const SampleRow& row, const SampleKernels& kernels, int32_t* top_ids, float* top_logprobs);

// Uniform in [0, 1), 53 bits, a function of (seed, offset) only: Philox4x32-10 with the seed as key and the offset as
// counter; the first two words of the block, high bits first.
double uniform(int64_t seed, int64_t offset);

}  // namespace trivet
