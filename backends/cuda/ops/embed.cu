// EmbedTokens: a block per token, a thread per run of 32 weights.
#include "formats.cuh"

namespace trivet::cuda {
namespace {

template <Format F>
__global__ void embed_kernel(ErrorSink sink, const int32_t* ids, const uint8_t* weight, int64_t rows, int64_t row_bytes,
                             int64_t dim, float scale, float* hidden) {
  wait_for_previous();
  const int64_t token = blockIdx.x;
  int32_t id = ids[token];
  if (id < 0 || id >= rows) {
    if (threadIdx.x == 0) report(sink, DeviceErrorCode::kTokenId, token, id, rows);
    id = 0;
  }
  for (int64_t run = threadIdx.x; run * 32 < dim; run += blockDim.x) {
    float values[32];
    read_floats<F>(weight + id * row_bytes, static_cast<int>(run), dim, values);
    float* out = hidden + token * dim + run * 32;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (run * 32 + i < dim) out[i] = values[i] * scale;
    }
  }
}

}  // namespace

cudaError_t embed_tokens(const Launch& on, ErrorSink sink, const int32_t* ids, int64_t tokens, Format format,
                         const uint8_t* weight, int64_t rows, int64_t row_bytes, int64_t dim, float scale,
                         float* hidden) {
  if (tokens == 0) return cudaSuccess;
  return with_format(format, [&](auto tag) {
    return launch(on, embed_kernel<decltype(tag)::value>, dim3(static_cast<unsigned>(tokens)), dim3(128), 0, sink, ids,
                  weight, rows, row_bytes, dim, scale, hidden);
  });
}

}  // namespace trivet::cuda
