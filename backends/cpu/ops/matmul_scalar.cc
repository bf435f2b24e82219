// The definition of the matrix product in plain C++: what every other tier must reproduce. A scaled sum is added in one
// rounding (a fused multiply-add); the x86-64 baseline, which has no such instruction, rounds the product first.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "matmul_kernels.h"
#include "scalar_math.h"

namespace trivet {
namespace {

// d = max|x| / 127, q = x / d to the nearest, ties to even. A block with an infinity or NaN gives d = NaN, q = 0, which
// makes every result that uses it NaN. Below 2^-112 the quotient 127 / max|x| would leave the range of float32: such a
// block counts as zero.
void quantize(const float* x, int64_t k, void* q_out, float* d, float* sum, int32_t* sums) {
  auto* q = static_cast<int8_t*>(q_out);
  for (int64_t b = 0; b < k / kBlock; b++, x += kBlock, q += kBlock) {
    uint32_t bits = 0;
    for (int i = 0; i < kBlock; i++) bits = std::max(bits, bits_of_float(x[i]) & 0x7FFFFFFFu);
    const bool finite = bits < 0x7F800000u;
    const float amax = float_of_bits(bits);
    const bool nonzero = finite && amax >= 0x1p-112f;
    const float inverse = nonzero ? 127.0f / amax : 0.0f;
    d[b] = nonzero ? amax / 127.0f : (finite ? 0.0f : NAN);
    sums[2 * b] = sums[2 * b + 1] = 0;
    for (int i = 0; i < kBlock; i++) {
      q[i] = nonzero ? static_cast<int8_t>(std::nearbyintf(x[i] * inverse)) : int8_t{0};
      sums[2 * b + i / 16] += q[i];
    }
    sum[b] = d[b] * static_cast<float>(sums[2 * b] + sums[2 * b + 1]);
  }
}

// One 32-block of one weight row: its stored integers and scales.
struct Block {
  int q[kBlock];
  float d[2];
  float m;
};

void nibbles(const uint8_t* p, Block& b) {
  for (int i = 0; i < 16; i++) {
    b.q[i] = p[i] & 15;
    b.q[i + 16] = p[i] >> 4;
  }
}

void fifth_bits(uint32_t high, Block& b) {
  for (int i = 0; i < kBlock; i++) b.q[i] |= static_cast<int>(high >> i & 1) << 4;
}

template <Format format>
Block decode(const uint8_t* row, int64_t index) {
  Block b{};
  if constexpr (format == Format::kQ4_0 || format == Format::kQ5_0) {
    constexpr bool five = format == Format::kQ5_0;
    const uint8_t* p = row + index * (five ? 22 : 18);
    nibbles(p + (five ? 6 : 2), b);
    if (five) fifth_bits(load_as<uint32_t>(p + 2), b);
    b.d[0] = load_half(p);
  } else if constexpr (format == Format::kQ4_1 || format == Format::kQ5_1) {
    constexpr bool five = format == Format::kQ5_1;
    const uint8_t* p = row + index * (five ? 24 : 20);
    nibbles(p + (five ? 8 : 4), b);
    if (five) fifth_bits(load_as<uint32_t>(p + 4), b);
    b.d[0] = load_half(p);
    b.m = load_half(p + 2);
  } else if constexpr (format == Format::kQ8_0) {
    const uint8_t* p = row + index * 34;
    for (int i = 0; i < kBlock; i++) b.q[i] = static_cast<int8_t>(p[2 + i]) + 128;
    b.d[0] = load_half(p);
  } else if constexpr (format == Format::kQ4_K || format == Format::kQ5_K) {
    constexpr bool five = format == Format::kQ5_K;
    const uint8_t* p = row + index / 8 * (five ? 176 : 144);
    const int j = static_cast<int>(index % 8);
    int scale;
    int minimum;
    unpack_scale_min(p + 4, j, &scale, &minimum);
    b.d[0] = load_half(p) * static_cast<float>(scale);
    b.m = -(load_half(p + 2) * static_cast<float>(minimum));
    const uint8_t* q = p + (five ? 48 : 16) + j / 2 * 32;
    for (int i = 0; i < kBlock; i++) {
      b.q[i] = ((q[i] >> (j % 2 * 4)) & 15) | (five ? (p[16 + i] >> j & 1) << 4 : 0);
    }
  } else {
    static_assert(format == Format::kQ6_K);
    const uint8_t* p = row + index / 8 * 210;
    const int j = static_cast<int>(index % 8);
    const float d = load_half(p + 208);
    const uint8_t* low = p + j / 4 * 64 + j % 2 * 32;
    const uint8_t* high = p + 128 + j / 4 * 32;
    for (int i = 0; i < kBlock; i++) b.q[i] = ((low[i] >> (j % 4 / 2 * 4)) & 15) | ((high[i] >> (j % 4 * 2) & 3) << 4);
    for (int h = 0; h < 2; h++) b.d[h] = d * static_cast<float>(static_cast<int8_t>(p[192 + 2 * j + h]));
  }
  return b;
}

template <Format format>
void tile(const TileArgs& args) {
  constexpr bool has_min =
      format == Format::kQ4_1 || format == Format::kQ5_1 || format == Format::kQ4_K || format == Format::kQ5_K;
  constexpr int halves = format == Format::kQ6_K ? 2 : 1;
  const int64_t blocks = args.num_blocks;
  for (int r = 0; r < kTileRows; r++) {
    const uint8_t* row = args.weight + r * args.row_bytes;
    for (int64_t i = 0; i < args.m; i++) args.acc[i * args.acc_stride + r] = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
      const Block w = decode<format>(row, b);
      for (int64_t i = 0; i < args.m; i++) {
        const int8_t* q = static_cast<const int8_t*>(args.x.q) + (i * blocks + b) * kBlock;
        const int64_t at = i * blocks + b;
        float& acc = args.acc[i * args.acc_stride + r];
        for (int h = 0; h < halves; h++) {
          int dot = args.x.correction[2 * at + h];
          for (int e = h * 16; e < (h + 1) * kBlock / halves; e++) dot += w.q[e] * q[e];
          acc = std::fma(w.d[h] * args.x.d[at], static_cast<float>(dot), acc);
        }
        if (has_min) acc = std::fma(w.m, args.x.sum[at], acc);
      }
    }
  }
}

void float_tile(const FloatTileArgs& args) {
  for (int64_t i = 0; i < args.m; i++) {
    for (int r = 0; r < args.n; r++) {
      const float* x = args.x + i * args.x_stride;
      const float* w = args.weight + r * args.weight_stride;
      float part[16] = {};
      for (int64_t e = 0; e < args.k; e++) part[e % 16] += x[e] * w[e];
      for (int width = 8; width > 0; width /= 2) {
        for (int j = 0; j < width; j++) part[j] += part[j + width];
      }
      args.acc[i * args.acc_stride + r] = part[0];
    }
  }
}

// See vector_math.inl for the formulas.
float exp_limited(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  for (float c : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  p = p * (r * r) + r;
  p = p + 1.0f;
  return p * float_of_bits((bits_of_float(shifted) << 23) + 0x3F800000u);
}

float gelu_tanh(float x) {
  const float u = (x + x * x * x * 0.044715f) * 0.797884561f;
  return x / (exp_limited(u * -2.0f) + 1.0f);
}

float tanh_of(float x) {
  const float a = std::fabs(x);
  float y = 1.0f - 2.0f / (exp_limited(a + a) + 1.0f);
  if (a < 0.625f) {
    const float z = a * a;
    float p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    for (float c : {-5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) p = p * z + c;
    y = p * z * a + a;
  }
  return float_of_bits(bits_of_float(y) | (bits_of_float(x) & 0x80000000u));
}

void glu(Epilogue epilogue, const float* gate, const float* up, int64_t m, int n, float* y, int64_t y_stride) {
  for (int64_t i = 0; i < m; i++) {
    for (int r = 0; r < n; r++) {
      const float g = gate[i * kTileRows + r];
      const float activated = epilogue == Epilogue::kSwiglu ? g / (exp_limited(-g) + 1.0f) : gelu_tanh(g);
      y[i * y_stride + r] = activated * up[i * kTileRows + r];
    }
  }
}

void soft_cap(float cap, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = tanh_of(y[i] / cap) * cap;
}

}  // namespace

const MatMulKernels kMatMulScalar = {
    .q_bytes = 1,
    .quantize = quantize,
    .tile = {nullptr, nullptr, nullptr, tile<Format::kQ4_0>, tile<Format::kQ4_1>, tile<Format::kQ5_0>,
             tile<Format::kQ5_1>, tile<Format::kQ8_0>, tile<Format::kQ4_K>, tile<Format::kQ5_K>, tile<Format::kQ6_K>},
    .pack = nullptr,
    .packed_tiles = {},
    .float_tile = float_tile,
    .convert_f16 = nullptr,
    .convert_bf16 = nullptr,
    .glu = glu,
    .soft_cap = soft_cap,
};

}  // namespace trivet
