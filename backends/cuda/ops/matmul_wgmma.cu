// Products of many rows on Hopper's warpgroup tensor cores: x and weights in bfloat16, float32 sums. A block makes 128
// columns for up to 256 rows of x; the weights are the left operand, so that few rows waste nothing. A ring of stages
// of 64 of k in shared memory, filled by all threads with asynchronous copies. Where there are too few tiles for all
// multiprocessors, k is split, and sum_kernel adds up the parts in order.
#include "wgmma.cuh"

namespace trivet::cuda {
namespace {

constexpr int kTileColumns = 128, kTileK = 64;
constexpr int kThreads = 256;  // two warpgroups of 64 columns each

struct Arguments {
  const __nv_bfloat16 *x, *weight;
  int64_t padded_k;
  Sums sums;
};

template <int kRows>
inline constexpr int kStages = kRows == 256   ? 4
                               : kRows == 128 ? 6
                                              : 8;
template <int kRows>
inline constexpr int kStageBytes = (kTileColumns + kRows) * kTileK * 2;

// kCount rows of 64 of k from `first`; rows beyond the last are the last one once more.
template <int kCount>
__device__ __forceinline__ void copy_tile(uint8_t* tile, const __nv_bfloat16* matrix, int64_t first, int64_t count,
                                          int64_t padded_k, int64_t k) {
#pragma unroll
  for (int i = 0; i < kCount * 8 / kThreads; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads, row = at / 8, piece = at % 8;
    const int64_t source = min(first + row, count - 1);
    copy_async(tile + swizzled(row, piece), matrix + source * padded_k + k + piece * 8);
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(Arguments a) {
  extern __shared__ uint8_t memory[];
  uint8_t* ring = memory + (1024 - (__cvta_generic_to_shared(memory) & 1023)) % 1024;
  const int warpgroup = threadIdx.x / 128;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * kTileColumns;
  const int all_steps = static_cast<int>(a.padded_k / kTileK);
  const int first_step = static_cast<int>(static_cast<int64_t>(all_steps) * blockIdx.z / a.sums.splits);
  const int steps = static_cast<int>(static_cast<int64_t>(all_steps) * (blockIdx.z + 1) / a.sums.splits) - first_step;
  wait_for_previous();
  const auto fetch = [&](int step) {
    if (step < steps) {
      uint8_t* stage = ring + step % kStages<kRows> * kStageBytes<kRows>;
      const int64_t k = static_cast<int64_t>(first_step + step) * kTileK;
      copy_tile<kTileColumns>(stage, a.weight, first_column, a.sums.columns, a.padded_k, k);
      copy_tile<kRows>(stage + kTileColumns * 128, a.x, first_row, a.sums.rows, a.padded_k, k);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  constexpr int kAhead = kStages<kRows> - 2;  // the stage that is refilled is free once all warps are past a barrier
  for (int s = 0; s < kAhead; ++s) fetch(s);
  float sums[kRows / 2] = {};
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint8_t* stage = ring + step % kStages<kRows> * kStageBytes<kRows>;
    const uint64_t left = tile_descriptor(stage + warpgroup * 64 * 128);
    const uint64_t right = tile_descriptor(stage + kTileColumns * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) wgmma<kRows>(sums, left + 2 * k, right + 2 * k);
    wgmma_commit();
    fetch(step + kAhead);
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  store_sums<kRows>(a.sums, sums, first_row, first_column + warpgroup * 64);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(Sums a) {
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, count = a.rows * a.columns;
  if (at >= count) return;
  float sum = a.parts[at];
  for (int s = 1; s < a.splits; ++s) sum += a.parts[s * count + at];
  a.out.y[at / a.columns * a.out.stride + at % a.columns] = finished(sum, a.out, at % a.columns);
}

template <int kRows>
cudaError_t start(const Launch& on, const Arguments& a) {
  const dim3 grid(static_cast<unsigned>((a.sums.rows + kRows - 1) / kRows),
                  static_cast<unsigned>((a.sums.columns + kTileColumns - 1) / kTileColumns),
                  static_cast<unsigned>(a.sums.splits));
  const size_t bytes = kStages<kRows> * kStageBytes<kRows> + 1024;
  return launch(on, wgmma_kernel<kRows>, grid, dim3(kThreads), bytes, a);
}

}  // namespace

int wgmma_splits(const Launch& on, int64_t rows, int64_t columns, int64_t padded_k) {
  const int64_t tile_rows = rows <= 64 ? 64 : rows <= 128 ? 128 : 256;
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows * ((columns + kTileColumns - 1) / kTileColumns);
  return splits_of(on.num_multiprocessors, tiles, padded_k / kTileK / 8);
}

cudaError_t matmul_wgmma(const Launch& on, const void* x, int64_t rows, int64_t padded_k, const void* weight,
                         int64_t columns, float* parts, const Product& out) {
  const int splits = wgmma_splits(on, rows, columns, padded_k);
  const Arguments a{static_cast<const __nv_bfloat16*>(x),
                    static_cast<const __nv_bfloat16*>(weight),
                    padded_k,
                    {rows, columns, splits, splits > 1 ? parts : nullptr, out}};
  const cudaError_t status = rows <= 64 ? start<64>(on, a) : rows <= 128 ? start<128>(on, a) : start<256>(on, a);
  return status != cudaSuccess || splits == 1 ? status : sum_parts(on, parts, splits, rows, columns, out);
}

cudaError_t sum_parts(const Launch& on, float* parts, int splits, int64_t rows, int64_t columns, const Product& out) {
  return launch(on, sum_kernel, dim3(static_cast<unsigned>((rows * columns + kThreads - 1) / kThreads)), dim3(kThreads),
                0, Sums{rows, columns, splits, parts, out});
}

}  // namespace trivet::cuda
