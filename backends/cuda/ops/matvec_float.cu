// Products of block formats with float32 activations: weights are dequantised to float32 in registers. A warp makes one
// column; a lane takes every 32nd run of its weights, then a fixed tree over lanes, so a row's bits depend on that row
// alone.
#include "activation.cuh"
#include "formats.cuh"
#include "rows.cuh"

namespace trivet::cuda {
namespace {

constexpr int kWarps = 4;

struct Arguments {
  Rows rows;
  const uint8_t* weight;
  int64_t columns, row_bytes;
  Product out;
};

template <int kRows>
__device__ __forceinline__ void store(const Arguments& a, int64_t first, int64_t column, float (&acc)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float total = warp_sum(acc[r]);
    if ((threadIdx.x & 31) == 0 && first + r < a.rows.count) {
      a.out.y[(first + r) * a.out.stride + column] = finished(total, a.out, column);
    }
  }
}

template <Format F, int kRows>
__global__ void __launch_bounds__(kWarps * 32) block_kernel(Arguments a) {
  const int lane = threadIdx.x & 31;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  wait_for_previous();
  if (column >= a.columns) return;
  const float* x[kRows];
  row_pointers(a.rows, first, x);
  const uint8_t* weight = a.weight + column * a.row_bytes;
  const int runs = static_cast<int>(a.rows.k / 32);
  float acc[kRows] = {};
  for (int run = lane; run < runs; run += 32) {
    float w[32];
    read_floats<F>(weight, run, a.rows.k, w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4* values = reinterpret_cast<const float4*>(x[r] + run * 32);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 v = values[i];
        acc[r] = fmaf(w[4 * i], v.x, acc[r]);
        acc[r] = fmaf(w[4 * i + 1], v.y, acc[r]);
        acc[r] = fmaf(w[4 * i + 2], v.z, acc[r]);
        acc[r] = fmaf(w[4 * i + 3], v.w, acc[r]);
      }
    }
  }
  store(a, first, column, acc);
}

}  // namespace

cudaError_t matvec_float(const Launch& on, const Rows& rows, const Weight& weight, const Product& out) {
  if (rows.count == 0) return cudaSuccess;
  const Arguments a{rows, weight.data, weight.rows, weight.row_bytes, out};
  return with_block_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    const int few = rows.count == 1 ? 1 : 8;
    const dim3 grid(static_cast<unsigned>((a.columns + kWarps - 1) / kWarps),
                    static_cast<unsigned>((rows.count + few - 1) / few));
    return launch(on, few == 1 ? block_kernel<F, 1> : block_kernel<F, 8>, grid, dim3(kWarps * 32), 0, a);
  });
}

}  // namespace trivet::cuda
