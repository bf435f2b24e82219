// Products of a few rows with block formats: int8 activations, exact integer dots per run of 32 weights, float32 sums. A warp
// makes two columns (with a gate: one column of both weights), a lane takes every 32nd run, then a fixed tree over lanes.
#include "activation.cuh"
#include "formats.cuh"

namespace trivet::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kColumns = 2;  // per warp

struct Arguments {
  QuantizedRows x;
  int64_t rows, k;
  const uint8_t* weight;
  const uint8_t* up;  // null: two neighbouring columns of `weight`
  int64_t columns, row_bytes;
  Epilogue epilogue;
  Product out;
};

template <Format F>
__device__ __forceinline__ float run_product(const Run32& w, const int4& x0, const int4& x1, float scale, float sum,
                                             float acc) {
  int first = __dp4a(w.q[0], x0.x, 0), second = __dp4a(w.q[4], x1.x, 0);
  first = __dp4a(w.q[1], x0.y, first);
  second = __dp4a(w.q[5], x1.y, second);
  first = __dp4a(w.q[2], x0.z, first);
  second = __dp4a(w.q[6], x1.z, second);
  first = __dp4a(w.q[3], x0.w, first);
  second = __dp4a(w.q[7], x1.w, second);
  if (kHasHalves<F>) {
    acc = fmaf(w.scale[0] * scale, static_cast<float>(first), acc);
    acc = fmaf(w.scale[1] * scale, static_cast<float>(second), acc);
  } else {
    acc = fmaf(w.scale[0] * scale, static_cast<float>(first + second), acc);
  }
  if (kHasMinimum<F>) acc = fmaf(w.minimum, sum, acc);
  return acc;
}

template <Format F, int kRows>
__global__ void __launch_bounds__(kWarps * 32) matvec_kernel(Arguments a) {
  const int lane = threadIdx.x & 31;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t column = a.up != nullptr ? unit : unit * kColumns;
  const bool idle = column >= a.columns;
  const int64_t last = a.columns - 1;
  const uint8_t* rows[kColumns];
  rows[0] = a.weight + (idle ? 0 : column) * a.row_bytes;
  rows[1] = a.up != nullptr ? a.up + (idle ? 0 : column) * a.row_bytes
                            : a.weight + (column + 1 < last ? column + 1 : last) * a.row_bytes;
  const int runs = static_cast<int>(a.k / 32);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  wait_for_previous();
  if (idle) return;
  float acc[kColumns][kRows] = {};
#pragma unroll 2
  for (int run = lane; run < runs; run += 32) {
    Run32 w[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) w[c] = BlockReader<F>::read(rows[c], run);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first_row + r < a.rows ? first_row + r : a.rows - 1;
      const int4* values = reinterpret_cast<const int4*>(a.x.values + row * a.k) + run;
      const int4 x0 = values[0], x1 = values[runs];
      const float scale = a.x.scales[row * runs + run];
      const float sum = kHasMinimum<F> ? a.x.sums[row * runs + run] : 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) acc[c][r] = run_product<F>(w[c], x0, x1, scale, sum, acc[c][r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float total[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] = warp_sum(acc[c][r]);
    const int64_t row = first_row + r;
    if (lane != 0 || row >= a.rows) continue;
    float* y = a.out.y + row * a.out.stride;
    if (a.up != nullptr) {
      const float gate = finished(total[0], a.out, column), up = finished(total[1], a.out, a.columns + column);
      y[column] = gated(gate, up, a.epilogue);
    } else {
      y[column] = finished(total[0], a.out, column);
      if (column < last) y[column + 1] = finished(total[1], a.out, column + 1);
    }
  }
}

template <Format F, int kRows>
cudaError_t start(const Launch& on, const Arguments& a) {
  const int64_t units = a.up != nullptr ? a.columns : (a.columns + kColumns - 1) / kColumns;
  const dim3 grid(static_cast<unsigned>((units + kWarps - 1) / kWarps), static_cast<unsigned>((a.rows + kRows - 1) / kRows));
  return launch(on, matvec_kernel<F, kRows>, grid, dim3(kWarps * 32), 0, a);
}

}  // namespace

cudaError_t matvec_int8(const Launch& on, const QuantizedRows& x, int64_t rows, int64_t k, const Weight& weight,
                        const uint8_t* up, Epilogue epilogue, const Product& out) {
  if (rows == 0) return cudaSuccess;
  const Arguments a{x, rows, k, weight.data, up, weight.rows, weight.row_bytes, epilogue, out};
  return with_block_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    if (rows == 1) return start<F, 1>(on, a);
    if (rows == 2) return start<F, 2>(on, a);
    if (rows <= 4) return start<F, 4>(on, a);
    return start<F, 8>(on, a);
  });
}

}  // namespace trivet::cuda
