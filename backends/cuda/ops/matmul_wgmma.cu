// Products of more than a few rows on Hopper's warpgroup tensor cores: x and weights in bfloat16, float32 sums. A block
// has a warpgroup that keeps a ring of stages of 64 of k filled, by the copy engine, and two that multiply; it goes
// from tile to tile. A tile is up to 128 rows by 256 columns (of which half are a gate's and half the values that it
// gates). Where there are too few tiles for all multiprocessors, the blocks of a cluster have a part of k each and add
// up their sums in order.
#include "activation.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace trivet::cuda {
namespace {

constexpr int kTileK = 64;
constexpr int kConsumers = 256, kThreads = 128 + kConsumers;
constexpr int kMostParts = 4, kLeastSteps = 4;  // of k, and steps of one of them
constexpr int kTileGroup = 16;  // tiles of rows that are done for all columns before the next ones: x stays in the L2

// 128 rows by 256 columns: each of the consumers' warpgroups has half of the rows. For up to 64 rows the weights are
// the left operand, of 64 rows, so that few rows of x waste nothing: of 256 columns each warpgroup has half; of 128
// each has all, but only half of every 64 of k.
template <int kTileRows, int kTileColumns>
struct Tile {
  static constexpr bool kWeightsLeft = kTileRows < 128;
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kHalf = kColumns / 2;
  static constexpr int kWidth = kWeightsLeft ? kRows : kColumns;  // of the right operand
  static constexpr int kParts = kColumns == 128 ? 2 : 1;          // of k, within a block
  static constexpr int kPartThreads = kConsumers / kParts;
  static constexpr int kSums = kRows * kColumns / kPartThreads;  // of a thread
  static constexpr int kStageBytes = (kColumns + kRows) * kTileK * 2;
  static constexpr int kStages = 220 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;

  // Where the sums of a thread of the consumers begin in the tile, and how far from there a sum is.
  static __device__ __forceinline__ int first_row(int thread) {
    return kWeightsLeft ? thread % 4 * 2 : thread / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int first_column(int thread) {
    return kWeightsLeft ? thread % kPartThreads / 32 * 16 + thread % 32 / 4 : thread % 4 * 2;
  }
  static __device__ __forceinline__ int row_offset(int sum) {
    return kWeightsLeft ? sum % (kWidth / 2) / 4 * 8 + sum % 2 : sum / 2 % 2 * 8;
  }
  static __device__ __forceinline__ int column_offset(int sum) {
    return kWeightsLeft ? sum / (kWidth / 2) * kHalf + sum / 2 % 2 * 8 : sum / 4 * 8 + sum % 2;
  }
};

struct Segment {
  int first_tile;        // of all tiles of columns
  int64_t first_column;  // of y and bias; of the second of a gated pair, of bias alone
  int64_t columns;
};

struct Arguments {
  CUtensorMap x, weights[kMaxSegments];  // a gated pair: the gate's and the up columns'
  Segment segments[kMaxSegments];
  int count, row_tiles, column_tiles, steps;
  int64_t rows;
  Product out;
  Epilogue epilogue;
  __nv_bfloat16* rounded;           // of gated products: y once more
  bool constant_weights, in_pairs;  // in_pairs: columns begin and end at even ones
};

// What a block does: its part of k, as one of a cluster, of these tiles.
struct Share {
  int rank, size, first_step, steps, first_tile, num_tiles, stride;

  __device__ __forceinline__ explicit Share(const Arguments& a)
      : rank(rank_in_cluster()),
        size(cluster_size()),
        first_step(a.steps * rank / size),
        steps(a.steps * (rank + 1) / size - first_step),
        first_tile(blockIdx.x / size),
        num_tiles(a.row_tiles * a.column_tiles),
        stride(gridDim.x / size) {}
};

struct Place {  // where a tile begins
  int64_t row;
  int segment, column;  // in the segment
};

template <class T>
__device__ __forceinline__ Place place_of(const Arguments& a, int tile) {
  const int group = tile / (kTileGroup * a.column_tiles), first = group * kTileGroup;
  const int here = min(kTileGroup, a.row_tiles - first), rest = tile - first * a.column_tiles;
  const int row_tile = first + rest % here, column_tile = rest / here;
  int segment = 0;
  while (segment + 1 < a.count && column_tile >= a.segments[segment + 1].first_tile) ++segment;
  const int width = a.epilogue == Epilogue::kNone ? T::kColumns : T::kHalf;
  return {static_cast<int64_t>(row_tile) * T::kRows, segment, (column_tile - a.segments[segment].first_tile) * width};
}

// The stage whose turn it is, and the parity of its phase.
template <int kStages>
struct Turn {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// One thread keeps the stages filled.
template <class T>
struct Producer {
  const Arguments& a;
  uint8_t* ring;
  Barrier *full, *empty;
  const Share share;

  __device__ __forceinline__ void copy_weights(const Place& place, int step, int stage) const {
    const bool gated = a.epilogue != Epilogue::kNone;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const CUtensorMap& map = a.weights[gated ? half : place.segment];
      uint8_t* target = ring + stage * T::kStageBytes + half * T::kHalf * 128;
      const int row = place.column + (gated ? 0 : half * T::kHalf), k = (share.first_step + step) * kTileK;
      copy_box(target, map, k, row, full[stage]);
    }
  }
  __device__ __forceinline__ void copy_rows(const Place& place, int step, int stage) const {
    copy_box(ring + stage * T::kStageBytes + T::kColumns * 128, a.x, (share.first_step + step) * kTileK,
             static_cast<int>(place.row), full[stage]);
  }

  // Weights of the first stages may come before the end of the kernel that makes x.
  __device__ __forceinline__ void run() const {
    Place place = place_of<T>(a, share.first_tile);
    const int early = a.constant_weights ? min(share.steps, T::kStages) : 0;
    for (int step = 0; step < early; ++step) {
      full[step].expect(T::kStageBytes);
      copy_weights(place, step, step);
    }
    wait_for_previous();
    Turn<T::kStages> turn;
    for (int tile = share.first_tile; tile < share.num_tiles; tile += share.stride) {
      place = place_of<T>(a, tile);
      for (int step = 0; step < share.steps; ++step, turn.next()) {
        if (tile != share.first_tile || step >= early) {
          empty[turn.stage].wait(turn.parity ^ 1);
          full[turn.stage].expect(T::kStageBytes);
          copy_weights(place, step, turn.stage);
        }
        copy_rows(place, step, turn.stage);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void multiply(float (&sums)[T::kSums], const uint8_t* stage, int warpgroup) {
  const uint8_t *weights = stage, *x = stage + T::kColumns * 128;
  if (T::kParts == 1) (T::kWeightsLeft ? weights : x) += warpgroup * 64 * 128;
  const int first_k = T::kParts == 1 ? 0 : warpgroup * (kTileK / 2) * 2;  // bytes
  const uint64_t left = tile_descriptor((T::kWeightsLeft ? weights : x) + first_k);
  const uint64_t right = tile_descriptor((T::kWeightsLeft ? x : weights) + first_k);
  constexpr int kBlockSums = T::kWidth / 2;
#pragma unroll
  for (int k = 0; k < kTileK / 16 / T::kParts; ++k) {
#pragma unroll
    for (int block = 0; block < T::kSums / kBlockSums; ++block) {
      wgmma<T::kWidth>(reinterpret_cast<float (&)[kBlockSums]>(sums[block * kBlockSums]),
                       left + block * (T::kHalf * 128 / 16) + 2 * k, right + 2 * k);
    }
  }
}

__device__ __forceinline__ void put(float* to, float x) { *to = x; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void put_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
__device__ __forceinline__ void put_pair(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

// Sums from number `first` of a thread on, whose place in y is `to`; so many rows and columns from there are inside.
template <class T, int kCount, class V>
__device__ __forceinline__ void put_all(V* to, int64_t stride, bool in_pairs, int rows, int columns, int first,
                                        const float* values) {
  if (!T::kWeightsLeft && in_pairs) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int row = T::row_offset(first + i), column = T::column_offset(first + i);
      if (row < rows && column < columns) put_pair(to + row * stride + column, values[i], values[i + 1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = T::row_offset(first + i), column = T::column_offset(first + i);
    if (row < rows && column < columns) put(to + row * stride + column, values[i]);
  }
}

// Sums from number `first` of a thread on, `values`, become values of y; `up`: those of the columns that they gate.
template <class T, int kCount>
__device__ __forceinline__ void store(const Arguments& a, const Place& place, int thread, int first, float* values,
                                      float* up) {
  const Segment& segment = a.segments[place.segment];
  const int64_t row = place.row + T::first_row(thread), column = place.column + T::first_column(thread);
  const int rows = static_cast<int>(a.rows - row), columns = static_cast<int>(segment.columns - column);
  const auto add_bias = [&](float* target, const float* bias) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int offset = T::column_offset(first + i);
      if (offset < columns) target[i] += bias[column + offset];
    }
  };
  if (a.out.bias != nullptr) {
    add_bias(values, a.out.bias + segment.first_column);
    if (a.epilogue != Epilogue::kNone) add_bias(up, a.out.bias + a.segments[1].first_column);
  }
  if (a.out.soft_cap > 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = a.out.soft_cap * tanhf(values[i] / a.out.soft_cap);
  }
  if (a.epilogue == Epilogue::kSwiglu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = gated(values[i], up[i], Epilogue::kSwiglu);
  } else if (a.epilogue == Epilogue::kGeglu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = gated(values[i], up[i], Epilogue::kGeglu);
  }
  const int64_t at = row * a.out.stride + segment.first_column + column;
  put_all<T, kCount>(a.out.y + at, a.out.stride, a.in_pairs, rows, columns, first, values);
  if (a.rounded == nullptr) return;
  put_all<T, kCount>(a.rounded + at, a.out.stride, a.in_pairs, rows, columns, first, values);
}

// The place of four sums of a thread in a ring, when nothing else needs it any more.
template <class T>
__device__ __forceinline__ int quad_place(int part, int quad, int thread) {
  return (part * (T::kSums / 4) + quad) * T::kPartThreads + thread % T::kPartThreads;
}

// Adds up the sums of all parts of k, which the rings of a cluster hold, and stores this thread's share.
template <class T>
__device__ __forceinline__ void store_total(const Arguments& a, const Share& share, const Place& place,
                                            const uint8_t* ring, int thread) {
  const float4* quads = reinterpret_cast<const float4*>(ring);
  const auto total = [&](int quad, float (&values)[4]) {
    float4 parts[kMostParts * T::kParts];
#pragma unroll
    for (int i = 0; i < kMostParts * T::kParts; ++i) {
      if (i / T::kParts >= share.size) break;
      parts[i] = of_block(quads, i / T::kParts)[quad_place<T>(i % T::kParts, quad, thread)];
    }
    *reinterpret_cast<float4*>(values) = parts[0];
#pragma unroll
    for (int i = 1; i < kMostParts * T::kParts; ++i) {
      if (i / T::kParts >= share.size) break;
      values[0] += parts[i].x;
      values[1] += parts[i].y;
      values[2] += parts[i].z;
      values[3] += parts[i].w;
    }
  };
  const bool gated = a.epilogue != Epilogue::kNone;
  const int count = T::kSums / 4 / (gated ? 2 : 1);
  const int mine = share.rank * T::kParts + thread / T::kPartThreads, all = share.size * T::kParts;
  for (int quad = count * mine / all; quad < count * (mine + 1) / all; ++quad) {
    float values[4], up[4];
    total(quad, values);
    if (gated) total(quad + count, up);
    store<T, 4>(a, place, thread, quad * 4, values, up);
  }
}

// Two warpgroups multiply; a stage is released when the next one's products are under way.
template <class T>
__device__ __forceinline__ void consume(const Arguments& a, uint8_t* ring, Barrier* full, Barrier* empty,
                                        const Share& share, int thread) {
  const int warpgroup = __shfl_sync(~0u, thread / 128, 0);  // the compiler sees that it is uniform
  const auto release = [&](int stage) {
    if (thread % 32 == 0) empty[stage].arrive();
  };
  Turn<T::kStages> turn;
  wait_for_previous();
  for (int tile = share.first_tile; tile < share.num_tiles; tile += share.stride) {
    const Place place = place_of<T>(a, tile);
    float sums[T::kSums] = {};
    int before = 0;
    for (int step = 0; step < share.steps; ++step, turn.next()) {
      full[turn.stage].wait(turn.parity);
      wgmma_fence();
      multiply<T>(sums, ring + turn.stage * T::kStageBytes, warpgroup);
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = turn.stage;
    }
    wgmma_wait<0>();
    release(before);
    if (T::kParts == 1 && share.size == 1) {
      if (a.epilogue == Epilogue::kNone) {
        store<T, T::kSums>(a, place, thread, 0, sums, sums);
      } else {
        store<T, T::kSums / 2>(a, place, thread, 0, sums, sums + T::kSums / 2);
      }
      continue;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");  // nothing reads the ring any more
#pragma unroll
    for (int i = 0; i < T::kSums; i += 4) {
      reinterpret_cast<float4*>(ring)[quad_place<T>(thread / T::kPartThreads, i / 4, thread)] =
          make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }
    cluster_barrier();
    store_total<T>(a, share, place, ring, thread);
    cluster_barrier();  // no block ends while another one of its cluster reads its memory
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint8_t memory[];
  __shared__ Barrier full[T::kStages], empty[T::kStages];
  uint8_t* ring = memory + (1024 - (shared_address(memory) & 1023)) % 1024;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      full[stage].begin(1);
      empty[stage].begin(kConsumers / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  const Share share(a);
  if (threadIdx.x < 128) {
    give_back_registers<40>();
    if (threadIdx.x == 0) Producer<T>{a, ring, full, empty, share}.run();
    __syncwarp();
    for (int i = 0; T::kParts * share.size > 1 && i < 2; ++i) cluster_barrier();
  } else {
    ask_for_registers<232>();
    consume<T>(a, ring, full, empty, share, static_cast<int>(threadIdx.x) - 128);
  }
}

// Blocks of a cluster need neighbouring multiprocessors at the same time: more than two find them only while a part of
// the device is free.
int parts_of(const Launch& on, int tiles, int steps) {
  int parts = 1;
  for (int more = 2; more <= kMostParts && steps / more >= kLeastSteps; ++more) {
    if (tiles * more <= (more == 2 ? on.num_multiprocessors : on.num_multiprocessors * 3 / 4)) parts = more;
  }
  return parts;
}

int tiles_of(int64_t count, int size) { return static_cast<int>((count + size - 1) / size); }

struct Operands {
  const void* x;
  int64_t padded_k;
  const WgmmaWeight* weights;
  int count;
};

// Lays out the tiles; the rest of `a` is there already.
template <class T>
cudaError_t start(const Launch& on, Arguments a, const Operands& from) {
  cudaError_t status = make_tensor_map(a.x, from.x, a.rows, from.padded_k, T::kRows);
  const bool gated = a.epilogue != Epilogue::kNone;
  for (int i = 0; i < from.count && status == cudaSuccess; ++i) {
    const WgmmaWeight& weight = from.weights[i];
    status = make_tensor_map(a.weights[i], weight.data, weight.rows, weight.k, T::kHalf);
    a.segments[i] = {a.column_tiles, weight.column, weight.rows};
    if (!gated || i == 0) a.column_tiles += tiles_of(weight.rows, gated ? T::kHalf : T::kColumns);
  }
  if (status != cudaSuccess) return status;
  a.row_tiles = tiles_of(a.rows, T::kRows);
  const int tiles = a.row_tiles * a.column_tiles, parts = parts_of(on, tiles, a.steps);
  const int most = on.num_multiprocessors / parts, clusters = tiles < most ? tiles : most;
  return launch_clusters(on, wgmma_kernel<T>, dim3(static_cast<unsigned>(clusters * parts)), dim3(kThreads),
                         T::kSharedBytes, static_cast<unsigned>(parts), a);
}

// Tiles of up to 64 rows: narrow ones, each done by one block, where there are multiprocessors for them.
template <int kRows>
cudaError_t start_few(const Launch& on, const Arguments& a, const Operands& from) {
  using Narrow = Tile<kRows, 128>;
  const bool gated = a.epilogue != Epilogue::kNone;
  int tiles = 0;
  for (int i = 0; i < (gated ? 1 : from.count); ++i) {
    tiles += tiles_of(from.weights[i].rows, gated ? Narrow::kHalf : Narrow::kColumns);
  }
  return tiles <= on.num_multiprocessors ? start<Narrow>(on, a, from) : start<Tile<kRows, 256>>(on, a, from);
}

}  // namespace

cudaError_t matmul_wgmma(const Launch& on, const void* x, int64_t rows, int64_t padded_k, const WgmmaWeight* weights,
                         int count, Epilogue epilogue, void* rounded, const Product& out) {
  Arguments a{};
  a.count = epilogue == Epilogue::kNone ? count : 1;
  a.steps = static_cast<int>(padded_k / kTileK);
  a.rows = rows;
  a.out = out;
  a.epilogue = epilogue;
  a.rounded = static_cast<__nv_bfloat16*>(rounded);
  a.constant_weights = true;
  a.in_pairs = out.stride % 2 == 0 && reinterpret_cast<uintptr_t>(out.y) % 8 == 0;
  for (int i = 0; i < count; ++i) {
    a.constant_weights &= weights[i].constant;
    a.in_pairs &= weights[i].rows % 2 == 0 && weights[i].column % 2 == 0;
  }
  const Operands from{x, padded_k, weights, count};
  if (rows <= 16) return start_few<16>(on, a, from);
  return rows <= 64 ? start_few<64>(on, a, from) : start<Tile<128, 256>>(on, a, from);
}

}  // namespace trivet::cuda
