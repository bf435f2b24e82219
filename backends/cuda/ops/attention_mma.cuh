// Pieces of attention on tensor cores: 16 by 8 by 16 products of float16 or bfloat16 with float32 sums. A cache of E4M3
// goes into shared memory as float16, which holds all its values.
#pragma once

#include <type_traits>

#include "attention.cuh"

namespace trivet::cuda {

template <bool kTransposed>
__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], const void* shared) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// A finite number that T cannot hold becomes the largest that it can.
template <class T>
__device__ __forceinline__ float in_range(float x) {
  if (!std::is_same_v<T, __half> || !isfinite(x)) return x;
  return fminf(fmaxf(x, -65504.0f), 65504.0f);
}

// Two values of T, each with what rounding took from it.
template <class T>
struct Split {
  uint32_t high, low;
};
template <class T>
__device__ __forceinline__ Split<T> split(float x, float y) {
  const T pair[2] = {from_float<T>(x), from_float<T>(y)};
  const T rest[2] = {from_float<T>(x - to_float(pair[0])), from_float<T>(y - to_float(pair[1]))};
  const auto bits = [](const T(&two)[2]) {
    return static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(&two[0])) |
           static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(&two[1])) << 16;
  };
  return {bits(pair), bits(rest)};
}

// What an element S of the cache is in a product.
template <class S>
using Factor = std::conditional_t<std::is_same_v<S, E4M3>, __half, S>;

// Rows of kDim factors lie in shared memory so many bytes apart.
template <int kDim>
constexpr int kRowBytes = (kDim + 63) / 64 * 128;

// Byte of element `column` (a multiple of 8) of a row; pieces of 16 bytes are exchanged so that eight rows of a matrix
// lie in different banks.
template <int kDim>
__device__ __forceinline__ int place(int row, int column) {
  return row * kRowBytes<kDim> + (((column >> 3) ^ (row & 7)) << 4);
}

// Rows of the cache on their way into shared memory, moved by kThreadCount threads; `thread` counts them.
template <class S, int kDim, int kRowCount, int kThreadCount>
class RowsInFlight {
 public:
  // Row i starts at element rows[i] of `cache`; where that is negative, it becomes zeros.
  __device__ __forceinline__ void begin(const S* cache, const int64_t* rows, uint8_t* to, int thread) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = thread + i * kThreadCount, row = at / kRowPieces, column = at % kRowPieces * kWide;
      if (kPieces % kThreadCount != 0 && at >= kPieces) break;
      const bool given = rows[row] >= 0;
      const S* from = cache + (given ? rows[row] + column : 0);
      if constexpr (kConverts) {
        pieces_[i] = given ? __ldcg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
      } else {
        copy_async(to + place<kDim>(row, column), from, given);
      }
    }
  }

  // What this thread moves is there, for this thread; `to` as given to begin().
  __device__ __forceinline__ void end(uint8_t* to, int thread) {
    if constexpr (kConverts) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = thread + i * kThreadCount, row = at / kRowPieces, column = at % kRowPieces * kWide;
        if (kPieces % kThreadCount != 0 && at >= kPieces) break;
        const uint4 piece = pieces_[i];
        *reinterpret_cast<uint4*>(to + place<kDim>(row, column)) = widened(piece.x, piece.y);
        *reinterpret_cast<uint4*>(to + place<kDim>(row, column + 8)) = widened(piece.z, piece.w);
      }
    } else {
      wait_for_copies();
    }
  }

 private:
  static constexpr bool kConverts = std::is_same_v<S, E4M3>;
  static constexpr int kWide = 16 / sizeof(S), kRowPieces = kDim / kWide, kPieces = kRowCount * kRowPieces;
  static constexpr int kEach = (kPieces + kThreadCount - 1) / kThreadCount;

  // Eight E4M3 as float16.
  static __device__ __forceinline__ uint4 widened(uint32_t low, uint32_t high) {
    return make_uint4(to_halves(static_cast<uint16_t>(low)), to_halves(static_cast<uint16_t>(low >> 16)),
                      to_halves(static_cast<uint16_t>(high)), to_halves(static_cast<uint16_t>(high >> 16)));
  }

  uint4 pieces_[kConverts ? kEach : 1];
};

}  // namespace trivet::cuda
