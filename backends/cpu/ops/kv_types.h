// Element types of the KV cache as stored: bit patterns with software conversions (round to nearest even).
#pragma once

#include <cstdint>

namespace trivet {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// KV dtype codes of backends/contract/opset.py.
enum class KvDtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

}  // namespace trivet
