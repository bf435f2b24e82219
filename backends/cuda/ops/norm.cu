// RMSNorm, AddRMSNorm and RotaryTable. A block per row; a row's sum is a fixed tree over its own elements.
#include "activation.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMostThreads = 1024, kMostQuads = 8;  // of a thread, held in registers
template <int kQuads>
inline constexpr int kThreadsOf = kQuads == kMostQuads ? kMostThreads : kThreads;
constexpr int64_t kFewRows = 16;

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int64_t n, float eps) {
  return __frsqrt_rn(sum_of_squares / static_cast<float>(n) + eps);
}

// Where the block's row of x and residual begins; with a bad index, row 0.
__device__ __forceinline__ int64_t source_of(const NormParams& p) {
  if (p.index == nullptr) return blockIdx.x * p.n;
  const int64_t row = p.index[blockIdx.x];
  return row >= 0 && row < p.x_rows ? row * p.n : 0;
}

// Comes last in a kernel: before, it would take registers of the rows.
__device__ __forceinline__ void check_index(const ErrorSink& sink, const NormParams& p) {
  if (p.index == nullptr || threadIdx.x != 0) return;
  const int64_t row = p.index[blockIdx.x];
  if (row < 0 || row >= p.x_rows) report(sink, DeviceErrorCode::kRowIndex, blockIdx.x, row, p.x_rows);
}

// Any n.
__global__ void __launch_bounds__(kThreads) norm_kernel(ErrorSink sink, NormParams p) {
  __shared__ float shared[32];
  wait_for_previous();
  const int64_t at = blockIdx.x * p.n, from = source_of(p);
  float post_scale = 1.0f;
  if (p.post_weight != nullptr) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.n; i += kThreads) sum += p.x[from + i] * p.x[from + i];
    post_scale = inverse_rms(block_sum(sum, shared), p.n, p.eps);
  }
  const auto value = [&](int64_t i) {
    const float term = p.post_weight != nullptr ? p.x[from + i] * post_scale * p.post_weight[i] : p.x[from + i];
    return p.residual != nullptr ? __fadd_rn(term, p.residual[from + i]) : term;
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
  check_index(sink, p);
}

__device__ __forceinline__ float4 quad(const float* p, int64_t i) { return reinterpret_cast<const float4*>(p)[i]; }

__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 scaled(float4 v, float scale, float4 w) {
  return make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
}

// The sum over the block in every thread, each time in other 32 floats of shared memory. One barrier.
__device__ __forceinline__ float block_sum_once(float x, float* shared) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < blockDim.x / 32 ? shared[threadIdx.x & 31] : 0.0f);
}

// n a multiple of 128, up to 4 * kMostQuads per thread: rows stay in registers. In a step of few rows, where nothing
// but latency counts, a first pass over the weights brings the instructions into the caches before the wait.
template <int kQuads>
__global__ void __launch_bounds__(kThreadsOf<kQuads>) norm_quads_kernel(ErrorSink sink, NormParams p) {
  __shared__ float shared[2][2][32];
  let_next_begin();
  const int64_t at = blockIdx.x * p.n, from = source_of(p);  // the index, too, was given with the step
  const int count = static_cast<int>(p.n / 4), thread = threadIdx.x;
  float4 w[kQuads];
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int i = thread + j * blockDim.x;
    if (i < count) w[j] = quad(p.weight, i);  // weights do not wait for the previous kernel
  }
#pragma unroll 1
  for (int pass = p.rows <= kFewRows ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) wait_for_previous();
    const float* x = pass == 1 ? p.x + from : p.weight;
    const float* residual = p.residual == nullptr ? nullptr : pass == 1 ? p.residual + from : p.weight;
    float4 v[kQuads], r[kQuads];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int i = thread + j * blockDim.x;
      v[j] = r[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i < count) v[j] = quad(x, i);
      if (i < count && residual != nullptr) r[j] = quad(residual, i);
    }
    if (p.post_weight != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kQuads; ++j) sum += squares(v[j]);
      const float scale = inverse_rms(block_sum_once(sum, shared[pass][0]), p.n, p.eps);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        const int i = thread + j * blockDim.x;
        if (i < count) v[j] = scaled(v[j], scale, quad(p.post_weight, i));
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      if (residual != nullptr) {
        v[j] = make_float4(__fadd_rn(v[j].x, r[j].x), __fadd_rn(v[j].y, r[j].y), __fadd_rn(v[j].z, r[j].z),
                           __fadd_rn(v[j].w, r[j].w));
      }
      sum += squares(v[j]);
    }
    const float scale = inverse_rms(block_sum_once(sum, shared[pass][1]), p.n, p.eps);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int i = thread + j * blockDim.x;
      if (i >= count) continue;  // whole warps: n is a multiple of 128
      const float4 y = scaled(v[j], scale, w[j]);
      if (pass == 1 && p.residual_out != nullptr) reinterpret_cast<float4*>(p.residual_out + at)[i] = v[j];
      if (pass == 1) reinterpret_cast<float4*>(p.y + at)[i] = y;
      if (pass == 1 && p.rounded != nullptr) {
        __nv_bfloat162* rounded = static_cast<__nv_bfloat162*>(p.rounded) + at / 2 + 2 * i;
        rounded[0] = __floats2bfloat162_rn(y.x, y.y);
        rounded[1] = __floats2bfloat162_rn(y.z, y.w);
      }
      if (p.quantized.values == nullptr) continue;
      const Quantized8 q = quantize_quad(y);
      if (pass == 1) store_quantized(p.quantized, blockIdx.x, p.n, i, q);
    }
  }
  check_index(sink, p);
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

bool norm_writes_copies(int64_t n) { return n % 128 == 0 && n <= 4 * kMostThreads * kMostQuads; }

cudaError_t rms_norm(const Launch& on, ErrorSink sink, const NormParams& p) {
  if (p.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.rows));
  if (!norm_writes_copies(p.n)) return launch(on, norm_kernel, grid, dim3(kThreads), 0, sink, p);
  const int64_t quads = p.n / 4;
  const int per_thread = quads <= kThreads ? 1 : quads <= 2 * kThreads ? 2 : quads <= 4 * kThreads ? 4 : kMostQuads;
  const dim3 block(static_cast<unsigned>((quads / 32 + per_thread - 1) / per_thread * 32));
  switch (per_thread) {
    case 1:
      return launch(on, norm_quads_kernel<1>, grid, block, 0, sink, p);
    case 2:
      return launch(on, norm_quads_kernel<2>, grid, block, 0, sink, p);
    case 4:
      return launch(on, norm_quads_kernel<4>, grid, block, 0, sink, p);
    default:
      return launch(on, norm_quads_kernel<kMostQuads>, grid, block, 0, sink, p);
  }
}

cudaError_t rotary_table(const Launch& on, ErrorSink sink, const int32_t* positions, int64_t tokens,
                         const float* inv_freq, int64_t half, float scale, float* cos_sin) {
  const int64_t count = tokens * half;
  if (count == 0) return cudaSuccess;
  return launch(on, rotary_kernel, dim3(static_cast<unsigned>((count + 127) / 128)), dim3(128), 0, sink, positions,
                tokens, inv_freq, half, scale, cos_sin);
}

}  // namespace trivet::cuda
