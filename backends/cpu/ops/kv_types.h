// Element types of the KV cache as stored: bit patterns with software conversions (round to nearest even).
#pragma once

#include <cstdint>

#include "../../common/op_types.h"

namespace trivet {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace trivet
