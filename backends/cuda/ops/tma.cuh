// What kernels of SM 90 need to be fed by the tensor copy engine: tensor maps, barriers in shared memory that count the
// bytes of copies, and clusters, whose blocks reach each other's shared memory.
#pragma once

#include <cuda.h>

#include "device.cuh"

namespace trivet::cuda {

// A map of bfloat16 rows for copies of 64 elements of `box_rows` rows, in the 128-byte swizzle; what lies outside of
// the matrix is read as zeros. `data` and the rows begin at multiples of 16 bytes.
inline cudaError_t make_tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t k, int box_rows) {
  static const auto encode = []() -> decltype(&cuTensorMapEncodeTiled) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorCallRequiresNewerDriver;
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(k) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), extents, row_bytes,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// A barrier whose phase ends when `arrivals` have come and all bytes that were announced are there.
class Barrier {
 public:
  __device__ __forceinline__ void begin(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state_)), "r"(arrivals) : "memory");
  }
  // Arrives, and announces bytes.
  __device__ __forceinline__ void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state_)) : "memory");
  }
  // Until the phase of this parity has ended.
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
  }
  __device__ __forceinline__ uint32_t address() const { return shared_address(&state_); }

 private:
  uint64_t state_;
};

// Barriers that were begun are visible to the copy engine, and after a barrier of the block to its threads.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The box of a map from element k and row `row` into shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap& map, int k, int row, const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(k), "r"(row), "r"(barrier.address())
      : "memory");
}

__device__ __forceinline__ int rank_in_cluster() { return static_cast<int>(__clusterRelativeBlockRank()); }
__device__ __forceinline__ int cluster_size() { return static_cast<int>(__clusterSizeInBlocks()); }
__device__ __forceinline__ void cluster_barrier() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
// The same place in the shared memory of a block of the cluster.
template <class T>
__device__ __forceinline__ const T* of_block(const T* shared, int rank) {
  return static_cast<const T*>(__cluster_map_shared_rank(shared, static_cast<unsigned>(rank)));
}

// Registers of a thread; all warps of a warpgroup give back or ask for as many.
template <int kRegisters>
__device__ __forceinline__ void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void ask_for_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace trivet::cuda
