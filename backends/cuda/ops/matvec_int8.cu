// Products of a few rows with block formats: int8 activations, exact integer dots per run of 32 weights, float32 sums.
// A warp makes one or two columns at a time (with a gate: one column of both weights), a lane takes every 32nd run,
// then a fixed tree over lanes. The next run of weights is fetched while one is used, the first even before the
// previous kernel has ended.
#include "activation.cuh"
#include "formats.cuh"

namespace trivet::cuda {
namespace {

constexpr int kWarps = 4;

struct Segment {
  const uint8_t* weight;
  int64_t columns;
  int64_t first_column;  // of y and of the bias
  int64_t first_unit;    // a unit is what a warp makes at a time
};

struct Arguments {
  QuantizedRows x;
  int64_t rows, k;
  Segment segments[kMaxSegments];
  int num_segments;
  const uint8_t* up;  // null, or the second weight of a gated pair whose first is segments[0]
  int64_t units, row_bytes;
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

// The columns of a unit: where their weights lie, and where the sums go.
struct Unit {
  const uint8_t* rows[2];
  int64_t column;  // of the segment
  int segment;
};

template <int kColumns>
__device__ __forceinline__ Unit unit_at(const Arguments& a, int64_t index) {
  Unit unit;
  unit.segment = 0;
  while (unit.segment + 1 < a.num_segments && index >= a.segments[unit.segment + 1].first_unit) ++unit.segment;
  const Segment& segment = a.segments[unit.segment];
  unit.column = (index - segment.first_unit) * (a.up != nullptr ? 1 : kColumns);
  unit.rows[0] = segment.weight + unit.column * a.row_bytes;
  if (kColumns == 2) {
    const bool single = unit.column + 1 >= segment.columns;
    unit.rows[1] = a.up != nullptr ? a.up + unit.column * a.row_bytes : unit.rows[0] + (single ? 0 : a.row_bytes);
  }
  return unit;
}

// As measured on an H200: q6_k, whose loads are many and small, gains from fetching two runs ahead, the others from
// more warps.
template <Format F, int kRows, int kColumns>
inline constexpr int kAhead = F == Format::kQ6_K && kRows == 1 && kColumns == 1 ? 2 : 1;
template <Format F, int kRows, int kColumns>
inline constexpr int kMinBlocks = kRows == 1 && kColumns == 1 && F != Format::kQ6_K && F != Format::kQ5_K ? 5 : 1;

// kColumns is 2 where `up` is given.
template <Format F, int kRows, int kColumns>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks<F, kRows, kColumns>) matvec_kernel(Arguments a) {
  using Reader = BlockReader<F>;
  constexpr int kFetch = kAhead<F, kRows, kColumns>;
  const int lane_id = threadIdx.x & 31;
  const typename Reader::Lane lane(lane_id);
  const int runs = static_cast<int>(a.k / 32);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (index >= a.units) index = a.units - 1;  // another warp's work once more, with the same result
  const uint8_t* from[kColumns];
  typename Reader::Raw next[kFetch][kColumns];
  const Unit first_unit = unit_at<kColumns>(a, index);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    from[c] = Reader::start(first_unit.rows[c], lane_id);
#pragma unroll
    for (int f = 0; f < kFetch; ++f) {
      if (lane_id + 32 * f < runs) next[f][c] = Reader::load(from[c] + f * Reader::kStepBytes, lane);
    }
  }
  wait_for_previous();
  int value_offset[kRows], scale_offset[kRows];  // of the rows of x, in int4 and float2
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first_row + r < a.rows ? first_row + r : a.rows - 1;
    value_offset[r] = static_cast<int>(row * runs * 2) + lane_id;
    scale_offset[r] = static_cast<int>(row * runs) + lane_id;
  }
  while (true) {
    const int64_t following = index + stride;
    const bool more = following < a.units;
    const uint8_t* next_from[kColumns];
    if constexpr (kColumns == 2) {
      const Unit next_unit = unit_at<kColumns>(a, more ? following : index);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) next_from[c] = Reader::start(next_unit.rows[c], lane_id);
    }
    const int4* values = reinterpret_cast<const int4*>(a.x.values);
    const float2* scales = a.x.scales;
    float acc[kColumns][kRows] = {};
    for (int run = lane_id; run < runs; run += 32 * kFetch) {
      typename Reader::Raw current[kFetch][kColumns];
      const bool last = run + 32 * kFetch >= runs;  // of this lane
      if constexpr (kColumns == 2) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) from[c] = last ? next_from[c] : from[c] + kFetch * Reader::kStepBytes;
      } else if (last) {  // one column leaves no registers to have this ready
        from[0] = Reader::start(unit_at<kColumns>(a, more ? following : index).rows[0], lane_id);
      } else {
        from[0] += kFetch * Reader::kStepBytes;
      }
#pragma unroll
      for (int f = 0; f < kFetch; ++f) {
        const int ahead = last ? lane_id + 32 * f : run + 32 * (kFetch + f);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          current[f][c] = next[f][c];
          if (ahead < runs && (more || !last)) next[f][c] = Reader::load(from[c] + f * Reader::kStepBytes, lane);
        }
      }
#pragma unroll
      for (int f = 0; f < kFetch; ++f) {
        if (f > 0 && run + 32 * f >= runs) break;
        int4 x[kRows][2];
        float2 scale[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          x[r][0] = values[value_offset[r] + 32 * f];
          x[r][1] = values[value_offset[r] + 32 * f + runs];
          scale[r] = scales[scale_offset[r] + 32 * f];
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const Run32 w = Reader::decode(current[f][c], lane);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            acc[c][r] = run_product<F>(w, x[r][0], x[r][1], scale[r].x, scale[r].y, acc[c][r]);
          }
        }
      }
      values += 32 * kFetch;
      scales += 32 * kFetch;
    }
    const Unit unit = unit_at<kColumns>(a, index);
    const Segment& segment = a.segments[unit.segment];
    const int64_t at = segment.first_column + unit.column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float total[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) total[c] = warp_sum(acc[c][r]);
      const int64_t row = first_row + r;
      if (lane_id != 0 || row >= a.rows) continue;
      float* y = a.out.y + row * a.out.stride;
      if constexpr (kColumns == 2) {
        if (a.up != nullptr) {
          const float gate = finished(total[0], a.out, at), up = finished(total[1], a.out, segment.columns + at);
          y[at] = gated(gate, up, a.epilogue);
          continue;
        }
        if (unit.column + 1 < segment.columns) y[at + 1] = finished(total[1], a.out, at + 1);
      }
      y[at] = finished(total[0], a.out, at);
    }
    if (!more) break;
    index = following;
  }
}

// Blocks of a kernel that one multiprocessor runs at a time.
template <Format F, int kRows, int kColumns>
int resident_blocks() {
  static const int count = [] {
    int blocks = 0;
    const cudaError_t status =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, matvec_kernel<F, kRows, kColumns>, kWarps * 32, 0);
    return status == cudaSuccess && blocks > 0 ? blocks : 1;
  }();
  return count;
}

template <Format F, int kRows, int kColumns>
cudaError_t start(const Launch& on, Arguments a) {
  a.units = 0;
  for (int s = 0; s < a.num_segments; ++s) {
    a.segments[s].first_unit = a.units;
    a.units += a.up != nullptr ? a.segments[s].columns : (a.segments[s].columns + kColumns - 1) / kColumns;
  }
  const int64_t chunks = (a.rows + kRows - 1) / kRows;
  // All warps at once, each with the same number of units or one less.
  const int64_t most = static_cast<int64_t>(on.num_multiprocessors) * resident_blocks<F, kRows, kColumns>() * kWarps;
  const int64_t rounds = (a.units + most - 1) / most;
  const int64_t warps = (a.units + rounds - 1) / rounds;
  const dim3 grid(static_cast<unsigned>((warps + kWarps - 1) / kWarps), static_cast<unsigned>(chunks));
  return launch(on, matvec_kernel<F, kRows, kColumns>, grid, dim3(kWarps * 32), 0, a);
}

template <Format F, int kRows>
cudaError_t start_rows(const Launch& on, const Arguments& a) {
  int64_t columns = 0;
  for (int s = 0; s < a.num_segments; ++s) columns += a.segments[s].columns;
  // Two columns share what is read of x, which counts when there are several rows of it and columns for all warps.
  const bool few = kRows == 1 || columns < static_cast<int64_t>(on.num_multiprocessors) * 64;
  return a.up == nullptr && few ? start<F, kRows, 1>(on, a) : start<F, kRows, 2>(on, a);
}

}  // namespace

cudaError_t matvec_int8(const Launch& on, const QuantizedRows& x, int64_t rows, int64_t k, const Weight* weights,
                        int count, const uint8_t* up, Epilogue epilogue, const Product& out) {
  if (rows == 0) return cudaSuccess;
  Arguments a{x, rows, k, {}, count, up, 0, weights[0].row_bytes, epilogue, out};
  int64_t first_column = 0;
  for (int s = 0; s < count; ++s) {
    a.segments[s] = {weights[s].data, weights[s].rows, first_column, 0};
    first_column += weights[s].rows;
  }
  return with_block_format(weights[0].format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    if (rows == 1) return start_rows<F, 1>(on, a);
    if (rows == 2) return start_rows<F, 2>(on, a);
    if (rows <= 4) return start_rows<F, 4>(on, a);
    return start_rows<F, 8>(on, a);
  });
}

}  // namespace trivet::cuda
