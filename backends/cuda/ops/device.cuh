// What every kernel source shares: launching with programmatic dependence, reductions, error reports.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../device_error.h"
#include "launch.h"

namespace trivet::cuda {

// The next kernel may begin as soon as all blocks have come here: what it fetches keeps the memory busy meanwhile.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Blocks until all work of the kernel before this one on the stream is visible. Before it a kernel may read weights,
// what the step was given and keys of earlier steps, but nothing that a kernel of this step writes. Blocks without work
// may end before it, but never all of them: the end of a kernel implies the end of all before it. Lets the next
// kernel begin.
__device__ __forceinline__ void wait_for_previous() {
  let_next_begin();
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ void report(const ErrorSink& sink, DeviceErrorCode code, int64_t a, int64_t b = 0,
                                       int64_t c = 0, int64_t d = 0, float value = 0.0f) {
  DeviceError* error = sink.error;
  if (atomicCAS(reinterpret_cast<int*>(&error->code), 0, static_cast<int>(code)) != 0) return;
  error->node = sink.node;
  error->a = a;
  error->b = b;
  error->c = c;
  error->d = d;
  error->value = value;
}

// 16 bytes on their way into shared memory, part of the next cp.async group.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

constexpr size_t kUsualSharedBytes = 48 * 1024;  // a kernel may have so many without asking; never set a limit below it

// Every `cluster` neighbouring blocks form a cluster; 1: none do.
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters(const Launch& on, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                            unsigned cluster, Arguments... arguments) {
  if (shared_bytes > kUsualSharedBytes) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = on.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (on.dependent_launch) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(const Launch& on, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   Arguments... arguments) {
  return launch_clusters(on, kernel, grid, block, shared_bytes, 1, arguments...);
}

// Fixed trees: the order of a sum never depends on anything but its length.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

// The sum over the block in every thread; `shared` holds 32 floats. Two barriers.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  const int warps = (blockDim.x + 31) / 32;
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < warps ? shared[threadIdx.x & 31] : 0.0f);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

}  // namespace trivet::cuda
