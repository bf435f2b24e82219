// The weight formats of backends/contract/formats.py: names and geometry. C++17: kernels for devices include it, too.
#pragma once

#include <cstdint>
#include <string_view>

namespace trivet {

enum class Format : int { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

struct FormatSpec {
  const char* name;
  Format format;
  int64_t block_size;  // elements
  int64_t block_bytes;

  bool is_block() const { return block_size > 1; }
  int64_t row_bytes(int64_t n) const { return n / block_size * block_bytes; }
};

inline constexpr FormatSpec kFormatSpecs[] = {
    // in the order of Format
    {"f32", Format::kF32, 1, 4},       {"f16", Format::kF16, 1, 2},       {"bf16", Format::kBF16, 1, 2},
    {"q4_0", Format::kQ4_0, 32, 18},   {"q4_1", Format::kQ4_1, 32, 20},   {"q5_0", Format::kQ5_0, 32, 22},
    {"q5_1", Format::kQ5_1, 32, 24},   {"q8_0", Format::kQ8_0, 32, 34},   {"q4_k", Format::kQ4_K, 256, 144},
    {"q5_k", Format::kQ5_K, 256, 176}, {"q6_k", Format::kQ6_K, 256, 210},
};

// Throws OpError listing the known names.
const FormatSpec& format_spec(std::string_view name);
// Throws OpError unless n is a positive whole number of blocks.
void check_row(const FormatSpec& format, int64_t n, const char* what);

}  // namespace trivet
