// Products of a few rows with block formats: int8 activations, exact integer dots per run of 32 weights, float32 sums.
// A row of weights is cut into slices of 2048. A warp has one slice of columns of its block; it streams them through a
// ring in shared memory that is filled before the previous kernel has ended, and keeps its slice of one or two rows of
// x in registers. A lane takes two runs of a slice, then a fixed tree over lanes, then the slices in order: a sum
// depends on nothing but its row and column.
#include <algorithm>

#include "activation.cuh"
#include "formats.cuh"

namespace trivet::cuda {
namespace {

constexpr int kSliceRuns = 64;  // of 32 weights
constexpr int kStages = 8;      // of the ring: columns in flight per warp
constexpr int kMaxWarps = 16;
constexpr int kUsualWarps = 8;
constexpr int64_t kMaxRounds = 64;  // of a block: bounds the sums that it holds

struct Segment {
  const uint8_t* weight;
  int64_t columns;
  int64_t first_column;  // of y and of the bias
  int64_t first_part;
};

// A part is kColumns columns of a segment, or, with a gate, half as many of both weights; what a warp makes at a time.
struct Arguments {
  QuantizedRows x;
  int64_t rows;
  int runs, slices, groups;  // groups of `slices` warps in a block
  int part_columns, num_segments;
  Segment segments[kMaxSegments];
  int64_t units, unit_parts;  // blocks share the units evenly
  const uint8_t* up;          // null, or the second weight of a gated pair whose first is the only segment
  int64_t row_bytes;
  Epilogue epilogue;
  Product out;
  QuantizedRows quantized;  // of y
};

// Which runs of a slice a lane takes.
template <Format F>
__device__ __forceinline__ int first_run(int lane) {
  return F == Format::kQ6_K ? lane / 4 * 8 + (lane & 2) * 2 + (lane & 1) : 2 * lane;
}
template <Format F>
inline constexpr int kRunDistance = F == Format::kQ6_K ? 2 : 1;

// Superblocks of these are whole 16-byte words, and so are rows of them.
template <Format F>
inline constexpr bool kAligned = F == Format::kQ4_K || F == Format::kQ5_K;

// Of the ring. A slice that is not aligned has something before and after it, and Words read a little ahead.
template <Format F>
inline constexpr int kSlotBytes = BlockReader<F>::kBytesOf2048 + (kAligned<F> ? 0 : 32);
static_assert(kSlotBytes<Format::kQ8_0> % 16 == 0 && kSlotBytes<Format::kQ6_K> % 16 == 0);

__device__ __forceinline__ const Segment& segment_of(const Arguments& a, int64_t part) {
  int index = 0;
  while (index + 1 < a.num_segments && part >= a.segments[index + 1].first_part) ++index;
  return a.segments[index];
}

// Where a slice of the columns of a part lies. Columns beyond the last one are the last one once more.
struct Part {
  const uint8_t *weight, *up;
  int last;  // column; -1: there is no such part

  // Item i of the part: column i, or with a gate, gates and ups in turn.
  __device__ __forceinline__ const uint8_t* item(int i, const Arguments& a) const {
    if (a.up == nullptr) return weight + min(i, last) * a.row_bytes;
    return (i % 2 != 0 ? up : weight) + min(i / 2, last) * a.row_bytes;
  }
};

__device__ __forceinline__ Part part_at(const Arguments& a, int64_t part, int64_t first_byte) {
  const Segment& segment = segment_of(a, part);
  const int64_t column = (part - segment.first_part) * a.part_columns, byte = column * a.row_bytes + first_byte;
  return {segment.weight + byte, a.up + byte,
          static_cast<int>(min(static_cast<int64_t>(a.part_columns), segment.columns - column)) - 1};
}

template <Format F>
__device__ __forceinline__ float run_product(const Run32& w, const int4& x0, const int4& x1, float2 scale, float acc) {
  int first = __dp4a(w.q[0], x0.x, 0), second = __dp4a(w.q[4], x1.x, 0);
  first = __dp4a(w.q[1], x0.y, first);
  second = __dp4a(w.q[5], x1.y, second);
  first = __dp4a(w.q[2], x0.z, first);
  second = __dp4a(w.q[6], x1.z, second);
  first = __dp4a(w.q[3], x0.w, first);
  second = __dp4a(w.q[7], x1.w, second);
  if (kHasHalves<F>) {
    acc = fmaf(w.scale[0] * scale.x, static_cast<float>(first), acc);
    acc = fmaf(w.scale[1] * scale.x, static_cast<float>(second), acc);
  } else {
    acc = fmaf(w.scale[0] * scale.x, static_cast<float>(first + second), acc);
  }
  if (kHasMinimum<F>) acc = fmaf(w.minimum, scale.y, acc);
  return acc;
}

// Sums of N values over the lanes, as warp_sum makes them; lane l gets that of value l / (32 / N).
template <int N>
__device__ __forceinline__ float warp_sums(float (&v)[N]) {
  const int lane = threadIdx.x & 31;
  int offset = 16;
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float give = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
      v[i] = keep + __shfl_xor_sync(~0u, give, offset);
    }
  }
  for (; offset > 0; offset /= 2) v[0] += __shfl_xor_sync(~0u, v[0], offset);
  return v[0];
}

// A lane's part of one row of x.
struct Activations {
  int4 values[2][2];  // [run][half]
  float2 scales[2];
};

template <Format F>
__device__ __forceinline__ Activations activations(const QuantizedRows& x, int64_t row, int runs, int run) {
  const int4* values = reinterpret_cast<const int4*>(x.values) + row * runs * 2;
  const float2* scales = x.scales + row * runs;
  Activations result;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = min(run + i * kRunDistance<F>, runs - 1);
    result.values[i][0] = values[at];
    result.values[i][1] = values[at + runs];
    result.scales[i] = scales[at];
  }
  return result;
}

// The sums of a block lie in `sums` as [item][row][slice]. A thread finishes a column of a row at a time, or four where
// they are quantised as well.
template <int kRows>
__device__ __forceinline__ void finish_block(const Arguments& a, const float* sums, int64_t first_part, int parts) {
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int columns = parts * a.part_columns;
  const auto total = [&](int item, int row) {
    const float* slices = sums + (item * kRows + row) * a.slices;
    float sum = slices[0];
    for (int s = 1; s < a.slices; ++s) sum += slices[s];
    return sum;
  };
  const auto finish = [&](int local, int row) {
    const int64_t part = first_part + local / a.part_columns;
    const Segment& segment = segment_of(a, part);
    const int64_t in_segment = (part - segment.first_part) * a.part_columns + local % a.part_columns;
    if (in_segment >= segment.columns) return 0.0f;
    const int64_t column = segment.first_column + in_segment;
    float y;
    if (a.up != nullptr) {
      const float gate = finished(total(2 * local, row), a.out, column);
      y = gated(gate, finished(total(2 * local + 1, row), a.out, segment.columns + column), a.epilogue);
    } else {
      y = finished(total(local, row), a.out, column);
    }
    a.out.y[(first_row + row) * a.out.stride + column] = y;
    return y;
  };
  if (a.quantized.values == nullptr) {
    for (int index = threadIdx.x; index < columns * kRows; index += blockDim.x) {
      if (first_row + index / columns < a.rows) finish(index % columns, index / columns);
    }
    return;
  }
  const int quads = columns / 4, count = quads * kRows;
  const int64_t first_quad = first_part * a.part_columns / 4;
  for (int start = 0; start < count; start += blockDim.x) {
    const int index = start + static_cast<int>(threadIdx.x), row = index / quads, quad = index % quads;
    const bool inside = index < count && first_row + row < a.rows;
    float y[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (inside) y[e] = finish(quad * 4 + e, row);
    }
    const Quantized8 q = quantize_quad(make_float4(y[0], y[1], y[2], y[3]));
    if (inside) store_quantized(a.quantized, first_row + row, a.segments[0].columns, first_quad + quad, q);
  }
}

template <int kRows>
inline constexpr int kColumnsOf = kRows <= 4 ? 8 / kRows : 2;  // of a part

template <Format F, int kRows>
__global__ void __launch_bounds__(kMaxWarps * 32) matvec_kernel(Arguments a) {
  using Reader = BlockReader<F>;
  constexpr bool kKept = kRows <= 2;  // x stays in registers
  constexpr int kJoint = 2;           // columns that are made at the same time
  constexpr int kColumns = kColumnsOf<kRows>, kValues = kColumns * kRows;
  constexpr int kPieces = (Reader::kBytesOf2048 + (kAligned<F> ? 0 : 30)) / 16;
  static_assert(kStages % kColumns == 0);
  extern __shared__ __align__(16) uint8_t memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slice = warp % a.slices, group = warp / a.slices;
  uint8_t* ring = memory + warp * (kStages * kSlotBytes<F>);
  float* sums = reinterpret_cast<float*>(memory + a.slices * a.groups * (kStages * kSlotBytes<F>));
  const int64_t first_part = a.units * blockIdx.x / gridDim.x * a.unit_parts;
  const int parts = static_cast<int>(a.units * (blockIdx.x + 1) / gridDim.x * a.unit_parts - first_part);
  const int64_t first_byte = static_cast<int64_t>(slice) * Reader::kBytesOf2048;
  const int bytes = static_cast<int>(min(a.row_bytes - first_byte, static_cast<int64_t>(Reader::kBytesOf2048)));

  // The groups take the parts of the block in turn.
  const auto get_part = [&](int local) {
    if (local >= parts) return Part{nullptr, nullptr, -1};
    return part_at(a, first_part + local, first_byte);
  };
  const auto before = [&](const uint8_t* from) {  // what lies between the last 16-byte border and it
    return kAligned<F> ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15);
  };
  const auto fetch = [&](const Part& part, int item, int slot_index) {
    if (part.last >= 0) {
      const uint8_t* from = part.item(item, a);
      const int extra = before(from);
      from += lane * 16 - extra;
      uint8_t* slot = ring + slot_index * kSlotBytes<F> + lane * 16;
#pragma unroll
      for (int i = 0; i < (kPieces + 31) / 32; ++i) {
        if (lane * 16 + i * 512 < extra + bytes) copy_async(slot + i * 512, from + i * 512);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  Part ahead;  // from which columns are fetched
  int next = group;
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (s % kColumns == 0) {
      ahead = get_part(next);
      next += a.groups;
    }
    fetch(ahead, s % kColumns, s);
  }
  wait_for_previous();

  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int local_run = first_run<F>(lane), run = slice * kSliceRuns + local_run;
  const bool usable[2] = {run < a.runs, run + kRunDistance<F> < a.runs};
  const typename Reader::Lane places[2] = {typename Reader::Lane(local_run),
                                           typename Reader::Lane(local_run + kRunDistance<F>)};
  const int offsets[2] = {Reader::offset(local_run), Reader::offset(local_run + kRunDistance<F>)};
  const auto row_of_x = [&](int r) { return activations<F>(a.x, min(first_row + r, a.rows - 1), a.runs, run); };
  Activations kept[kKept ? kRows : 1];
  if constexpr (kKept) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept[r] = row_of_x(r);
  }

  unsigned step = 0;
  for (int local = group; local < parts; local += a.groups, step += kColumns) {
    const Part part = kAligned<F> ? Part{} : get_part(local);
    float acc[kValues] = {};
#pragma unroll
    for (int column = 0; column < kColumns; column += kJoint) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - kJoint) : "memory");
      __syncwarp();
      Run32 w[kJoint][2];
#pragma unroll
      for (int j = 0; j < kJoint; ++j) {
        const int extra = kAligned<F> ? 0 : before(part.item(column + j, a));
        const uint8_t* slot = ring + (step + column + j) % kStages * kSlotBytes<F>;
        auto raw = Reader::load(SharedBytes{slot, extra + offsets[0]}, places[0]);
        w[j][0] = Reader::decode(raw, places[0]);
        // The two runs of a lane lie in the same bytes of a superblock with nibbles.
        if constexpr (!kAligned<F>) raw = Reader::load(SharedBytes{slot, extra + offsets[1]}, places[1]);
        w[j][1] = Reader::decode(raw, places[1]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Activations x;
        if constexpr (kKept) {
          x = kept[r];
        } else {
          x = row_of_x(r);
        }
#pragma unroll
        for (int j = 0; j < kJoint; ++j) {
          float& sum = acc[(column + j) * kRows + r];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float more = run_product<F>(w[j][i], x.values[i][0], x.values[i][1], x.scales[i], sum);
            sum = usable[i] ? more : sum;
          }
        }
      }
      __syncwarp();
      if (column == 0) {
        ahead = get_part(next);
        next += a.groups;
      }
#pragma unroll
      for (int j = 0; j < kJoint; ++j) fetch(ahead, column + j, static_cast<int>((step + column + j) % kStages));
    }
    const float sum = warp_sums(acc);
    constexpr int kLanes = 32 / kValues;
    if (lane % kLanes == 0) sums[(local * kColumns * kRows + lane / kLanes) * a.slices + slice] = sum;
  }
  __syncthreads();
  finish_block<kRows>(a, sums, first_part, parts);
}

template <Format F>
size_t ring_bytes(const Arguments& a) {
  return static_cast<size_t>(a.slices * a.groups) * kStages * kSlotBytes<F>;
}

// Blocks of a kernel that one multiprocessor runs at a time.
template <Format F, int kRows>
int resident_blocks(const Arguments& a) {
  static int known[kMaxWarps + 1] = {};
  int& blocks = known[a.slices];
  if (blocks == 0) {
    const size_t bytes = ring_bytes<F>(a) + 2048;  // and some sums
    if (bytes > kUsualSharedBytes) {
      cudaFuncSetAttribute(matvec_kernel<F, kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes));
    }
    const cudaError_t status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, matvec_kernel<F, kRows>,
                                                                             a.slices * a.groups * 32, bytes);
    if (status != cudaSuccess || blocks < 1) blocks = 1;
  }
  return blocks;
}

template <Format F, int kRows>
cudaError_t start(const Launch& on, Arguments a) {
  constexpr int kColumns = kColumnsOf<kRows>;
  a.part_columns = a.up != nullptr ? kColumns / 2 : kColumns;
  int64_t parts = 0;
  for (int s = 0; s < a.num_segments; ++s) {
    a.segments[s].first_part = parts;
    parts += (a.segments[s].columns + a.part_columns - 1) / a.part_columns;
  }
  a.unit_parts = a.quantized.values != nullptr ? 32 / a.part_columns : 1;  // 32 columns are quantised in one place
  a.units = (parts + a.unit_parts - 1) / a.unit_parts;
  const int64_t usual = (parts + a.groups - 1) / a.groups;  // blocks of one round each
  const int64_t most = static_cast<int64_t>(on.num_multiprocessors) * resident_blocks<F, kRows>(a);
  const int64_t rounds = (usual + most - 1) / most;  // so that all blocks run at once
  const int64_t blocks = std::min(usual / std::min(rounds, kMaxRounds), a.units);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((a.rows + kRows - 1) / kRows));
  const int64_t block_items = (a.units + blocks - 1) / blocks * a.unit_parts * kColumns;
  const size_t bytes = ring_bytes<F>(a) + static_cast<size_t>(block_items * kRows * a.slices) * sizeof(float);
  return launch(on, matvec_kernel<F, kRows>, grid, dim3(static_cast<unsigned>(a.slices * a.groups * 32)), bytes, a);
}

}  // namespace

bool matvec_int8_takes(int64_t k) { return k <= int64_t{kMaxWarps} * kSliceRuns * 32; }

cudaError_t matvec_int8(const Launch& on, const QuantizedRows& x, int64_t rows, int64_t k, const Weight* weights,
                        int count, const Gate& gate, const Product& out) {
  if (rows == 0) return cudaSuccess;
  Arguments a{};
  a.x = x;
  a.rows = rows;
  a.runs = static_cast<int>(k / 32);
  a.slices = (a.runs + kSliceRuns - 1) / kSliceRuns;
  a.groups = a.slices < kUsualWarps ? kUsualWarps / a.slices : 1;
  a.up = gate.up;
  a.epilogue = gate.epilogue;
  a.quantized = gate.quantized;
  a.row_bytes = weights[0].row_bytes;
  a.out = out;
  a.num_segments = count;
  int64_t first_column = 0;
  for (int s = 0; s < count; ++s) {
    a.segments[s] = {weights[s].data, weights[s].rows, first_column, 0};
    first_column += weights[s].rows;
  }
  return with_block_format(weights[0].format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    if (rows == 1) return start<F, 1>(on, a);
    if (rows == 2) return start<F, 2>(on, a);
    if (rows <= 4) return start<F, 4>(on, a);
    return start<F, 8>(on, a);
  });
}

}  // namespace trivet::cuda
