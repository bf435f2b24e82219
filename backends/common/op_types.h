// Small types of the ops' contract, and its limits. C++17 and light: kernels of all kinds include it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trivet {

inline constexpr int64_t kMaxHeads = 1 << 14;
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr size_t kMaxWeights = 3;  // of one product

enum class Epilogue : int { kNone, kSwiglu, kGeglu };

// KV dtype codes of backends/contract/opset.py.
enum class KvDtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kE4M3 = 3, kInt16 = 4 };

// What the float32 scale of a key or value takes in a cache of kInt16, in elements.
inline constexpr int64_t kInt16ScaleElements = 2;

// Parameters of Sample, in the order of SAMPLING_FLOATS, SAMPLING_INTS, then bias_values.
enum SampleNumber : int32_t {
  kTemperature,
  kTopP,
  kMinP,
  kRepetitionPenalty,
  kFrequencyPenalty,
  kPresencePenalty,
  kTopK,
  kSeed,
  kOffset,
  kNumLogprobs,
  kForcedTokenId,
  kNumPromptTokens,
  kBiasValue,
};

inline constexpr int64_t kNumSampleFloats = 6, kNumSampleInts = 6;

}  // namespace trivet
