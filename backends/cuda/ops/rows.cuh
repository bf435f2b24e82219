// Rows of x as kernels of float32 activations find them.
#pragma once

#include "device.cuh"

namespace trivet::cuda {

// Where row `row` of the product lies in x; a bad index of a block is reported by its first thread and read as row 0.
__device__ __forceinline__ const float* row_pointer(const ErrorSink& sink, const Rows& rows, int64_t row) {
  int64_t source = row;
  if (rows.index != nullptr) {
    source = rows.index[row];
    if (source < 0 || source >= rows.x_rows) {
      if (threadIdx.x == 0) report(sink, DeviceErrorCode::kLogitsIndex, row, source, rows.x_rows);
      source = 0;
    }
  }
  return rows.x + source * rows.k;
}

// Of rows `first` on; the last one again beyond the end.
template <int kRows>
__device__ __forceinline__ void row_pointers(const ErrorSink& sink, const Rows& rows, int64_t first,
                                             const float* (&x)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = row_pointer(sink, rows, min(first + r, rows.count - 1));
}

}  // namespace trivet::cuda
