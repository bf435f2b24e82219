// Weights as bfloat16 rows, for products that read each of them many times.
#include "formats.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has a run of 32 weights; rows end with zeros up to padded_k. Runs go through shared memory, so that a warp
// writes whole lines.
template <Format F>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(Weight weight, int64_t k, unsigned runs_per_row, unsigned count, uint4* out) {
  __shared__ uint4 pieces[kThreads * 4];
  wait_for_previous();
  const unsigned first = blockIdx.x * kThreads, thread = threadIdx.x, at = min(first + thread, count - 1);
  const unsigned row = at / runs_per_row;
  const int run = static_cast<int>(at - row * runs_per_row);
  const uint8_t* source = weight.data + row * weight.row_bytes;
  const auto place = [](unsigned owner, unsigned piece) { return owner * 4 + (piece ^ (owner / 2 & 3)); };
  if constexpr (kIsBlock<F>) {
    Run32 weights{};
    if (run * 32 < k) weights = read_run<F>(GlobalBytes{source}, run);
#pragma unroll
    for (int i = 0; i < 4; ++i) pieces[place(thread, i)] = bfloat16_words<F>(weights, i);
  } else {
    float values[32] = {};
    if (run * 32 < k) read_floats<F>(source, run, k, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_bfloat16(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
      pieces[place(thread, i)] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (unsigned i = thread; i < kThreads * 4; i += kThreads) {
    if (first + i / 4 < count) out[static_cast<size_t>(first) * 4 + i] = pieces[place(i / 4, i % 4)];
  }
}

}  // namespace

cudaError_t dequantize_rows(const Launch& on, const Weight& weight, int64_t k, int64_t padded_k, void* bfloat16_out) {
  const int64_t runs = padded_k / 32, count = weight.rows * runs;
  if (count > UINT32_MAX / 2) return cudaErrorInvalidValue;
  return with_format(weight.format, [&](auto tag) {
    return launch(on, dequantize_kernel<decltype(tag)::value>,
                  dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0, weight, k,
                  static_cast<unsigned>(runs), static_cast<unsigned>(count), static_cast<uint4*>(bfloat16_out));
  });
}

}  // namespace trivet::cuda
