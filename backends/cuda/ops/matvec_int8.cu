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

struct Arguments {
  QuantizedRows x;
  int64_t rows;
  int runs, slices, groups;          // groups of `slices` warps in a block
  int64_t items, units, unit_items;  // blocks share the units evenly
  int64_t ends[kMaxSegments];        // of the segments, in items
  const uint8_t* weights[kMaxSegments];
  const uint8_t* up;  // null, or the second weight of a gated pair: items are then gates and ups in turn
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

template <Format F>
inline constexpr int kSlotBytes = (BlockReader<F>::kBytesOf2048 + 32 + 15) / 16 * 16;

__device__ __forceinline__ const uint8_t* item_weights(const Arguments& a, int64_t item) {
  if (a.up != nullptr) return (item & 1 ? a.up : a.weights[0]) + (item >> 1) * a.row_bytes;
  if (item < a.ends[0]) return a.weights[0] + item * a.row_bytes;
  if (item < a.ends[1]) return a.weights[1] + (item - a.ends[0]) * a.row_bytes;
  return a.weights[2] + (item - a.ends[1]) * a.row_bytes;
}

__device__ __forceinline__ void copy_async(uint8_t* shared, const uint8_t* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
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
__device__ __forceinline__ void finish_block(const Arguments& a, const float* sums, int64_t first_item,
                                             int64_t block_items) {
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const bool gates = a.up != nullptr;
  const int64_t items = min(block_items, a.items - first_item);
  const int64_t first_column = gates ? first_item / 2 : first_item, columns = gates ? items / 2 : items;
  const auto total = [&](int64_t item, int row) {
    const float* parts = sums + (item * kRows + row) * a.slices;
    float sum = parts[0];
    for (int s = 1; s < a.slices; ++s) sum += parts[s];
    return sum;
  };
  const auto finish = [&](int64_t local, int row) {
    const int64_t column = first_column + local;
    float y;
    if (gates) {
      const float gate = finished(total(2 * local, row), a.out, column);
      y = gated(gate, finished(total(2 * local + 1, row), a.out, a.items / 2 + column), a.epilogue);
    } else {
      y = finished(total(local, row), a.out, column);
    }
    a.out.y[(first_row + row) * a.out.stride + column] = y;
    return y;
  };
  if (a.quantized.values == nullptr) {
    for (int index = threadIdx.x; index < columns * kRows; index += blockDim.x) {
      const int row = static_cast<int>(index / columns);
      if (first_row + row < a.rows) finish(index % columns, row);
    }
    return;
  }
  const int quads = static_cast<int>(columns / 4), count = quads * kRows;
  for (int start = 0; start < count; start += blockDim.x) {
    const int index = start + static_cast<int>(threadIdx.x), row = index / quads, quad = index % quads;
    const bool inside = index < count && first_row + row < a.rows;
    float y[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (inside) y[e] = finish(quad * 4 + e, row);
    }
    const Quantized8 q = quantize_quad(make_float4(y[0], y[1], y[2], y[3]));
    if (inside) store_quantized(a.quantized, first_row + row, a.items / 2, first_column / 4 + quad, q);
  }
}

template <Format F, int kRows>
__global__ void __launch_bounds__(kMaxWarps * 32) matvec_kernel(Arguments a) {
  using Reader = BlockReader<F>;
  constexpr bool kKept = kRows <= 2;  // x stays in registers
  constexpr int kJoint = 2;           // columns that are made at the same time
  constexpr int kColumns = kRows <= 4 ? 8 / kRows : 2, kValues = kColumns * kRows;
  constexpr int kPieces = (Reader::kBytesOf2048 + 30) / 16;
  extern __shared__ __align__(16) uint8_t memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slice = warp % a.slices, group = warp / a.slices;
  uint8_t* ring = memory + warp * (kStages * kSlotBytes<F>);
  float* sums = reinterpret_cast<float*>(memory + a.slices * a.groups * (kStages * kSlotBytes<F>));
  const int64_t first_unit = a.units * blockIdx.x / gridDim.x, end_unit = a.units * (blockIdx.x + 1) / gridDim.x;
  const int64_t first_item = first_unit * a.unit_items, block_items = (end_unit - first_unit) * a.unit_items;
  const int64_t first_byte = static_cast<int64_t>(slice) * Reader::kBytesOf2048;
  const int bytes = static_cast<int>(min(a.row_bytes - first_byte, static_cast<int64_t>(Reader::kBytesOf2048)));
  const int parts = static_cast<int>(block_items / kColumns);  // of kColumns items, for the groups in turn
  const int rounds = (parts - group + a.groups - 1) / a.groups, steps = rounds * kColumns;

  // Step s of a warp is column s % kColumns of its round; columns beyond the last one are the last one once more.
  const auto weights_of = [&](int step) {
    const int64_t item = first_item + (step / kColumns * a.groups + group) * kColumns + step % kColumns;
    return item_weights(a, min(item, a.items - 1)) + first_byte;
  };
  const auto fetch = [&](int step) {
    if (step < steps) {
      const uint8_t* from = weights_of(step);
      const int before = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15);
      uint8_t* slot = ring + step % kStages * kSlotBytes<F>;
#pragma unroll
      for (int i = 0; i < (kPieces + 31) / 32; ++i) {
        const int piece = lane + 32 * i;
        if (piece * 16 < before + bytes) copy_async(slot + piece * 16, from - before + piece * 16);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int s = 0; s < kStages; ++s) fetch(s);
  wait_for_previous();

  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int local_run = first_run<F>(lane), run = slice * kSliceRuns + local_run;
  const bool usable[2] = {run < a.runs, run + kRunDistance<F> < a.runs};
  const typename Reader::Lane places[2] = {typename Reader::Lane(local_run),
                                           typename Reader::Lane(local_run + kRunDistance<F>)};
  const auto row_of_x = [&](int r) { return activations<F>(a.x, min(first_row + r, a.rows - 1), a.runs, run); };
  Activations kept[kKept ? kRows : 1];
  if constexpr (kKept) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept[r] = row_of_x(r);
  }

  for (int round = 0; round < rounds; ++round) {
    float acc[kValues] = {};
#pragma unroll
    for (int column = 0; column < kColumns; column += kJoint) {
      const int step = round * kColumns + column;
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - kJoint) : "memory");
      __syncwarp();
      Run32 w[kJoint][2];
#pragma unroll
      for (int j = 0; j < kJoint; ++j) {
        const uint8_t* slot = ring + (step + j) % kStages * kSlotBytes<F>;
        const int before = static_cast<int>(reinterpret_cast<uintptr_t>(weights_of(step + j)) & 15);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const SharedBytes block{slot, before + Reader::offset(local_run + i * kRunDistance<F>)};
          w[j][i] = Reader::decode(Reader::load(block, places[i]), places[i]);
        }
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
#pragma unroll
      for (int j = 0; j < kJoint; ++j) fetch(step + j + kStages);
    }
    const float sum = warp_sums(acc);
    constexpr int kLanes = 32 / kValues;
    if (lane % kLanes == 0) {
      const int64_t local = (round * a.groups + group) * kColumns * kRows + lane / kLanes;
      sums[local * a.slices + slice] = sum;
    }
  }
  __syncthreads();
  finish_block<kRows>(a, sums, first_item, block_items);
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
    const size_t bytes = ring_bytes<F>(a) + 4096;
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
  constexpr int kColumns = kRows <= 4 ? 8 / kRows : 2;
  a.unit_items = a.quantized.values != nullptr ? 64 : kColumns;  // a block of 32 columns is quantised in one place
  a.units = (a.items + a.unit_items - 1) / a.unit_items;
  const int64_t round_items = static_cast<int64_t>(a.groups) * kColumns;
  const int64_t usual = (a.items + round_items - 1) / round_items;  // blocks of one round each
  const int64_t most = static_cast<int64_t>(on.num_multiprocessors) * resident_blocks<F, kRows>(a);
  const int64_t rounds = (usual + most - 1) / most;  // so that all blocks run at once
  const int64_t blocks = std::min(usual / std::min(rounds, kMaxRounds), a.units);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((a.rows + kRows - 1) / kRows));
  const int64_t block_items = (a.units + blocks - 1) / blocks * a.unit_items;
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
  for (int s = 0; s < kMaxSegments; ++s) {
    a.weights[s] = weights[s < count ? s : count - 1].data;
    if (s < count) a.items += weights[s].rows * (gate.up != nullptr ? 2 : 1);
    a.ends[s] = a.items;
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
