// A row's parameters and lists, and what they make of its logits before a token is chosen.
#pragma once

#include "sample_block.cuh"

namespace trivet::cuda {
namespace {

struct List {
  const int32_t* ids;
  int64_t start, count;  // count -1: the boundaries are bad
};

// The block of row 0 reports what is wrong with the boundaries, for all rows.
__device__ void check_loc(const ErrorSink& sink, const int32_t* loc, int64_t rows, int64_t total, SampleList which) {
  if (threadIdx.x != 0) return;
  if (loc[0] != 0 || loc[rows] != total) report(sink, DeviceErrorCode::kSampleLocEnds, which, loc[0], loc[rows], total);
  for (int64_t s = 0; s < rows; ++s) {
    if (loc[s + 1] < loc[s] || loc[s + 1] > total) {
      report(sink, DeviceErrorCode::kSampleLoc, (s + 1) * kSampleLists + which, loc[s + 1], loc[s], total);
    }
  }
}

__device__ List list_of(const ErrorSink& sink, const int32_t* ids, const int32_t* loc, int64_t row, int64_t rows,
                        int64_t total, int64_t vocab, SampleList which, Shared& s) {
  const int64_t start = loc[row], end = loc[row + 1];
  if (row == 0) check_loc(sink, loc, rows, total, which);
  if (start < 0 || end < start || end > total || loc[0] != 0 || loc[rows] != total) {
    s.bad = 1;
    return {ids, 0, -1};
  }
  for (int64_t i = start + threadIdx.x; i < end; i += kThreads) {
    if (ids[i] >= 0 && ids[i] < vocab) continue;
    report(sink, DeviceErrorCode::kSampleId, row, which, ids[i], vocab);
    s.bad = 1;
  }
  return {ids + start, start, end - start};
}

__device__ void check(const ErrorSink& sink, bool good, int64_t row, SampleNumber which, int64_t whole, float value,
                      int64_t bound, Shared& s) {
  if (good) return;
  report(sink, DeviceErrorCode::kSampleNumber, row, which, whole, bound, value);
  s.bad = 1;
}

struct RowParams {
  float temperature, top_p, min_p, repetition, frequency, presence;
  int64_t top_k, seed, offset, num_logprobs, forced, num_prompt;
};

__device__ RowParams read_params(const SampleParams& p, int64_t row) {
  const float* f = p.floats + row * 6;
  const int64_t* i = p.ints + row * 6;
  return {f[0], f[1], f[2], f[3], f[4], f[5], i[0], i[1], i[2], i[3], i[4], i[5]};
}

__device__ void check_params(const ErrorSink& sink, const SampleParams& p, const RowParams& r, int64_t row,
                             int64_t history_count, Shared& s) {
  const float floats[6] = {r.temperature, r.top_p, r.min_p, r.repetition, r.frequency, r.presence};
  const bool good[6] = {r.temperature >= 0.0f,
                        r.top_p > 0.0f && r.top_p <= 1.0f,
                        r.min_p >= 0.0f && r.min_p <= 1.0f,
                        r.repetition > 0.0f,
                        true,
                        true};
  for (int i = 0; i < 6; ++i) {
    check(sink, isfinite(floats[i]) && good[i], row, static_cast<SampleNumber>(i), 0, floats[i], 0, s);
  }
  check(sink, r.top_k >= 0, row, kTopK, r.top_k, 0, 0, s);
  check(sink, r.offset >= 0, row, kOffset, r.offset, 0, 0, s);
  check(sink, r.num_logprobs >= -1 && r.num_logprobs <= p.max_num_logprobs, row, kNumLogprobs, r.num_logprobs, 0,
        p.max_num_logprobs, s);
  check(sink, r.forced >= -1 && r.forced < p.vocab, row, kForcedTokenId, r.forced, 0, p.vocab - 1, s);
  if (history_count < 0) return;  // the block of row 0 names the boundaries, and this one must not be first
  check(sink, r.num_prompt >= 0 && r.num_prompt <= history_count, row, kNumPromptTokens, r.num_prompt, 0, history_count,
        s);
}

// --- Processing of the logits -------------------------------------------------------------------------------------

__device__ void apply_penalties(const SampleParams& p, const RowParams& r, const List& history, int64_t row,
                                float* logits) {
  int32_t* counts = p.counts + row * 2 * p.vocab;  // in the output
  int32_t* seen = counts + p.vocab;
  for (int64_t i = threadIdx.x; i < history.count; i += kThreads) {
    counts[history.ids[i]] = 0;
    seen[history.ids[i]] = 0;
  }
  __syncthreads();
  for (int64_t i = r.num_prompt + threadIdx.x; i < history.count; i += kThreads) atomicAdd(counts + history.ids[i], 1);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < history.count; i += kThreads) {
    const int32_t id = history.ids[i];
    if (atomicExch(seen + id, 1) != 0) continue;
    const int count = atomicAdd(counts + id, 0);
    float x = logits[id];
    x = x > 0.0f ? __fdiv_rn(x, r.repetition) : __fmul_rn(x, r.repetition);
    x = __fsub_rn(x, __fmul_rn(r.frequency, static_cast<float>(count)));
    if (count > 0) x = __fsub_rn(x, r.presence);
    logits[id] = x;
  }
  __syncthreads();
}

__device__ void process(const SampleParams& p, const RowParams& r, const List& history, const List& allowed,
                        const List& banned, const List& bias, int64_t row, const float* raw, float* logits) {
  for (int64_t id = threadIdx.x; id < p.vocab; id += kThreads) logits[id] = allowed.count == 0 ? raw[id] : -kInfinity;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < allowed.count; i += kThreads) logits[allowed.ids[i]] = raw[allowed.ids[i]];
  __syncthreads();
  for (int64_t i = threadIdx.x; i < banned.count; i += kThreads) logits[banned.ids[i]] = -kInfinity;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < bias.count; i += kThreads) {
    atomicAdd(logits + bias.ids[i], p.bias_values[bias.start + i]);
  }
  __syncthreads();
  if (p.bitmask != nullptr) {
    const uint32_t* mask = p.bitmask + row * p.mask_words;
    for (int64_t id = threadIdx.x; id < p.vocab; id += kThreads) {
      if ((mask[id / 32] >> (id % 32) & 1u) == 0) logits[id] = -kInfinity;
    }
    __syncthreads();
  }
  if (r.repetition != 1.0f || r.frequency != 0.0f || r.presence != 0.0f) apply_penalties(p, r, history, row, logits);
}

}  // namespace
}  // namespace trivet::cuda
