// Products of a few rows: what their kernels share. A row of weights is cut into slices; a warp has one slice of
// columns of its block. It streams them through a ring in shared memory that is filled before the previous kernel has
// ended, and keeps its slice of one or two rows of x in registers. What a lane makes of a slice is summed over the
// lanes by a fixed tree, then the slices in order: a sum depends on nothing but its row and column.
//
// A Source is the kind of weights and of x:
//   Input          x, as the kernel is given it
//   kSliceWeights, kSliceBytes, kAligned (slices begin at multiples of 16 bytes)
//   kStages        columns in the ring of a warp
//   kMostThreads   of a block for one row: bounds the registers
//   X              a lane's part of a slice of a row of x
//   Place          (lane, slice, k); x(input, row) -> X
//   Weights        (bytes of a slice, place); times(x, sum) -> sum
#pragma once

#include <algorithm>

#include "activation.cuh"
#include "formats.cuh"

namespace trivet::cuda {

constexpr int kMaxWarps = 16;              // of a block, and for one row the usual number
constexpr int kFewWarps = 8;               // for more rows, or where the device has little shared memory
constexpr int64_t kSumBytes = 12 * 1024;   // bounds the sums that a block holds, but for a part or two
constexpr size_t kBesideRing = 16 * 1024;  // for them

struct Segment {
  const uint8_t* weight;
  int64_t columns;
  int64_t first_column;  // of y and of the bias
  int64_t first_part;
};

// A part is kColumns columns of a segment, or, with a gate, half as many of both weights; what a warp makes at a time.
template <class Input>
struct MatvecArguments {
  Input x;
  int64_t rows;
  int k, slices, groups;         // groups of `slices` warps in a block
  int part_shift, num_segments;  // of a part: log2 of its columns
  Segment segments[kMaxSegments];
  int unit_parts, block_units, more_blocks;  // a block has so many units, the first more_blocks of them one more
  const uint8_t* up;  // null, or the second weight of a gated pair whose first is the only segment
  int row_bytes;
  Epilogue epilogue;
  Product out;
  QuantizedRows quantized;  // of y
};

// Of the ring. A slice that is not aligned has something before and after it, and Words read a little ahead.
template <class Source>
inline constexpr int kSlotBytes = Source::kSliceBytes + (Source::kAligned ? 0 : 32);

template <class Arguments>
__device__ __forceinline__ const Segment& segment_of(const Arguments& a, int64_t part) {
  int index = 0;
  while (index + 1 < a.num_segments && part >= a.segments[index + 1].first_part) ++index;
  return a.segments[index];
}

// Where a lane's 16 bytes of the slices of a part begin. Columns beyond the last one are the last one once more.
struct Part {
  const uint8_t *even, *odd;  // items
  int last;                   // column; -1: there is no such part

  // Item i of the part: column i, or with a gate, gates and ups in turn.
  template <class Arguments>
  __device__ __forceinline__ const uint8_t* item(int i, const Arguments& a) const {
    const uint64_t column = static_cast<uint32_t>(min(i >> (a.up != nullptr ? 1 : 0), last));
    return (i % 2 != 0 ? odd : even) + column * static_cast<uint32_t>(a.row_bytes);
  }
};

template <class Arguments>
__device__ __forceinline__ Part part_at(const Arguments& a, int64_t part, int64_t first_byte) {
  const Segment& segment = segment_of(a, part);
  const int64_t column = (part - segment.first_part) << a.part_shift, byte = column * a.row_bytes + first_byte;
  const uint8_t* even = segment.weight + byte;
  return {even, a.up != nullptr ? a.up + byte : even,
          static_cast<int>(min(int64_t{1} << a.part_shift, segment.columns - column)) - 1};
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

// The sums of a block lie in `sums` as [item][row][slice]. A thread finishes a column of a row at a time, a warp 32 in
// a row, which are quantised together.
template <int kRows, class Arguments>
__device__ __forceinline__ void finish_block(const Arguments& a, const float* sums, int64_t first_part, int parts) {
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int columns = parts << a.part_shift, count = (columns + 31) / 32 * 32 * kRows;
  const auto total = [&](int item, int row) {
    const float* slices = sums + (item * kRows + row) * a.slices;
    float sum = slices[0];
    for (int s = 1; s < a.slices; ++s) sum += slices[s];
    return sum;
  };
  for (int index = threadIdx.x; index < count; index += blockDim.x) {
    const int local = index / (32 * kRows) * 32 + index % 32, row = index / 32 % kRows;
    const Segment& segment = segment_of(a, first_part + (local >> a.part_shift));
    const int64_t in_segment = (first_part - segment.first_part) * (1 << a.part_shift) + local;
    float y = 0.0f;
    if (local < columns && in_segment < segment.columns && first_row + row < a.rows) {
      const int64_t column = segment.first_column + in_segment;
      y = finished(total(a.up != nullptr ? 2 * local : local, row), a.out, column);
      if (a.up != nullptr) {
        y = gated(y, finished(total(2 * local + 1, row), a.out, segment.columns + column), a.epilogue);
      }
      a.out.y[(first_row + row) * a.out.stride + column] = y;
    }
    if (a.quantized.values == nullptr) continue;
    const QuantizedValue q = quantize_lane(y);
    if (first_row + row < a.rows) store_quantized(a.quantized, first_row + row, segment.columns, in_segment, q);
  }
}

template <int kRows>
inline constexpr int kColumnsOf = kRows <= 4 ? 8 / kRows : 2;  // of a part

template <int kCopies>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kCopies) : "memory");
}

template <class Source, int kRows>
__global__ void __launch_bounds__(kRows == 1 ? Source::kMostThreads : kMaxWarps * 32)
    matvec_kernel(MatvecArguments<typename Source::Input> a) {
  using X = typename Source::X;
  using Weights = typename Source::Weights;
  constexpr bool kKept = kRows <= 2;  // x stays in registers
  constexpr int kJoint = 2;           // columns that are made at the same time
  constexpr int kColumns = kColumnsOf<kRows>, kValues = kColumns * kRows, kStages = Source::kStages;
  constexpr int kPieces = (Source::kSliceBytes + (Source::kAligned ? 0 : 30)) / 16;
  static_assert(kStages % kColumns == 0 || kColumns % kStages == 0);
  extern __shared__ __align__(16) uint8_t memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slice = warp % a.slices, group = warp / a.slices;
  uint8_t* ring = memory + warp * (kStages * kSlotBytes<Source>);
  float* sums = reinterpret_cast<float*>(memory + a.slices * a.groups * (kStages * kSlotBytes<Source>));
  const int block = blockIdx.x;
  const int64_t first_part = (static_cast<int64_t>(block) * a.block_units + min(block, a.more_blocks)) * a.unit_parts;
  const int parts = (a.block_units + (block < a.more_blocks ? 1 : 0)) * a.unit_parts;
  const int64_t first_byte = static_cast<int64_t>(slice) * Source::kSliceBytes + lane * 16;
  const int bytes = min(a.row_bytes - slice * Source::kSliceBytes, Source::kSliceBytes);

  // The groups take the parts of the block in turn.
  const auto get_part = [&](int local) {
    if (local >= parts) return Part{nullptr, nullptr, -1};
    return part_at(a, first_part + local, first_byte);
  };
  const auto before = [&](const uint8_t* from) {  // what lies between the last 16-byte border and it
    return Source::kAligned ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15);
  };
  const auto fetch = [&](const Part& part, int item, int slot_index) {
    if (part.last >= 0) {
      const uint8_t* from = part.item(item, a);
      const int extra = before(from), left = extra + bytes - lane * 16;
      const uint8_t* aligned = from - extra;
      uint8_t* slot = ring + slot_index * kSlotBytes<Source> + lane * 16;
#pragma unroll
      for (int i = 0; i < (kPieces + 31) / 32; ++i) {
        if (i * 512 < left) copy_async(slot + i * 512, aligned + i * 512);
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
    wait_for_all_but<1>();  // else what the kernels before this one load would queue behind the whole ring
  }
  wait_for_previous();

  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const typename Source::Place place(lane, slice, a.k);
  const auto row_of_x = [&](int r) { return place.x(a.x, min(first_row + r, a.rows - 1)); };
  X kept[kKept ? kRows : 1];
  if constexpr (kKept) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept[r] = row_of_x(r);
  }

  unsigned step = 0;
  for (int local = group; local < parts; local += a.groups, step += kColumns) {
    const Part part = Source::kAligned ? Part{} : kStages <= kColumns ? ahead : get_part(local);
    const unsigned first_item = kColumns % kStages == 0 ? 0 : step;
    float acc[kValues] = {};
#pragma unroll
    for (int column = 0; column < kColumns; column += kJoint) {
      wait_for_all_but<kStages - kJoint>();
      __syncwarp();
      const auto weights_at = [&](int item) {
        const int extra = Source::kAligned ? 0 : before(part.item(item, a));
        return Weights({ring + (first_item + item) % kStages * kSlotBytes<Source>, extra}, place);
      };
      const Weights weights[kJoint] = {weights_at(column), weights_at(column + 1)};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        X x;
        if constexpr (kKept) {
          x = kept[r];
        } else {
          x = row_of_x(r);
        }
#pragma unroll
        for (int j = 0; j < kJoint; ++j) {
          float& sum = acc[(column + j) * kRows + r];
          sum = weights[j].times(x, sum);
        }
      }
      __syncwarp();
      if ((column + kStages) % kColumns == 0) {
        ahead = get_part(next);
        next += a.groups;
      }
#pragma unroll
      for (int j = 0; j < kJoint; ++j) {
        const int item = column + j;
        fetch(ahead, (item + kStages) % kColumns, static_cast<int>((first_item + item) % kStages));
      }
    }
    const float sum = warp_sums(acc);
    constexpr int kLanes = 32 / kValues;
    if (lane % kLanes == 0) sums[(local * kColumns * kRows + lane / kLanes) * a.slices + slice] = sum;
  }
  __syncthreads();
  finish_block<kRows>(a, sums, first_part, parts);
}

template <class Source>
size_t ring_bytes(int warps) {
  return static_cast<size_t>(warps) * Source::kStages * kSlotBytes<Source>;
}

inline int slices_of(int64_t k, int slice_weights) { return static_cast<int>((k + slice_weights - 1) / slice_weights); }

// Whether the device has the shared memory for rows of k weights. A block has at least one unit, whose sums take
// `unit_bytes` per slice at most.
template <class Source>
bool matvec_fits(const Launch& on, int64_t k, size_t unit_bytes = 0) {
  const int slices = slices_of(k, Source::kSliceWeights);
  const size_t sums = std::max(kBesideRing, slices * unit_bytes);
  return slices <= kMaxWarps && ring_bytes<Source>(std::max(slices, kFewWarps)) + sums <= on.shared_bytes;
}

// Blocks of a kernel that one multiprocessor runs at a time.
template <class Source, int kRows>
int resident_blocks(int warps) {
  const size_t bytes = ring_bytes<Source>(warps) + 2048;  // and some sums
  if (bytes > kUsualSharedBytes) {
    cudaFuncSetAttribute(matvec_kernel<Source, kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(bytes));
  }
  int blocks = 0;
  const cudaError_t status =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, matvec_kernel<Source, kRows>, warps * 32, bytes);
  return status != cudaSuccess || blocks < 1 ? 1 : blocks;
}

template <class Source, int kRows>
cudaError_t start_matvec(const Launch& on, MatvecArguments<typename Source::Input> a) {
  constexpr int kColumns = kColumnsOf<kRows>, kShift = kColumns == 8 ? 3 : kColumns == 4 ? 2 : 1;
  a.part_shift = a.up != nullptr ? kShift - 1 : kShift;
  int64_t parts = 0;
  for (int s = 0; s < a.num_segments; ++s) {
    a.segments[s].first_part = parts;
    parts += (a.segments[s].columns + (1 << a.part_shift) - 1) >> a.part_shift;
  }
  a.unit_parts = a.quantized.values != nullptr ? 32 >> a.part_shift : 1;  // 32 columns are quantised in one place
  const int64_t units = (parts + a.unit_parts - 1) / a.unit_parts;
  // All blocks run at once, as many as there can be, so that all multiprocessors have the same share.
  const int warps = a.slices * a.groups;
  const int64_t part_bytes = static_cast<int64_t>(kColumns) * kRows * a.slices * sizeof(float);
  const int64_t most = static_cast<int64_t>(on.num_multiprocessors) * resident_blocks<Source, kRows>(warps);
  const int64_t blocks = std::min(units, std::max(most, parts * part_bytes / kSumBytes + 1));
  a.block_units = static_cast<int>(units / blocks);
  a.more_blocks = static_cast<int>(units % blocks);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((a.rows + kRows - 1) / kRows));
  const int64_t block_parts = static_cast<int64_t>(a.block_units + (a.more_blocks > 0 ? 1 : 0)) * a.unit_parts;
  const size_t bytes = ring_bytes<Source>(warps) + static_cast<size_t>(block_parts * part_bytes);
  return launch(on, matvec_kernel<Source, kRows>, grid, dim3(static_cast<unsigned>(warps * 32)), bytes, a);
}

template <class Input>
MatvecArguments<Input> matvec_arguments(const Input& x, int64_t rows, int64_t k, const Weight* weights, int count,
                                        const Gate& gate, const Product& out) {
  MatvecArguments<Input> a{};
  a.x = x;
  a.rows = rows;
  a.k = static_cast<int>(k);
  a.up = gate.up;
  a.epilogue = gate.epilogue;
  a.quantized = gate.quantized;
  a.row_bytes = static_cast<int>(weights[0].row_bytes);
  a.out = out;
  a.num_segments = count;
  int64_t first_column = 0;
  for (int s = 0; s < count; ++s) {
    a.segments[s] = {weights[s].data, weights[s].rows, first_column, 0};
    first_column += weights[s].rows;
  }
  return a;
}

// For weights that matvec_fits.
template <class Source>
cudaError_t matvec(const Launch& on, MatvecArguments<typename Source::Input> a) {
  const bool many = a.rows == 1 && ring_bytes<Source>(kMaxWarps) + kBesideRing <= on.shared_bytes;
  a.slices = slices_of(a.k, Source::kSliceWeights);
  a.groups = std::max(1, (many ? kMaxWarps : kFewWarps) / a.slices);
  if (a.rows == 1) return start_matvec<Source, 1>(on, a);
  if (a.rows == 2) return start_matvec<Source, 2>(on, a);
  if (a.rows <= 4) return start_matvec<Source, 4>(on, a);
  return start_matvec<Source, 8>(on, a);
}

}  // namespace trivet::cuda
