// Products of a few rows with block formats: int8 activations, exact integer dots per run of 32 weights, float32 sums.
#include "lane_pairs.cuh"
#include "matvec.cuh"

namespace trivet::cuda {
namespace {

constexpr int kSliceRuns = 64;                             // of 32 weights; a lane takes two of them
constexpr size_t kUnitBytes = 2 * 32 * 8 * sizeof(float);  // the sums of a gated pair's 32 columns and 8 rows

template <Format F>
struct Blocks {
  using Input = QuantizedRows;
  using X = Activations;
  using Pair = LanePair<F>;
  static constexpr int kSliceWeights = kSliceRuns * 32, kSliceBytes = BlockReader<F>::kBytesOf2048;
  static constexpr bool kAligned = cuda::kAligned<F>;
  // So many that three blocks of kFewWarps share a multiprocessor.
  static constexpr int kStages = kSliceBytes + (kAligned ? 0 : 32) <= 1184 ? 8 : 4;
  static constexpr int kMostThreads = 3 * kFewWarps * 32;  // leaves the registers for three such blocks
  static_assert((kSliceBytes + (kAligned ? 0 : 32)) % 16 == 0);

  struct Place {
    int runs, run;
    typename Pair::Place pair;
    __device__ __forceinline__ Place(int lane, int slice, int k)
        : runs(k / 32),
          run(slice * kSliceRuns + Pair::first_run(lane)),
          pair(Pair::first_run(lane), min(kSliceRuns, runs - slice * kSliceRuns)) {}

    __device__ __forceinline__ X x(const QuantizedRows& rows, int64_t row) const {
      const int4* values = reinterpret_cast<const int4*>(rows.values) + row * runs * 2;
      const float2* scales = rows.scales + row * runs;
      X result;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int wanted = run + i * Pair::kRunDistance, at = min(wanted, runs - 1);
        result.values[i][0] = values[at];
        result.values[i][1] = values[at + runs];
        const float2 scale = scales[at];
        result.scales[i] = wanted < runs ? make_float2(scale.x * Pair::unit(i), scale.y) : make_float2(0.0f, 0.0f);
      }
      return result;
    }
  };

  struct Weights : Pair {
    __device__ __forceinline__ Weights(const SharedBytes& slice, const Place& place) : Pair(slice, place.pair) {}
  };
};

}  // namespace

bool matvec_int8_takes(const Launch& on, Format format, int64_t k) {
  bool fits = false;
  with_block_format(format, [&](auto tag) {
    fits = matvec_fits<Blocks<decltype(tag)::value>>(on, k, kUnitBytes);
    return cudaSuccess;
  });
  return fits;
}

cudaError_t matvec_int8(const Launch& on, const QuantizedRows& x, int64_t rows, int64_t k, const Weight* weights,
                        int count, const Gate& gate, const Product& out) {
  if (rows == 0) return cudaSuccess;
  const auto a = matvec_arguments(x, rows, k, weights, count, gate, out);
  return with_block_format(weights[0].format, [&](auto tag) { return matvec<Blocks<decltype(tag)::value>>(on, a); });
}

}  // namespace trivet::cuda
