// Matrix product with SDOT, which multiplies 4 elements of 4 rows with 4 elements of an activation row.
namespace trivet {
namespace {

constexpr int kRows = 8;
constexpr bool kSignedWeights = true;

}  // namespace
}  // namespace trivet

#include "matmul_neon.inl"

namespace trivet {
namespace {

template <class W, int kLane, int MR>
TRIVET_INLINE void multiply_group(const Group& group, int row, const int8x16_t x[MR], int32x4_t dot[MR][2]) {
#pragma GCC unroll 2
  for (int j = 0; j < 2; j++) {
    const int8x16_t w = load_weights<W>(group, row + 4 * j);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) dot[i][j] = vdotq_laneq_s32(dot[i][j], w, x[i], kLane);
  }
}

template <class W, int MR>
inline void dot_products(const Group* groups, int row, const int8_t* q, int64_t stride, int32x4_t dot[MR][2]) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) dot[i][0] = dot[i][1] = vdupq_n_s32(0);
#pragma GCC unroll 2
  for (int g = 0; g < kGroups<W>; g += 4) {
    int8x16_t x[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) x[i] = vld1q_s8(q + i * stride + 4 * g);
    multiply_group<W, 0, MR>(groups[g], row, x, dot);
    multiply_group<W, 1, MR>(groups[g + 1], row, x, dot);
    multiply_group<W, 2, MR>(groups[g + 2], row, x, dot);
    multiply_group<W, 3, MR>(groups[g + 3], row, x, dot);
  }
}

}  // namespace

const MatMulKernels kMatMulDotprod = kMatMulKernels;

}  // namespace trivet
