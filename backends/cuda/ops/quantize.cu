// Activations for the products: int8 per 32 values, or bfloat16; and the gates of products that are not fused.
#include "activation.cuh"

namespace trivet::cuda {
namespace {

// d = max|x| / 127, round half to even; eight threads to a block of 32. A value that is not finite makes its block NaN.
__global__ void quantize_kernel(Rows rows, QuantizedRows out) {
  wait_for_previous();
  const int64_t row = blockIdx.y, blocks = rows.k / 32;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool inside = at < blocks * 8;
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (inside) v = reinterpret_cast<const float4*>(rows.x + row * rows.k)[at];
  const Quantized8 q = quantize_quad(v);
  if (inside) store_quantized(out, row, rows.k, at, q);
}

__global__ void round_kernel(Rows rows, int64_t padded_k, __nv_bfloat16* out) {
  wait_for_previous();
  const int64_t row = blockIdx.y, at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (at >= padded_k) return;
  const float* x = rows.x + row * rows.k + at;
  float values[8] = {};
  if (rows.k % 4 == 0 && at + 8 <= rows.k) {
    *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(x);
    *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(x + 4);
  } else {
    for (int i = 0; i < 8; ++i) values[i] = at + i < rows.k ? x[i] : 0.0f;
  }
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  *reinterpret_cast<uint4*>(out + row * padded_k + at) = *reinterpret_cast<const uint4*>(pairs);
}

__global__ void gate_kernel(const float* xy, int64_t rows, int64_t n, Epilogue epilogue, float* y,
                            __nv_bfloat16* rounded) {
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= rows * n) return;
  const int64_t row = at / n, column = at % n;
  const float value = gated(xy[row * 2 * n + column], xy[row * 2 * n + n + column], epilogue);
  y[at] = value;
  if (rounded != nullptr) rounded[at] = __float2bfloat16_rn(value);
}

}  // namespace

cudaError_t quantize_rows(const Launch& on, const Rows& rows, const QuantizedRows& out) {
  if (rows.count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((rows.k / 4 + 127) / 128), static_cast<unsigned>(rows.count));
  return launch(on, quantize_kernel, grid, dim3(128), 0, rows, out);
}

cudaError_t round_rows(const Launch& on, const Rows& rows, int64_t padded_k, void* bfloat16_out) {
  if (rows.count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((padded_k / 8 + 127) / 128), static_cast<unsigned>(rows.count));
  return launch(on, round_kernel, grid, dim3(128), 0, rows, padded_k, static_cast<__nv_bfloat16*>(bfloat16_out));
}

cudaError_t gate_rows(const Launch& on, const float* xy, int64_t rows, int64_t n, Epilogue epilogue, float* y,
                      void* rounded) {
  if (rows * n == 0) return cudaSuccess;
  return launch(on, gate_kernel, dim3(static_cast<unsigned>((rows * n + 255) / 256)), dim3(256), 0, xy, rows, n,
                epilogue, y, static_cast<__nv_bfloat16*>(rounded));
}

}  // namespace trivet::cuda
