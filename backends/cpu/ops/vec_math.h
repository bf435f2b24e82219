// Functions on whole vectors and rows, built from the Vec of the tier that includes this (after its vec_*.h).
#pragma once

namespace {

// e^x for x <= 88, relative error below 1e-7; exactly 0 below -87 and for -infinity; NaN stays NaN. Products and sums
// are rounded separately, so every tier gives the same bits.
inline Vec exp_of(Vec x) {
  const Vec bias = Vec::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec biased = add(mul(x, Vec::set(1.44269504f)), bias);
  const Vec n = sub(biased, bias);
  Vec r = sub(x, mul(n, Vec::set(0.693359375f)));  // ln 2 in two parts; the first product is exact
  r = sub(r, mul(n, Vec::set(-2.12194440e-4f)));
  Vec p = Vec::set(0x1.6a23cep-10f);  // minimax fit of (e^r - 1 - r) / r^2 on [-ln2/2, ln2/2]
  p = add(mul(p, r), Vec::set(0x1.123a2p-7f));
  p = add(mul(p, r), Vec::set(0x1.5558f2p-5f));
  p = add(mul(p, r), Vec::set(0x1.555492p-3f));
  p = add(mul(p, r), Vec::set(0x1.fffffcp-2f));
  p = add(add(mul(p, mul(r, r)), r), Vec::set(1.0f));
  return zero_where_less(x, Vec::set(-87.0f), mul(p, exp2_of_biased(biased)));
}

// The same with products and sums fused where the instruction set has it: faster, and tiers differ in the last bits.
// Exactly 1 at 0.
inline Vec fused_exp_of(Vec x) {
  const Vec bias = Vec::set(12582912.0f);
  const Vec biased = mul_add(x, Vec::set(1.44269504f), bias);
  const Vec n = sub(biased, bias);
  Vec r = mul_add(n, Vec::set(-0.693359375f), x);
  r = mul_add(n, Vec::set(2.12194440e-4f), r);
  Vec p = Vec::set(0x1.6a23cep-10f);
  p = mul_add(p, r, Vec::set(0x1.123a2p-7f));
  p = mul_add(p, r, Vec::set(0x1.5558f2p-5f));
  p = mul_add(p, r, Vec::set(0x1.555492p-3f));
  p = mul_add(p, r, Vec::set(0x1.fffffcp-2f));
  p = mul_add(mul_add(p, r, Vec::set(1.0f)), r, Vec::set(1.0f));
  return zero_where_less(x, Vec::set(-87.0f), mul(p, exp2_of_biased(biased)));
}

inline float exp_of(float x) {
  float lanes[Vec::kWidth];
  exp_of(Vec::set(x)).store(lanes);
  return lanes[0];
}

// tanh x to an absolute error of 1e-7.
inline Vec tanh_of(Vec x) {
  const Vec bounded = max(Vec::set(-10.0f), min(Vec::set(10.0f), x));  // NaN passes: min and max return their second
  const Vec e = exp_of(add(bounded, bounded));
  return sub(Vec::set(1.0f), div(Vec::set(2.0f), add(e, Vec::set(1.0f))));
}

// The first min(count, kWidth) elements of p, the other lanes 0.
template <class T>
inline Vec load_first(const T* p, int64_t count) {
  if (count >= Vec::kWidth) return Vec::load(p);
  float lanes[Vec::kWidth] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(p[i]);
  return Vec::load(lanes);
}

// Sixteen partial sums over i mod 16, added by halves: the same bits in every tier.
inline float sum_of_squares(const float* x, int64_t n) {
  constexpr int kVecs = 16 / Vec::kWidth;
  Vec sums[kVecs];
  for (Vec& s : sums) s = Vec::set(0.0f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < kVecs; ++j) {
      const Vec v = Vec::load(x + i + j * Vec::kWidth);
      sums[j] = add(sums[j], mul(v, v));
    }
  }
  for (int j = 0; i + j * Vec::kWidth < n; ++j) {
    const Vec v = load_first(x + i + j * Vec::kWidth, n - i - j * Vec::kWidth);
    sums[j] = add(sums[j], mul(v, v));
  }
  for (int half = kVecs / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] = add(sums[j], sums[j + half]);
  }
  return reduce_add(sums[0]);
}

// y = x * (1 / sqrt(mean(x^2) + eps)) * weight over n elements; y may be x.
inline void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* y) {
  const float inverse = 1.0f / sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  const Vec scale = Vec::set(inverse);
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
    mul(mul(Vec::load(x + i), scale), Vec::load(weight + i)).store(y + i);
  }
  for (; i < n; ++i) y[i] = x[i] * inverse * weight[i];
}

}  // namespace
