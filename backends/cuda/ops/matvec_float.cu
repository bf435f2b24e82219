// Products with float32 activations: weights are dequantised to float32 in registers. A warp makes one column, or two
// of a format of single elements, which begin to come before the previous kernel has ended; a lane takes every 32nd run
// of the weights of a column, then a fixed tree over lanes, so a row's bits depend on that row alone.
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

// --- Element formats ----------------------------------------------------------------------------------------------

struct Segment {
  const uint8_t* weight;
  int64_t columns, first_column;  // of y and of the bias
  int64_t first_pair;
};

// Pairs are of neighbouring columns of a segment, or, with a gate, of the same column of both weights.
struct PairArguments {
  Rows rows;
  Segment segments[kMaxSegments];
  int num_segments;
  int64_t pairs, row_bytes;
  const uint8_t* up;  // null, or the second weight of a gated pair whose first is the only segment
  Epilogue epilogue;
  Product out;
};

// Chunks of a row that a lane has on their way, of 16 bytes per lane.
template <int kRows>
inline constexpr int kAhead = kRows == 1 ? 4 : 2;

template <int kRows>
__device__ __forceinline__ void store_pair(const PairArguments& a, const Segment& segment, int64_t column,
                                           int64_t first, const float (&acc)[2][kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float even = warp_sum(acc[0][r]), odd = warp_sum(acc[1][r]);
    if ((threadIdx.x & 31) != 0 || first + r >= a.rows.count) continue;
    float* y = a.out.y + (first + r) * a.out.stride;
    const int64_t at = segment.first_column + column;
    if (a.up != nullptr) {
      y[at] = gated(finished(even, a.out, at), finished(odd, a.out, segment.columns + at), a.epilogue);
      continue;
    }
    y[at] = finished(even, a.out, at);
    if (column + 1 < segment.columns) y[at + 1] = finished(odd, a.out, at + 1);
  }
}

// kWide: rows are whole 16-byte words of kWide weights each; else one weight at a time.
template <class T, int kRows, int kWide>
__global__ void __launch_bounds__(kWarps * 32) element_kernel(ErrorSink sink, PairArguments a) {
  const int lane = threadIdx.x & 31;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  const bool inside = pair < a.pairs;
  int index = 0;
  while (index + 1 < a.num_segments && pair >= a.segments[index + 1].first_pair) ++index;
  const Segment& segment = a.segments[index];
  const int64_t column = (pair - segment.first_pair) * (a.up != nullptr ? 1 : 2);
  const T* weight[2];
  weight[0] = reinterpret_cast<const T*>(segment.weight + column * a.row_bytes);
  weight[1] = weight[0];
  if (a.up != nullptr) {
    weight[1] = reinterpret_cast<const T*>(a.up + column * a.row_bytes);
  } else if (column + 1 < segment.columns) {
    weight[1] = reinterpret_cast<const T*>(segment.weight + (column + 1) * a.row_bytes);
  }
  float acc[2][kRows] = {};
  if constexpr (kWide == 1) {
    wait_for_previous();
    if (!inside) return;
    const float* x[kRows];
    row_pointers(sink, a.rows, first, x);
#pragma unroll 4
    for (int64_t i = lane; i < a.rows.k; i += 32) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float w = to_float(weight[c][i]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) acc[c][r] = fmaf(w, x[r][i], acc[c][r]);
      }
    }
  } else {
    uint4 raw[kAhead<kRows>][2];
    const int k = inside ? static_cast<int>(a.rows.k) : 0;
    const auto fetch = [&](uint4(&into)[2], int i) {
      if (i >= k) return;
#pragma unroll
      for (int c = 0; c < 2; ++c) into[c] = __ldg(reinterpret_cast<const uint4*>(weight[c] + i));
    };
    int at = lane * kWide;
#pragma unroll
    for (int s = 0; s < kAhead<kRows>; ++s) fetch(raw[s], at + s * 32 * kWide);
    wait_for_previous();
    if (!inside) return;
    const float* x[kRows];
    row_pointers(sink, a.rows, first, x);
    for (; at < k; at += kAhead<kRows> * 32 * kWide) {
#pragma unroll
      for (int s = 0; s < kAhead<kRows>; ++s) {
        const int i = at + s * 32 * kWide;
        if (i >= k) break;
        const T* w[2] = {reinterpret_cast<const T*>(&raw[s][0]), reinterpret_cast<const T*>(&raw[s][1])};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < kWide; j += 4) {
            const float4 v = *reinterpret_cast<const float4*>(x[r] + i + j);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              acc[c][r] = fmaf(to_float(w[c][j]), v.x, acc[c][r]);
              acc[c][r] = fmaf(to_float(w[c][j + 1]), v.y, acc[c][r]);
              acc[c][r] = fmaf(to_float(w[c][j + 2]), v.z, acc[c][r]);
              acc[c][r] = fmaf(to_float(w[c][j + 3]), v.w, acc[c][r]);
            }
          }
        }
        fetch(raw[s], i + kAhead<kRows> * 32 * kWide);
      }
    }
  }
  store_pair(a, segment, column, first, acc);
}

template <class T, int kRows>
cudaError_t start_pairs(const Launch& on, const ErrorSink& sink, const PairArguments& a) {
  constexpr int kWide = 16 / sizeof(T);
  bool wide = a.rows.k % kWide == 0 && reinterpret_cast<uintptr_t>(a.up) % 16 == 0;
  for (int s = 0; s < a.num_segments; ++s) wide = wide && reinterpret_cast<uintptr_t>(a.segments[s].weight) % 16 == 0;
  const dim3 grid(static_cast<unsigned>((a.pairs + kWarps - 1) / kWarps),
                  static_cast<unsigned>((a.rows.count + kRows - 1) / kRows));
  return launch(on, wide ? element_kernel<T, kRows, kWide> : element_kernel<T, kRows, 1>, grid, dim3(kWarps * 32), 0,
                sink, a);
}

template <class T>
cudaError_t start_elements(const Launch& on, const ErrorSink& sink, const Rows& rows, const Weight* weights, int count,
                           const Gate& gate, const Product& out) {
  PairArguments a{};
  a.rows = rows;
  a.num_segments = count;
  a.row_bytes = weights[0].row_bytes;
  a.up = gate.up;
  a.epilogue = gate.epilogue;
  a.out = out;
  int64_t first_column = 0;
  for (int s = 0; s < count; ++s) {
    a.segments[s] = {weights[s].data, weights[s].rows, first_column, a.pairs};
    first_column += weights[s].rows;
    a.pairs += gate.up != nullptr ? weights[s].rows : (weights[s].rows + 1) / 2;
  }
  if (rows.count == 1) return start_pairs<T, 1>(on, sink, a);
  if (rows.count == 2) return start_pairs<T, 2>(on, sink, a);
  if (rows.count <= 4) return start_pairs<T, 4>(on, sink, a);
  return start_pairs<T, 8>(on, sink, a);
}

}  // namespace

cudaError_t matvec_float(const Launch& on, ErrorSink sink, const Rows& rows, const Weight& weight, const Product& out) {
  if (rows.count == 0) return cudaSuccess;
  const Arguments a{rows, weight.data, weight.rows, weight.row_bytes, out};
  return with_block_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    const int few = rows.count == 1 ? 1 : 8;
    const dim3 grid(static_cast<unsigned>((a.columns + kWarps - 1) / kWarps),
                    static_cast<unsigned>((rows.count + few - 1) / few));
    return launch(on, few == 1 ? block_kernel<F, 1> : block_kernel<F, 8>, grid, dim3(kWarps * 32), 0, sink, a);
  });
}

cudaError_t matvec_elements(const Launch& on, ErrorSink sink, const Rows& rows, const Weight* weights, int count,
                            const Gate& gate, const Product& out) {
  if (rows.count == 0) return cudaSuccess;
  switch (weights[0].format) {
    case Format::kF32:
      return start_elements<float>(on, sink, rows, weights, count, gate, out);
    case Format::kF16:
      return start_elements<__half>(on, sink, rows, weights, count, gate, out);
    case Format::kBF16:
      return start_elements<__nv_bfloat16>(on, sink, rows, weights, count, gate, out);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace trivet::cuda
