// Matrix product with USMMLA, which multiplies 8 elements of two weight rows with 8 elements of two activation rows; a
// single activation row takes USDOT. Weights stay unsigned.
namespace trivet {
namespace {

constexpr int kRows = 8;
constexpr bool kSignedWeights = false;

}  // namespace
}  // namespace trivet

#include "matmul_neon.inl"

namespace trivet {
namespace {

// 4 elements of rows row ... row + 3, unsigned as stored.
inline uint32x4_t stored_weights(const Group& group, int row) { return vreinterpretq_u32_u8(vld1q_u8(group[row])); }

inline void dot_products_of_one(const Group* groups, int num_groups, int row, const int8_t* q, int32x4_t dot[2]) {
  dot[0] = dot[1] = vdupq_n_s32(0);
  for (int g = 0; g < num_groups; g++) {
    const int8x16_t x =
        vreinterpretq_s8_s32(vdupq_n_s32(load_as<int32_t>(reinterpret_cast<const uint8_t*>(q + 4 * g))));
    for (int j = 0; j < 2; j++) {
      dot[j] = vusdotq_s32(dot[j], vreinterpretq_u8_u32(stored_weights(groups[g], row + 4 * j)), x);
    }
  }
}

template <class W, int MR>
inline void dot_products(const Group* groups, int row, const int8_t* q, int64_t stride, int32x4_t dot[MR][2]) {
  if constexpr (MR == 1) {
    dot_products_of_one(groups, kGroups<W>, row, q, dot[0]);
  } else {
    constexpr int kPairs = MR / 2;
    int32x4_t sums[kPairs][4];  // [p][j], rows r = row + 2 j and activations a = 2 p: r a, r (a + 1), (r + 1) a, ...
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; p++) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sums[p][j] = vdupq_n_s32(0);
    }
    for (int g = 0; g < kGroups<W>; g += 2) {
      uint8x16_t w[4];  // 8 elements of two rows
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const uint32x4_t first = stored_weights(groups[g], row + 4 * j);
        const uint32x4_t second = stored_weights(groups[g + 1], row + 4 * j);
        w[2 * j] = vreinterpretq_u8_u32(vzip1q_u32(first, second));
        w[2 * j + 1] = vreinterpretq_u8_u32(vzip2q_u32(first, second));
      }
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; p++) {
        const int8_t* at = q + 2 * p * stride + 4 * g;
        const int8x16_t x = vcombine_s8(vld1_s8(at), vld1_s8(at + stride));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[p][j] = vusmmlaq_s32(sums[p][j], w[j], x);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; p++) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        dot[2 * p][j] = vuzp1q_s32(sums[p][2 * j], sums[p][2 * j + 1]);
        dot[2 * p + 1][j] = vuzp2q_s32(sums[p][2 * j], sums[p][2 * j + 1]);
      }
    }
  }
}

}  // namespace

const MatMulKernels kMatMulI8mm = kMatMulKernels;

}  // namespace trivet
