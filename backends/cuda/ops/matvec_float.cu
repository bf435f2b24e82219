// Products with float32 activations: weights are dequantised to float32 in registers. A warp makes one column, a lane
// takes every 32nd run of its weights, then a fixed tree over lanes, so a row's bits depend on that row alone.
#include "activation.cuh"
#include "formats.cuh"

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
__device__ __forceinline__ void row_pointers(const ErrorSink& sink, const Rows& rows, int64_t first,
                                             const float* (&x)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r < rows.count ? first + r : rows.count - 1;
    int64_t source = row;
    if (rows.index != nullptr) {
      source = rows.index[row];
      if (source < 0 || source >= rows.x_rows) {
        if (threadIdx.x == 0) report(sink, DeviceErrorCode::kLogitsIndex, row, source, rows.x_rows);
        source = 0;
      }
    }
    x[r] = rows.x + source * rows.k;
  }
}

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
__global__ void __launch_bounds__(kWarps * 32) block_kernel(ErrorSink sink, Arguments a) {
  const int lane = threadIdx.x & 31;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  wait_for_previous();
  if (column >= a.columns) return;
  const float* x[kRows];
  row_pointers(sink, a.rows, first, x);
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

// Element formats. kWide: rows are whole 16-byte words of kWide weights each; else one weight at a time.
template <class T, int kRows, int kWide>
__global__ void __launch_bounds__(kWarps * 32) element_kernel(ErrorSink sink, Arguments a) {
  const int lane = threadIdx.x & 31;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  wait_for_previous();
  if (column >= a.columns) return;
  const float* x[kRows];
  row_pointers(sink, a.rows, first, x);
  const T* weight = reinterpret_cast<const T*>(a.weight + column * a.row_bytes);
  float acc[kRows] = {};
#pragma unroll 4
  for (int64_t i = lane * kWide; i < a.rows.k; i += 32 * kWide) {
    if constexpr (kWide == 1) {
      const float w = to_float(weight[i]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) acc[r] = fmaf(w, x[r][i], acc[r]);
    } else {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(weight + i));
      const T* w = reinterpret_cast<const T*>(&raw);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kWide; j += 4) {
          const float4 v = *reinterpret_cast<const float4*>(x[r] + i + j);
          acc[r] = fmaf(to_float(w[j]), v.x, acc[r]);
          acc[r] = fmaf(to_float(w[j + 1]), v.y, acc[r]);
          acc[r] = fmaf(to_float(w[j + 2]), v.z, acc[r]);
          acc[r] = fmaf(to_float(w[j + 3]), v.w, acc[r]);
        }
      }
    }
  }
  store(a, first, column, acc);
}

dim3 grid_of(const Arguments& a, int rows) {
  return dim3(static_cast<unsigned>((a.columns + kWarps - 1) / kWarps),
              static_cast<unsigned>((a.rows.count + rows - 1) / rows));
}

template <class T>
cudaError_t start_elements(const Launch& on, const ErrorSink& sink, const Arguments& a) {
  constexpr int kWide = 16 / sizeof(T);
  const dim3 block(kWarps * 32);
  const bool wide = a.rows.k % kWide == 0 && reinterpret_cast<uintptr_t>(a.weight) % 16 == 0;
  if (a.rows.count == 1) {
    return launch(on, wide ? element_kernel<T, 1, kWide> : element_kernel<T, 1, 1>, grid_of(a, 1), block, 0, sink, a);
  }
  if (a.rows.count <= 2) {
    return launch(on, wide ? element_kernel<T, 2, kWide> : element_kernel<T, 2, 1>, grid_of(a, 2), block, 0, sink, a);
  }
  if (a.rows.count <= 4) {
    return launch(on, wide ? element_kernel<T, 4, kWide> : element_kernel<T, 4, 1>, grid_of(a, 4), block, 0, sink, a);
  }
  return launch(on, wide ? element_kernel<T, 8, kWide> : element_kernel<T, 8, 1>, grid_of(a, 8), block, 0, sink, a);
}

}  // namespace

cudaError_t matvec_float(const Launch& on, ErrorSink sink, const Rows& rows, const Weight& weight, const Product& out) {
  if (rows.count == 0) return cudaSuccess;
  const Arguments a{rows, weight.data, weight.rows, weight.row_bytes, out};
  switch (weight.format) {
    case Format::kF32:
      return start_elements<float>(on, sink, a);
    case Format::kF16:
      return start_elements<__half>(on, sink, a);
    case Format::kBF16:
      return start_elements<__nv_bfloat16>(on, sink, a);
    default:
      break;
  }
  return with_block_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    const dim3 block(kWarps * 32);
    if (rows.count == 1) return launch(on, block_kernel<F, 1>, grid_of(a, 1), block, 0, sink, a);
    return launch(on, block_kernel<F, 8>, grid_of(a, 8), block, 0, sink, a);
  });
}

}  // namespace trivet::cuda
