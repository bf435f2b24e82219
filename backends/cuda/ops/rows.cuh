// Rows of x as kernels of float32 activations find them.
#pragma once

#include "device.cuh"

namespace trivet::cuda {

// Of rows `first` on; the last one again beyond the end.
template <int kRows>
__device__ __forceinline__ void row_pointers(const Rows& rows, int64_t first, const float* (&x)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = rows.x + min(first + r, rows.count - 1) * rows.k;
}

}  // namespace trivet::cuda
