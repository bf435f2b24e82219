// Products of up to 64 rows with block formats on Hopper's warpgroup tensor cores. A block makes 128 columns. Weights
// come into shared memory as they are stored, 256 of k at a time and one such stage ahead; for every 64 of k, each of
// the 256 threads turns a run of 32 weights into bfloat16 for the tensor cores, while those are at work on the 64
// before. Where shared memory allows it, two blocks share a multiprocessor and hide each other's waits.
#include "formats.cuh"
#include "wgmma.cuh"

namespace trivet::cuda {
namespace {

constexpr int kTileColumns = 128, kTileK = 64, kThreads = 256;
constexpr int kStageSteps = 4, kStages = 2;   // steps of kTileK per stage of stored weights
constexpr int kRowTiles = 4, kRowsAhead = 2;  // of x, one for each step

// Where the sums of a product go: y, or its part of k in `parts` [splits][rows][columns], to be added up by sum_kernel.
struct Sums {
  int64_t rows, columns;
  int splits;
  float* parts;  // null if not split
  Product out;
};

// A warpgroup's 64 columns from first_column by N rows from first_row.
template <int N>
__device__ __forceinline__ void store_sums(const Sums& a, const float (&sums)[N / 2], int64_t first_row,
                                           int64_t first_column) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const int64_t column = first_column + warp * 16 + lane / 4;
  float* parts = a.parts == nullptr ? nullptr : a.parts + blockIdx.z * a.rows * a.columns;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int64_t row = first_row + i / 4 * 8 + lane % 4 * 2 + i % 2, at = column + i / 2 % 2 * 8;
    if (row >= a.rows || at >= a.columns) continue;
    if (parts != nullptr) {
      parts[row * a.columns + at] = sums[i];
    } else {
      a.out.y[row * a.out.stride + at] = finished(sums[i], a.out, at);
    }
  }
}

// How many parts k is cut into so that there are `blocks` blocks, or a little less.
int splits_of(int64_t blocks, int64_t tiles, int64_t most) {
  int64_t splits = blocks / tiles;
  if (splits > most) splits = most;
  return static_cast<int>(splits < 1 ? 1 : splits > 8 ? 8 : splits);
}

struct Arguments {
  const __nv_bfloat16* x;
  Weight weight;
  int64_t k, padded_k;
  Sums sums;
};

template <Format F>
struct Stored {
  static constexpr int kBytes = BlockReader<F>::kBytesOf2048 / 8;  // of 256 weights
  static constexpr int kPieces = (kBytes + 30) / 16;               // of 16 bytes, wherever they begin
  static constexpr int kPitch = (kPieces | 1) * 16;                // an odd number of pieces: all banks are used
  static constexpr int kStageBytes = kTileColumns * kPitch;
  static_assert(kPitch / 16 % 2 == 1);
};

template <Format F, int kRows>
inline constexpr size_t kSharedBytes = 1024 + 2 * kTileColumns * 128 + kRowTiles * kRows * 128 +
                                       kStages * Stored<F>::kStageBytes + 16;  // Words read a little ahead

// A run of a stage's column into the row of a tile.
template <Format F>
__device__ __forceinline__ void dequantize(uint8_t* tile, int column, int half, const SharedBytes& stored, int run,
                                           bool inside) {
  Run32 weights{};
  if (inside) weights = read_run<F>(stored, run);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(tile + swizzled(column, half * 4 + i)) = bfloat16_words<F>(weights, i);
  }
}

template <Format F, int kRows>
__global__ void __launch_bounds__(kThreads, 2) blocks_kernel(Arguments a) {
  using S = Stored<F>;
  extern __shared__ uint8_t memory[];
  uint8_t* tiles = memory + (1024 - (__cvta_generic_to_shared(memory) & 1023)) % 1024;  // [2][kTileColumns][128]
  uint8_t* row_tiles = tiles + 2 * kTileColumns * 128;                                  // [kRowTiles][kRows][128]
  uint8_t* stages = row_tiles + kRowTiles * kRows * 128;
  const int thread = threadIdx.x, warpgroup = thread / 128;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * kTileColumns;
  const int all_stages = static_cast<int>((a.padded_k + 255) / 256);
  const int first_stage = all_stages * static_cast<int>(blockIdx.z) / a.sums.splits;
  const int end_stage = all_stages * static_cast<int>(blockIdx.z + 1) / a.sums.splits;
  const int first_step = first_stage * kStageSteps;
  const int steps = min(end_stage * kStageSteps, static_cast<int>(a.padded_k / kTileK)) - first_step;

  const int last_column = static_cast<int>(min(static_cast<int64_t>(kTileColumns), a.weight.rows - first_column)) - 1;
  const uint8_t* stored_tile =
      a.weight.data + first_column * a.weight.row_bytes + static_cast<int64_t>(first_stage) * S::kBytes;
  const auto stored_at = [&](int column, int stage) {
    return stored_tile + static_cast<uint64_t>(min(column, last_column)) * static_cast<uint32_t>(a.weight.row_bytes) +
           stage * S::kBytes;
  };
  const auto before = [](uint32_t address) { return kAligned<F> ? 0 : static_cast<int>(address & 15); };
  const auto fetch_weights = [&](int stage) {
    if (first_stage + stage >= end_stage) return;
    const int64_t left = a.weight.row_bytes - static_cast<int64_t>(first_stage + stage) * S::kBytes;
    const int bytes = static_cast<int>(min(left, static_cast<int64_t>(S::kBytes)));
#pragma unroll
    for (int i = 0; i < (kTileColumns * S::kPieces + kThreads - 1) / kThreads; ++i) {
      const int at = thread + i * kThreads, column = at / S::kPieces, piece = at % S::kPieces;
      if (column >= kTileColumns) continue;
      const uint8_t* from = stored_at(column, stage);
      const int extra = before(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)));
      if (piece * 16 >= extra + bytes) continue;
      copy_async(stages + stage % kStages * S::kStageBytes + column * S::kPitch + piece * 16,
                 from - extra + piece * 16);
    }
  };
  constexpr int kRowPieces = (kRows * 8 + kThreads - 1) / kThreads;  // of 16 bytes, per thread and step
  const __nv_bfloat16* row_pieces[kRowPieces];
#pragma unroll
  for (int i = 0; i < kRowPieces; ++i) {
    const int64_t source = min(first_row + thread / 8 + i * (kThreads / 8), a.sums.rows - 1);
    row_pieces[i] = a.x + source * a.padded_k + static_cast<int64_t>(first_step) * kTileK + thread % 8 * 8;
  }
  const auto fetch_rows = [&](int step) {
    if (step >= steps || thread >= kRows * 8) return;
    uint8_t* tile = row_tiles + step % kRowTiles * kRows * 128;
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      copy_async(tile + swizzled(thread / 8 + i * (kThreads / 8), thread % 8), row_pieces[i] + step * kTileK);
    }
  };
  const auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };

  for (int s = 0; s < kStages - 1; ++s) fetch_weights(s);
  wait_for_previous();
  for (int s = 0; s < kRowsAhead; ++s) fetch_rows(s);
  for (int i = 0; i < kRowsAhead; ++i) commit();  // the first of them has all; then one group per step
  float sums[kRows / 2] = {};
  const int column = thread / 2, half = thread % 2;
  const uint32_t column_address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(stored_at(column, 0)));
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kRowsAhead - 1) : "memory");
    __syncthreads();
    const int stage = step / kStageSteps;
    if (step % kStageSteps == 0) fetch_weights(stage + kStages - 1);
    fetch_rows(step + kRowsAhead);
    commit();
    uint8_t* tile = tiles + step % 2 * kTileColumns * 128;
    const int run = step % kStageSteps * 2 + half;
    const SharedBytes stored{stages + stage % kStages * S::kStageBytes + column * S::kPitch,
                             before(column_address + static_cast<uint32_t>(stage * S::kBytes))};
    dequantize<F>(tile, column, half, stored, run, ((first_step + step) * 2 + half) * 32 < a.k);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint64_t left = tile_descriptor(tile + warpgroup * 64 * 128);
    const uint64_t right = tile_descriptor(row_tiles + step % kRowTiles * kRows * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) wgmma<kRows>(sums, left + 2 * k, right + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  store_sums<kRows>(a.sums, sums, first_row, first_column + warpgroup * 64);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(Sums a) {
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, count = a.rows * a.columns;
  if (at >= count) return;
  float sum = a.parts[at];
  for (int s = 1; s < a.splits; ++s) sum += a.parts[s * count + at];
  a.out.y[at / a.columns * a.out.stride + at % a.columns] = finished(sum, a.out, at % a.columns);
}

template <Format F, int kRows>
cudaError_t start(const Launch& on, const Arguments& a) {
  const dim3 grid(static_cast<unsigned>((a.sums.rows + kRows - 1) / kRows),
                  static_cast<unsigned>((a.sums.columns + kTileColumns - 1) / kTileColumns),
                  static_cast<unsigned>(a.sums.splits));
  return launch(on, blocks_kernel<F, kRows>, grid, dim3(kThreads), kSharedBytes<F, kRows>, a);
}

}  // namespace

int wgmma_blocks_splits(const Launch& on, int64_t rows, int64_t padded_k, const Weight& weight) {
  constexpr size_t kOfTwo = 113 * 1024;  // of a multiprocessor, for each of two blocks
  bool two = false;
  with_block_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    two = (rows <= 16 ? kSharedBytes<F, 16> : kSharedBytes<F, 64>) <= kOfTwo;
    return cudaSuccess;
  });
  const int64_t tiles = (weight.rows + kTileColumns - 1) / kTileColumns;
  return splits_of(on.num_multiprocessors * (two ? 2 : 1), tiles, padded_k / 256 / 2);
}

cudaError_t matmul_wgmma_blocks(const Launch& on, const void* x, int64_t rows, int64_t k, int64_t padded_k,
                                const Weight& weight, float* parts, const Product& out) {
  const int splits = wgmma_blocks_splits(on, rows, padded_k, weight);
  const Arguments a{static_cast<const __nv_bfloat16*>(x),
                    weight,
                    k,
                    padded_k,
                    {rows, weight.rows, splits, splits > 1 ? parts : nullptr, out}};
  const cudaError_t status = with_block_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    return rows <= 16 ? start<F, 16>(on, a) : start<F, 64>(on, a);
  });
  if (status != cudaSuccess || splits == 1) return status;
  const int64_t count = rows * weight.rows;
  return launch(on, sum_kernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0,
                a.sums);
}

}  // namespace trivet::cuda
