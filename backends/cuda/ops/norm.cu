// RMSNorm, AddRMSNorm and RotaryTable. A block per row; a row's sum is a fixed tree over its own elements.
#include "activation.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMostQuads = 8;  // of a thread, held in registers

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int64_t n, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
}

// Any n.
__global__ void __launch_bounds__(kThreads) norm_kernel(NormParams p) {
  __shared__ float shared[32];
  wait_for_previous();
  const int64_t at = blockIdx.x * p.n;
  float post_scale = 1.0f;
  if (p.post_weight != nullptr) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.n; i += kThreads) sum += p.x[at + i] * p.x[at + i];
    post_scale = inverse_rms(block_sum(sum, shared), p.n, p.eps);
  }
  const auto value = [&](int64_t i) {
    const float term = p.post_weight != nullptr ? p.x[at + i] * post_scale * p.post_weight[i] : p.x[at + i];
    return p.residual != nullptr ? __fadd_rn(term, p.residual[at + i]) : term;
  };
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) {
    const float x = value(i);
    sum += x * x;
  }
  const float scale = inverse_rms(block_sum(sum, shared), p.n, p.eps);
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) {
    const float x = value(i);
    if (p.residual_out != nullptr) p.residual_out[at + i] = x;
    p.y[at + i] = x * scale * p.weight[i];
  }
}

__device__ __forceinline__ float4 quad(const float* p, int64_t i) { return reinterpret_cast<const float4*>(p)[i]; }

__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 scaled(float4 v, float scale, float4 w) {
  return make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
}

// n a multiple of 128, up to 4 * kMostQuads per thread: rows stay in registers.
template <int kQuads>
__global__ void __launch_bounds__(1024) norm_quads_kernel(NormParams p) {
  __shared__ float shared[32];
  const int64_t at = blockIdx.x * p.n / 4;
  const int count = static_cast<int>(p.n / 4), thread = threadIdx.x;
  float4 v[kQuads], w[kQuads];
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int i = thread + j * blockDim.x;
    if (i < count) w[j] = quad(p.weight, i);  // weights do not wait for the previous kernel
  }
  wait_for_previous();
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int i = thread + j * blockDim.x;
    v[j] = i < count ? quad(p.x, at + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (p.post_weight != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) sum += squares(v[j]);
    const float scale = inverse_rms(block_sum(sum, shared), p.n, p.eps);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int i = thread + j * blockDim.x;
      if (i < count) v[j] = scaled(v[j], scale, quad(p.post_weight, i));
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int i = thread + j * blockDim.x;
    if (i < count && p.residual != nullptr) {
      const float4 r = quad(p.residual, at + i);
      v[j] =
          make_float4(__fadd_rn(v[j].x, r.x), __fadd_rn(v[j].y, r.y), __fadd_rn(v[j].z, r.z), __fadd_rn(v[j].w, r.w));
    }
    sum += squares(v[j]);
  }
  const float scale = inverse_rms(block_sum(sum, shared), p.n, p.eps);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int i = thread + j * blockDim.x;
    if (i >= count) continue;  // whole warps: n is a multiple of 128
    if (p.residual_out != nullptr) reinterpret_cast<float4*>(p.residual_out)[at + i] = v[j];
    const float4 y = scaled(v[j], scale, w[j]);
    reinterpret_cast<float4*>(p.y)[at + i] = y;
    if (p.quantized.values != nullptr) store_quantized(p.quantized, blockIdx.x, p.n, i, quantize_quad(y));
  }
}

// The angle is float32(position) * inv_freq rounded to float32, as the models are trained; the functions in double.
__global__ void rotary_kernel(ErrorSink sink, const int32_t* positions, int64_t tokens, const float* inv_freq,
                              int64_t half, float scale, float* cos_sin) {
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

bool norm_quantizes(int64_t n) { return n % 128 == 0 && n <= 4 * 1024 * kMostQuads; }

cudaError_t rms_norm(const Launch& on, const NormParams& p) {
  if (p.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.rows));
  if (!norm_quantizes(p.n)) return launch(on, norm_kernel, grid, dim3(kThreads), 0, p);
  const int64_t quads = p.n / 4;
  const dim3 block(static_cast<unsigned>(quads < 1024 ? quads : 1024));
  if (quads <= 1024) return launch(on, norm_quads_kernel<1>, grid, block, 0, p);
  if (quads <= 2048) return launch(on, norm_quads_kernel<2>, grid, block, 0, p);
  if (quads <= 4096) return launch(on, norm_quads_kernel<4>, grid, block, 0, p);
  return launch(on, norm_quads_kernel<kMostQuads>, grid, block, 0, p);
}

cudaError_t rotary_table(const Launch& on, ErrorSink sink, const int32_t* positions, int64_t tokens,
                         const float* inv_freq, int64_t half, float scale, float* cos_sin) {
  const int64_t count = tokens * half;
  if (count == 0) return cudaSuccess;
  return launch(on, rotary_kernel, dim3(static_cast<unsigned>((count + 127) / 128)), dim3(128), 0, sink, positions,
                tokens, inv_freq, half, scale, cos_sin);
}

}  // namespace trivet::cuda
