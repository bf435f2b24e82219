// Products of float32 activations with weights of single elements.
#include "matvec.cuh"
#include "rows.cuh"

namespace trivet::cuda {
namespace {

// A lane takes 16 bytes of every 512 of a slice.
template <class T>
struct Elements {
  using Input = Rows;
  static constexpr int kEach = 16 / sizeof(T), kSliceWeights = 1024, kSliceBytes = kSliceWeights * sizeof(T);
  static constexpr int kPieces = kSliceBytes / 512, kStages = 4, kMostThreads = kMaxWarps * 32;
  static constexpr bool kAligned = true;

  struct X {
    float values[kPieces][kEach];
  };

  struct Place {
    int lane, first, k;  // `first` element of the lane
    __device__ __forceinline__ Place(int lane, int slice, int k)
        : lane(lane), first(slice * kSliceWeights + lane * kEach), k(k) {}
    __device__ __forceinline__ bool has(int piece) const { return first + piece * 32 * kEach < k; }

    __device__ __forceinline__ X x(const Rows& rows, int64_t row) const {
      const float* from = rows.x + row * rows.k + first;
      X result;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
#pragma unroll
        for (int i = 0; i < kEach; i += 4) {
          float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (has(p)) v = *reinterpret_cast<const float4*>(from + p * 32 * kEach + i);
          result.values[p][i] = v.x;
          result.values[p][i + 1] = v.y;
          result.values[p][i + 2] = v.z;
          result.values[p][i + 3] = v.w;
        }
      }
      return result;
    }
  };

  struct Weights {
    uint4 raw[kPieces];
    __device__ __forceinline__ Weights(const SharedBytes& slice, const Place& place) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        raw[p] = place.has(p) ? slice.vector(place.lane * 16 + p * 512) : make_uint4(0, 0, 0, 0);
      }
    }

    __device__ __forceinline__ float times(const X& x, float sum) const {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const T* w = reinterpret_cast<const T*>(&raw[p]);
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum = fmaf(to_float(w[i]), x.values[p][i], sum);
      }
      return sum;
    }
  };
};

// --- Any k, any alignment -----------------------------------------------------------------------------------------

// A warp makes a pair: neighbouring columns of a segment, or, with a gate, the same column of both weights.
using Arguments = MatvecArguments<Rows>;
constexpr int kWarps = 4;

// Chunks of a row that a lane has on their way, of 16 bytes per lane.
template <int kRows>
inline constexpr int kAhead = kRows == 1 ? 4 : 2;

template <int kRows>
__device__ __forceinline__ void store_pair(const Arguments& a, const Segment& segment, int64_t column, int64_t first,
                                           const float (&acc)[2][kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float even = warp_sum(acc[0][r]), odd = warp_sum(acc[1][r]);
    if ((threadIdx.x & 31) != 0 || first + r >= a.rows) continue;
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
__global__ void __launch_bounds__(kWarps * 32) pair_kernel(Arguments a, int64_t pairs) {
  const int lane = threadIdx.x & 31;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  const bool inside = pair < pairs;
  const Segment& segment = segment_of(a, pair);
  const int64_t column = (pair - segment.first_part) * (a.up != nullptr ? 1 : 2);
  const int64_t row_bytes = a.row_bytes;
  const T* weight[2];
  weight[0] = reinterpret_cast<const T*>(segment.weight + column * row_bytes);
  weight[1] = weight[0];
  if (a.up != nullptr) {
    weight[1] = reinterpret_cast<const T*>(a.up + column * row_bytes);
  } else if (column + 1 < segment.columns) {
    weight[1] = reinterpret_cast<const T*>(segment.weight + (column + 1) * row_bytes);
  }
  float acc[2][kRows] = {};
  if constexpr (kWide == 1) {
    wait_for_previous();
    if (!inside) return;
    const float* x[kRows];
    row_pointers(a.x, first, x);
#pragma unroll 4
    for (int i = lane; i < a.k; i += 32) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float w = to_float(weight[c][i]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) acc[c][r] = fmaf(w, x[r][i], acc[c][r]);
      }
    }
  } else {
    uint4 raw[kAhead<kRows>][2];
    const int k = inside ? a.k : 0;
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
    row_pointers(a.x, first, x);
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
cudaError_t start_pairs(const Launch& on, Arguments a, bool wide) {
  int64_t pairs = 0;
  for (int s = 0; s < a.num_segments; ++s) {
    a.segments[s].first_part = pairs;
    pairs += a.up != nullptr ? a.segments[s].columns : (a.segments[s].columns + 1) / 2;
  }
  const dim3 grid(static_cast<unsigned>((pairs + kWarps - 1) / kWarps),
                  static_cast<unsigned>((a.rows + kRows - 1) / kRows));
  constexpr int kWide = 16 / sizeof(T);
  return launch(on, wide ? pair_kernel<T, kRows, kWide> : pair_kernel<T, kRows, 1>, grid, dim3(kWarps * 32), 0, a,
                pairs);
}

template <class T>
cudaError_t start(const Launch& on, const Arguments& a) {
  bool wide = a.row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(a.up) % 16 == 0;
  for (int s = 0; s < a.num_segments; ++s) wide = wide && reinterpret_cast<uintptr_t>(a.segments[s].weight) % 16 == 0;
  if (wide && matvec_fits<Elements<T>>(on, a.k)) return matvec<Elements<T>>(on, a);
  if (a.rows == 1) return start_pairs<T, 1>(on, a, wide);
  if (a.rows == 2) return start_pairs<T, 2>(on, a, wide);
  if (a.rows <= 4) return start_pairs<T, 4>(on, a, wide);
  return start_pairs<T, 8>(on, a, wide);
}

}  // namespace

cudaError_t matvec_elements(const Launch& on, const Rows& rows, const Weight* weights, int count, const Gate& gate,
                            const Product& out) {
  if (rows.count == 0) return cudaSuccess;
  const Arguments a = matvec_arguments(rows, rows.count, rows.k, weights, count, gate, out);
  switch (weights[0].format) {
    case Format::kF32:
      return start<float>(on, a);
    case Format::kF16:
      return start<__half>(on, a);
    case Format::kBF16:
      return start<__nv_bfloat16>(on, a);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace trivet::cuda
