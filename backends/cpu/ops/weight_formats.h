// The weight formats of common/weight_format.h with their plain dequantisation.
#pragma once

#include <cstdint>

#include "../../common/weight_format.h"

namespace trivet {

struct WeightFormat : FormatSpec {
  int zero_point;  // of the unsigned integers that a block format stores
  // dequantise(block, n, out): n elements, whole blocks.
  void (*dequantize)(const uint8_t* row, int64_t n, float* out);
};

const WeightFormat& weight_format(Format format);

}  // namespace trivet
