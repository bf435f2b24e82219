// Gated activations and the soft cap over vector_math.inl; included by each vector tier.

#include "vector_math.inl"

namespace trivet {
namespace {

template <class Activation>
void glu_rows(Activation activation, const float* gate, const float* up, int64_t m, int n, float* y, int64_t y_stride) {
  // Rows of y lie far apart, which no hardware prefetcher follows.
  constexpr int kAhead = 8;
  for (int64_t i = 0; i < m; i++) {
    float* row = y + i * y_stride;
    __builtin_prefetch(row + kAhead * y_stride, 1);
    float rest[kTileRows];
    float* out = n == kTileRows ? row : rest;
    for (int r = 0; r < kTileRows; r += kVectorFloats) {
      vec_store(out + r, activation(vec_load(gate + i * kTileRows + r)) * vec_load(up + i * kTileRows + r));
    }
    if (n < kTileRows) __builtin_memcpy(row, rest, static_cast<size_t>(n) * sizeof(float));
  }
}

void glu(Epilogue epilogue, const float* gate, const float* up, int64_t m, int n, float* y, int64_t y_stride) {
  if (epilogue == Epilogue::kSwiglu) {
    glu_rows([](VecF v) { return vec_silu(v); }, gate, up, m, n, y, y_stride);
  } else {
    glu_rows([](VecF v) { return vec_gelu_tanh(v); }, gate, up, m, n, y, y_stride);
  }
}

void soft_cap(float cap, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + kVectorFloats <= n; i += kVectorFloats) vec_store(y + i, vec_tanh(vec_load(y + i) / cap) * cap);
  if (i < n) {
    float rest[kVectorFloats] = {};
    __builtin_memcpy(rest, y + i, static_cast<size_t>(n - i) * sizeof(float));
    vec_store(rest, vec_tanh(vec_load(rest) / cap) * cap);
    __builtin_memcpy(y + i, rest, static_cast<size_t>(n - i) * sizeof(float));
  }
}

}  // namespace
}  // namespace trivet
