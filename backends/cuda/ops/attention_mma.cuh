// Pieces of attention on tensor cores: 16 by 8 by 16 products of float16 or bfloat16 with float32 sums.
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

// Byte of element `column` (a multiple of 8) of a row of kDim 2-byte elements; pieces of 16 bytes are exchanged so that
// eight rows of a matrix lie in different banks.
template <int kDim>
__device__ __forceinline__ int place(int row, int column) {
  return row * kDim * 2 + (((column >> 3) ^ (row & 7)) << 4);
}

}  // namespace trivet::cuda
