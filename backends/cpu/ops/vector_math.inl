// Elementary functions on compiler vectors, for inclusion in one source file per tier. The sequence of float operations
// is fixed (every product rounded, no fused multiply-add), so all tiers give the same bits.
//
// The including file defines kVectorFloats (4, 8 or 16) in its anonymous namespace before the inclusion.

namespace trivet {
namespace {

typedef float VecF __attribute__((vector_size(kVectorFloats * 4)));
typedef int32_t VecI __attribute__((vector_size(kVectorFloats * 4)));

inline VecF vec_load(const float* p) {
  VecF v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline void vec_store(float* p, VecF v) { __builtin_memcpy(p, &v, sizeof v); }

inline VecF vec_select(VecI mask, VecF yes, VecF no) { return (VecF)((mask & (VecI)yes) | (~mask & (VecI)no)); }

// e^x with about 1 ulp; x is limited to [-87, 88]; NaN stays NaN.
inline VecF vec_exp(VecF x) {
  const VecF zero = {};
  x = x < zero - 87.0f ? zero - 87.0f : x;
  x = x > zero + 88.0f ? zero + 88.0f : x;
  // Adding 1.5 * 2^23 leaves the nearest integer of x / ln 2 in the low bits.
  const VecF shifted = x * 1.44269504f + 12582912.0f;
  const VecF n = shifted - 12582912.0f;
  VecF r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  VecF p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  const VecI exponent = ((VecI)shifted << 23) + 0x3F800000;
  return p * (VecF)exponent;
}

inline VecF vec_silu(VecF x) { return x / (vec_exp(-x) + 1.0f); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline VecF vec_gelu_tanh(VecF x) {
  const VecF u = (x + x * x * x * 0.044715f) * 0.797884561f;
  return x / (vec_exp(u * -2.0f) + 1.0f);
}

inline VecF vec_tanh(VecF x) {
  const VecI sign = (VecI)x & INT32_MIN;
  const VecF a = (VecF)((VecI)x & INT32_MAX);
  const VecF large = 1.0f - 2.0f / (vec_exp(a + a) + 1.0f);
  const VecF z = a * a;
  VecF p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const VecF small = p * z * a + a;
  const VecF zero = {};
  return (VecF)((VecI)vec_select(a < zero + 0.625f, small, large) | sign);
}

}  // namespace
}  // namespace trivet
