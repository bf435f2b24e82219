// RMSNorm, AddRMSNorm and RotaryTable. A block per row; a row's sum is a fixed tree over its own elements.
#include "device.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 512;

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int64_t n, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
}

__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const float* x, const float* weight, int64_t n, float eps,
                                                            float* y) {
  __shared__ float shared[32];
  wait_for_previous();
  x += blockIdx.x * n;
  y += blockIdx.x * n;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += x[i] * x[i];
  const float scale = inverse_rms(block_sum(sum, shared), n, eps);
  for (int64_t i = threadIdx.x; i < n; i += kThreads) y[i] = x[i] * scale * weight[i];
}

template <bool kPost>
__global__ void __launch_bounds__(kThreads) add_rms_norm_kernel(const float* x, const float* residual, const float* weight,
                                                                const float* post_weight, int64_t n, float eps, float* y,
                                                                float* residual_out) {
  __shared__ float shared[32];
  wait_for_previous();
  const int64_t at = blockIdx.x * n;
  float post_scale = 1.0f;
  if (kPost) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += x[at + i] * x[at + i];
    post_scale = inverse_rms(block_sum(sum, shared), n, eps);
  }
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float term = kPost ? x[at + i] * post_scale * post_weight[i] : x[at + i];
    const float total = term + residual[at + i];
    residual_out[at + i] = total;  // this thread reads it again below
    sum += total * total;
  }
  const float scale = inverse_rms(block_sum(sum, shared), n, eps);
  for (int64_t i = threadIdx.x; i < n; i += kThreads) y[at + i] = residual_out[at + i] * scale * weight[i];
}

// The angle is float32(position) * inv_freq rounded to float32, as the models are trained; the functions in double.
__global__ void rotary_kernel(ErrorSink sink, const int32_t* positions, int64_t tokens, const float* inv_freq, int64_t half,
                              float scale, float* cos_sin) {
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= tokens * half) return;
  const int64_t token = at / half, i = at % half;
  const int32_t position = positions[token];
  if (position < 0) report(sink, DeviceErrorCode::kNegativePosition, token, position);
  const double angle = static_cast<double>(__fmul_rn(static_cast<float>(position), inv_freq[i]));
  double sine, cosine;
  sincos(angle, &sine, &cosine);
  cos_sin[token * 2 * half + i] = static_cast<float>(cosine) * scale;
  cos_sin[token * 2 * half + half + i] = static_cast<float>(sine) * scale;
}

}  // namespace

cudaError_t rms_norm(const Launch& on, const float* x, const float* weight, int64_t rows, int64_t n, float eps, float* y) {
  if (rows == 0) return cudaSuccess;
  return launch(on, rms_norm_kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, x, weight, n, eps, y);
}

cudaError_t add_rms_norm(const Launch& on, const float* x, const float* residual, const float* weight,
                         const float* post_weight, int64_t rows, int64_t n, float eps, float* y, float* residual_out) {
  if (rows == 0) return cudaSuccess;
  return launch(on, post_weight != nullptr ? add_rms_norm_kernel<true> : add_rms_norm_kernel<false>,
                dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, x, residual, weight, post_weight, n, eps, y,
                residual_out);
}

cudaError_t rotary_table(const Launch& on, ErrorSink sink, const int32_t* positions, int64_t tokens, const float* inv_freq,
                         int64_t half, float scale, float* cos_sin) {
  const int64_t count = tokens * half;
  if (count == 0) return cudaSuccess;
  return launch(on, rotary_kernel, dim3(static_cast<unsigned>((count + 127) / 128)), dim3(128), 0, sink, positions, tokens,
                inv_freq, half, scale, cos_sin);
}

}  // namespace trivet::cuda
