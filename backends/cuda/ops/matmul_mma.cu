// Products of many rows on tensor cores: tiles of 128 rows by 128 columns (64 by 32 for up to 64 rows, so that all
// multiprocessors get some), 64 of k at a time. The weights of a tile are dequantised in registers to bfloat16 on their
// way into shared memory; sums are float32. Two buffers: the next step's loads are in flight while this step's products
// run.
#include <type_traits>

#include "activation.cuh"
#include "formats.cuh"

namespace trivet::cuda {
namespace {

constexpr int kTileK = 64;
constexpr int kStride = kTileK + 8;  // elements; 16 bytes of padding spread the rows over the banks
constexpr int kRunsPerStep = kTileK / 32;

// A tile, the warps that share it and what one warp makes of it. A thread dequantises one run of 32 weights per step.
// Where tiles are few, several groups of warps take the steps of one in turn and add up their sums at the end, in a
// fixed order.
template <int kTileRows, int kTileColumns, int kWarpsAcross, int kSplit>
struct Shape {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kGroups = kSplit;
  static constexpr int kThreads = kTileColumns * kRunsPerStep;  // of a group
  static constexpr int kWarpsDown = kThreads / 32 / kWarpsAcross;
  static constexpr int kWarpRows = kTileRows / kWarpsDown, kWarpColumns = kTileColumns / kWarpsAcross;
  static constexpr int kBufferElements = (kTileRows + kTileColumns) * kStride;
  static constexpr size_t kSharedBytes = 2 * kGroups * kBufferElements * sizeof(__nv_bfloat16);
};
using Large = Shape<128, 128, 4, 1>;  // 8 warps of 64 by 32
using Small = Shape<64, 32, 1, 3>;    // 3 times 2 warps of 32 by 32
constexpr int64_t kSmallRows = 64;

struct Arguments {
  const __nv_bfloat16* x;
  int64_t rows, k, padded_k;
  const uint8_t* weight;
  int64_t columns, row_bytes;
  Product out;
};

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], const __nv_bfloat16* shared) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One thread's share of a step's weights: a run of 32 of one column.
template <Format F>
struct Piece {
  static constexpr bool kBlock = kIsBlock<F>;
  std::conditional_t<kBlock, Run32, uint4[4]> data;

  __device__ __forceinline__ void load(const uint8_t* row, int run, int64_t k) {
    if constexpr (kBlock) {
      if (run * 32 < k) {
        data = read_run<F>(GlobalBytes{row}, run);
      } else {
        data = Run32{};
      }
    } else {
      float values[32];
      const bool wide = F == Format::kBF16 && k % 8 == 0 && run * 32 + 32 <= k;
      if (wide) {
        const uint4* source = reinterpret_cast<const uint4*>(row + static_cast<int64_t>(run) * 64);
#pragma unroll
        for (int i = 0; i < 4; ++i) data[i] = __ldg(source + i);
        return;
      }
      read_floats<F>(row, run, k, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = pack_bfloat16(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
        data[i] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void store(__nv_bfloat16* shared) const {
    uint4* target = reinterpret_cast<uint4*>(shared);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBlock) {
        target[i] = bfloat16_words<F>(data, i);
      } else {
        target[i] = data[i];
      }
    }
  }
};

template <Format F, class S>
__global__ void __launch_bounds__(S::kThreads* S::kGroups, 2) mma_kernel(Arguments a) {
  constexpr int kTileRows = S::kRows, kTileColumns = S::kColumns, kThreads = S::kThreads;
  constexpr int kBufferElements = S::kBufferElements;
  constexpr int kDown = S::kWarpRows / 16, kAcross = S::kWarpColumns / 8;  // products of 16 by 8 of a warp
  extern __shared__ __align__(16) __nv_bfloat16 all_shared[];
  const int group = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, lane = thread & 31, warp = thread >> 5;
  __nv_bfloat16* shared = all_shared + group * 2 * kBufferElements;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * kTileColumns;
  const int steps = static_cast<int>(a.padded_k / kTileK);
  const int rounds = (steps + S::kGroups - 1) / S::kGroups;  // a group has the steps group, group + kGroups, ...
  const int64_t my_column = first_column + thread / kRunsPerStep;
  const uint8_t* my_weights = a.weight + (my_column < a.columns ? my_column : a.columns - 1) * a.row_bytes;
  const int my_run = thread % kRunsPerStep;
  wait_for_previous();

  const auto load_rows = [&](int step, __nv_bfloat16* buffer) {
#pragma unroll
    for (int i = 0; i < kTileRows * (kTileK / 8) / kThreads; ++i) {
      const int piece = thread + i * kThreads, row = piece / (kTileK / 8), part = piece % (kTileK / 8);
      const int64_t source = first_row + row < a.rows ? first_row + row : a.rows - 1;
      copy_async(buffer + row * kStride + part * 8, a.x + source * a.padded_k + step * kTileK + part * 8);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto weights_of = [&](__nv_bfloat16* buffer) {
    return buffer + kTileRows * kStride + (thread / kRunsPerStep) * kStride + my_run * 32;
  };

  float acc[kDown][kAcross][4] = {};
  Piece<F> piece;
  if (group < steps) {
    load_rows(group, shared);
    piece.load(my_weights, group * kRunsPerStep + my_run, a.k);
    piece.store(weights_of(shared));
  }
  const int warp_row = warp % S::kWarpsDown * S::kWarpRows, warp_column = warp / S::kWarpsDown * S::kWarpColumns;
  for (int round = 0; round < rounds; ++round) {
    __nv_bfloat16* current = shared + (round & 1) * kBufferElements;
    __nv_bfloat16* next = shared + ((round + 1) & 1) * kBufferElements;
    const int step = round * S::kGroups + group;
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    const bool more = step + S::kGroups < steps;
    if (more) {
      load_rows(step + S::kGroups, next);
      piece.load(my_weights, (step + S::kGroups) * kRunsPerStep + my_run, a.k);
    }
    if (S::kGroups > 1 && step >= steps) continue;
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      uint32_t left[kDown][4], right[kAcross / 2][4];
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
        load_matrix(left[i], current + (warp_row + i * 16 + (lane & 15)) * kStride + k + (lane >> 4) * 8);
      }
#pragma unroll
      for (int j = 0; j < kAcross / 2; ++j) {
        const int column = warp_column + j * 16 + (lane & 7) + (lane >> 4) * 8;
        load_matrix(right[j], current + kTileRows * kStride + column * kStride + k + (lane >> 3 & 1) * 8);
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kAcross; ++j) {
          multiply(acc[i][j], left[i], right[j >> 1][(j & 1) * 2], right[j >> 1][(j & 1) * 2 + 1]);
        }
      }
    }
    if (more) piece.store(weights_of(next));
  }
  if constexpr (S::kGroups > 1) {
    float* sums = reinterpret_cast<float*>(all_shared);
    for (int g = 1; g < S::kGroups; ++g) {
      __syncthreads();
      if (group == g) {
#pragma unroll
        for (int i = 0; i < kDown * kAcross * 4; ++i)
          sums[i * kThreads + thread] = acc[i / (kAcross * 4)][i / 4 % kAcross][i % 4];
      }
      __syncthreads();
      if (group == 0) {
#pragma unroll
        for (int i = 0; i < kDown * kAcross * 4; ++i)
          acc[i / (kAcross * 4)][i / 4 % kAcross][i % 4] += sums[i * kThreads + thread];
      }
    }
    if (group != 0) return;
  }
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = first_row + warp_row + i * 16 + (lane >> 2) + (e >> 1) * 8;
        const int64_t column = first_column + warp_column + j * 8 + (lane & 3) * 2 + (e & 1);
        if (row < a.rows && column < a.columns) {
          a.out.y[row * a.out.stride + column] = finished(acc[i][j][e], a.out, column);
        }
      }
    }
  }
}

template <Format F, class S>
cudaError_t start(const Launch& on, const Arguments& a) {
  const dim3 grid(static_cast<unsigned>((a.rows + S::kRows - 1) / S::kRows),
                  static_cast<unsigned>((a.columns + S::kColumns - 1) / S::kColumns));
  return launch(on, mma_kernel<F, S>, grid, dim3(S::kThreads * S::kGroups), S::kSharedBytes, a);
}

}  // namespace

cudaError_t matmul_mma(const Launch& on, const void* x, int64_t rows, int64_t k, int64_t padded_k, const Weight& weight,
                       const Product& out) {
  if (rows == 0) return cudaSuccess;
  const Arguments a{
      static_cast<const __nv_bfloat16*>(x), rows, k, padded_k, weight.data, weight.rows, weight.row_bytes, out};
  return with_format(weight.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    return rows <= kSmallRows ? start<F, Small>(on, a) : start<F, Large>(on, a);
  });
}

}  // namespace trivet::cuda
