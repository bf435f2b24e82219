// Functions of single values that several kernels share.
#pragma once

#include "device.cuh"

namespace trivet::cuda {

struct Quantized8 {
  int packed;        // four signed bytes
  float scale;       // of the block of 32
  float scaled_sum;  // scale * sum of the block's bytes
};

// Four values of a block of 32 whose other values lie in the seven neighbours of this lane's group of eight.
__device__ __forceinline__ Quantized8 quantize_quad(float4 v) {
  float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  float poison = (v.x - v.x) + (v.y - v.y) + (v.z - v.z) + (v.w - v.w);  // NaN if one is not finite, else 0
#pragma unroll
  for (int offset = 4; offset > 0; offset >>= 1) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    poison += __shfl_xor_sync(~0u, poison, offset);
  }
  const float inverse = __fdiv_rn(127.0f, most);
  const bool usable = most > 0.0f && inverse < __int_as_float(0x7f800000) && poison == 0.0f;
  const float by = usable ? inverse : 0.0f;
  const int a = __float2int_rn(__fmul_rn(v.x, by)), b = __float2int_rn(__fmul_rn(v.y, by));
  const int c = __float2int_rn(__fmul_rn(v.z, by)), d = __float2int_rn(__fmul_rn(v.w, by));
  int sum = a + b + c + d;
#pragma unroll
  for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
  const float scale = usable ? __fdiv_rn(most, 127.0f) : poison;
  return {(a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24, scale, scale * static_cast<float>(sum)};
}

struct QuantizedValue {
  int value;
  float scale, scaled_sum;  // as of Quantized8
};

// One value of a block of 32 whose other values the other lanes have. The same result as quantize_quad's.
__device__ __forceinline__ QuantizedValue quantize_lane(float v) {
  const bool finite = __all_sync(~0u, isfinite(v));
  const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(v))));
  const float inverse = __fdiv_rn(127.0f, most);
  const bool usable = finite && most > 0.0f && inverse < __int_as_float(0x7f800000);
  const int value = usable ? __float2int_rn(__fmul_rn(v, inverse)) : 0;
  const float scale = usable ? __fdiv_rn(most, 127.0f) : finite ? 0.0f : __int_as_float(0x7fffffff);
  return {value, scale, scale * static_cast<float>(__reduce_add_sync(~0u, value))};
}

// The value with index `at` in its row of k.
__device__ __forceinline__ void store_quantized(const QuantizedRows& out, int64_t row, int64_t k, int64_t at,
                                                const QuantizedValue& q) {
  const int64_t blocks = k / 32, block = at / 32;
  out.values[row * k + (at % 32 / 16 * blocks + block) * 16 + at % 16] = static_cast<int8_t>(q.value);
  if (at % 32 == 0) out.scales[row * blocks + block] = make_float2(q.scale, q.scaled_sum);
}

// The quad with index `at` in its row of k.
__device__ __forceinline__ void store_quantized(const QuantizedRows& out, int64_t row, int64_t k, int64_t at,
                                                const Quantized8& q) {
  const int64_t blocks = k / 32, block = at / 8, part = at % 8;
  *reinterpret_cast<int*>(out.values + row * k + (part / 4 * blocks + block) * 16 + part % 4 * 4) = q.packed;
  if (part == 0) out.scales[row * blocks + block] = make_float2(q.scale, q.scaled_sum);
}

__device__ __forceinline__ float gated(float gate, float up, Epilogue epilogue) {
  if (epilogue == Epilogue::kSwiglu) return gate / (1.0f + expf(-gate)) * up;
  // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2 u)), which cancels nothing where tanh is near -1
  const float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + expf(-2.0f * u)) * up;
}

__device__ __forceinline__ float finished(float x, const Product& out, int64_t column) {
  if (out.bias != nullptr) x += out.bias[column];
  if (out.soft_cap > 0.0f) x = out.soft_cap * tanhf(x / out.soft_cap);
  return x;
}

}  // namespace trivet::cuda
