// Weights as bfloat16 rows, for products that read each of them many times.
#include "formats.cuh"

namespace trivet::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has a run of 32 weights; rows end with zeros up to padded_k.
template <Format F>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(Weight weight, int64_t k, int64_t padded_k, __nv_bfloat16* out) {
  wait_for_previous();
  const int64_t runs = padded_k / 32, at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= weight.rows * runs) return;
  const int64_t row = at / runs;
  const int run = static_cast<int>(at % runs);
  const uint8_t* source = weight.data + row * weight.row_bytes;
  uint4* target = reinterpret_cast<uint4*>(out + row * padded_k + run * 32);
  if constexpr (kIsBlock<F>) {
    Run32 weights{};
    if (run * 32 < k) weights = read_run<F>(GlobalBytes{source}, run);
#pragma unroll
    for (int i = 0; i < 4; ++i) target[i] = bfloat16_words<F>(weights, i);
  } else {
    float values[32] = {};
    if (run * 32 < k) read_floats<F>(source, run, k, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_bfloat16(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
      target[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace

cudaError_t dequantize_rows(const Launch& on, const Weight& weight, int64_t k, int64_t padded_k, void* bfloat16_out) {
  const int64_t count = weight.rows * (padded_k / 32);
  return with_format(weight.format, [&](auto tag) {
    return launch(on, dequantize_kernel<decltype(tag)::value>,
                  dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0, weight, k,
                  padded_k, static_cast<__nv_bfloat16*>(bfloat16_out));
  });
}

}  // namespace trivet::cuda
