// The weight formats of backends/contract/formats.py: geometry and plain dequantisation.
#pragma once

#include <cstdint>
#include <string>

namespace trivet {

enum class Format : int { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

struct WeightFormat {
  const char* name;
  Format format;
  int64_t block_size;  // elements
  int64_t block_bytes;
  int zero_point;  // of the unsigned integers that a block format stores
  // dequantise(block, n, out): n elements, whole blocks.
  void (*dequantize)(const uint8_t* row, int64_t n, float* out);

  bool is_block() const { return block_size > 1; }
  int64_t row_bytes(int64_t n) const { return n / block_size * block_bytes; }
};

// Throws OpError listing the known names.
const WeightFormat& weight_format(const std::string& name);
// Throws OpError unless n is a positive whole number of blocks.
void check_row(const WeightFormat& format, int64_t n, const char* what);

}  // namespace trivet
