// Matrix product with what every ARMv8-A CPU has: 16-bit products of bytes, added in pairs.
namespace trivet {
namespace {

constexpr int kRows = 2;
constexpr bool kSignedWeights = true;

}  // namespace
}  // namespace trivet

#include "matmul_neon.inl"

namespace trivet {
namespace {

template <class W, int MR>
inline void dot_products(const Group* groups, int row, const int8_t* q, int64_t stride, int32x4_t dot[MR][2]) {
  constexpr int kRun = W::kMax > 127 ? 2 : 4;  // products that fit 16 bits: 2 x 128 x 127, 4 x 63 x 127
  int32x4_t sums[MR][4];                       // [j]: rows 2 j and 2 j + 1, two lanes each
  for (auto& of_row : sums) {
    for (auto& s : of_row) s = vdupq_n_s32(0);
  }
  for (int g0 = 0; g0 < kGroups<W>; g0 += kRun) {
    int16x8_t products[MR][4];
#pragma GCC unroll 4
    for (int g = g0; g < g0 + kRun; g++) {
#pragma GCC unroll 2
      for (int i = 0; i < MR; i++) {
        const int8x16_t x = vreinterpretq_s8_s32(
            vdupq_n_s32(load_as<int32_t>(reinterpret_cast<const uint8_t*>(q + i * stride + 4 * g))));
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          const int8x16_t w = load_weights<W>(groups[g], row + 4 * j);
          int16x8_t& low = products[i][2 * j];
          int16x8_t& high = products[i][2 * j + 1];
          low = g == g0 ? vmull_s8(vget_low_s8(w), vget_low_s8(x)) : vmlal_s8(low, vget_low_s8(w), vget_low_s8(x));
          high = g == g0 ? vmull_high_s8(w, x) : vmlal_high_s8(high, w, x);
        }
      }
    }
    for (int i = 0; i < MR; i++) {
      for (int j = 0; j < 4; j++) sums[i][j] = vpadalq_s16(sums[i][j], products[i][j]);
    }
  }
  for (int i = 0; i < MR; i++) {
    dot[i][0] = vpaddq_s32(sums[i][0], sums[i][1]);
    dot[i][1] = vpaddq_s32(sums[i][2], sums[i][3]);
  }
}

}  // namespace

const MatMulKernels kMatMulNeon = kMatMulKernels;

}  // namespace trivet
