// Host side of the kernels: what a launch needs and one function per kernel. Plain C++, so that no onnxruntime header
// goes through nvcc and no kernel through the host compiler.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>

#include "../../common/op_types.h"
#include "../../common/weight_format.h"
#include "../device_error.h"

namespace trivet::cuda {

struct Launch {
  cudaStream_t stream;
  int num_multiprocessors;
  bool dependent_launch;  // the device has programmatic dependent launch (SM 90 and newer)
  bool has_wgmma;         // matmul_wgmma runs on it
  size_t shared_bytes;    // that a block may have
};

struct ErrorSink {
  DeviceError* error;  // pinned host memory
  int32_t node;
};

// Activations as int8 per 32 values: values[row][half][block][16], scales[row][block] = (scale, scale * sum of the
// block).
struct QuantizedRows {
  int8_t* values;  // null: none wanted
  float2* scales;
};

// --- embed.cu, norm.cu --------------------------------------------------------------------------------------------

cudaError_t embed_tokens(const Launch& on, ErrorSink sink, const int32_t* ids, int64_t tokens, Format format,
                         const uint8_t* weight, int64_t rows, int64_t row_bytes, int64_t dim, float scale,
                         float* hidden);

cudaError_t rotary_table(const Launch& on, ErrorSink sink, const int32_t* positions, int64_t tokens,
                         const float* inv_freq, int64_t half, float scale, float* cos_sin);

// y = RMSNorm(x), or with `residual`: residual_out = x + residual (RMSNorm(x, post_weight) + residual if that is given)
// and y = RMSNorm(residual_out). residual, post_weight and residual_out may be null. `index`: which rows of x and
// residual to take, checked against x_rows; null: all. `quantized`: y once more, as int8.
struct NormParams {
  const float *x, *residual, *weight, *post_weight;
  const int32_t* index;
  int64_t rows, x_rows, n;  // rows: of y and residual_out
  float eps;
  float *y, *residual_out;
  QuantizedRows quantized;
  void* rounded;  // y once more, as bfloat16; null: not wanted
};
// Whether rms_norm can write `quantized` or `rounded` for rows of n.
bool norm_writes_copies(int64_t n);
cudaError_t rms_norm(const Launch& on, ErrorSink sink, const NormParams& p);

// --- Products -----------------------------------------------------------------------------------------------------

struct Rows {
  const float* x;  // [count][k]
  int64_t count, k;
};

struct Weight {
  const uint8_t* data;
  Format format;
  int64_t rows;
  int64_t row_bytes;
};

struct Product {
  float* y;
  int64_t stride;     // floats between rows of y
  const float* bias;  // per column, may be null
  float soft_cap;     // 0 = none
};

// quantize.cu
cudaError_t quantize_rows(const Launch& on, const Rows& rows, const QuantizedRows& out);
cudaError_t round_rows(const Launch& on, const Rows& rows, int64_t padded_k, void* bfloat16_out);
// y[row][i] = act(xy[row][i]) * xy[row][n + i]; in `rounded` once more, as bfloat16, unless that is null
cudaError_t gate_rows(const Launch& on, const float* xy, int64_t rows, int64_t n, Epilogue epilogue, float* y,
                      void* rounded);

// Up to kMaxSegments weights of one format side by side, or a gated pair.
inline constexpr int kMaxSegments = static_cast<int>(kMaxWeights);
struct Gate {
  const uint8_t* up = nullptr;  // the second weight of a gated pair, of the same format and size as the only one given
  Epilogue epilogue = Epilogue::kNone;
  QuantizedRows quantized{};  // from int8 products: y once more, as int8; its width is then a multiple of 32
};
// matvec_int8.cu: few rows and a block format.
bool matvec_int8_takes(const Launch& on, Format format, int64_t k);
cudaError_t matvec_int8(const Launch& on, const QuantizedRows& x, int64_t rows, int64_t k, const Weight* weights,
                        int count, const Gate& gate, const Product& out);
// Float32 activations, any number of rows; a row's bits do not depend on the others.
// matvec_float.cu: a block format
cudaError_t matvec_float(const Launch& on, const Rows& rows, const Weight& weight, const Product& out);
// matvec_elements.cu: a format of single elements
cudaError_t matvec_elements(const Launch& on, const Rows& rows, const Weight* weights, int count, const Gate& gate,
                            const Product& out);
// matmul_mma.cu: many rows on tensor cores; x as bfloat16 [rows][padded_k], padded_k a multiple of 64.
cudaError_t matmul_mma(const Launch& on, const void* x, int64_t rows, int64_t k, int64_t padded_k, const Weight& weight,
                       const Product& out);

// dequantize.cu: the whole weight as bfloat16 [rows][padded_k]
cudaError_t dequantize_rows(const Launch& on, const Weight& weight, int64_t k, int64_t padded_k, void* bfloat16_out);
// matmul_wgmma.cu (SM 90a only, null in a library without it): more than a few rows, x as bfloat16 [rows][padded_k],
// padded_k a multiple of 64. Up to kMaxSegments weights, or a gated pair of one size; that one's y is written to
// `rounded` [rows][out.stride] as bfloat16, too, unless that is null.
struct WgmmaWeight {
  const void* data;  // bfloat16 [rows][k], aligned to 16 bytes; k a multiple of 8, up to padded_k
  int64_t rows, k;
  int64_t column;  // where its columns begin in y and bias; of the second of a pair, in bias alone
  bool constant;   // no kernel of this step writes it
};
[[gnu::weak]] cudaError_t matmul_wgmma(const Launch& on, const void* x, int64_t rows, int64_t padded_k,
                                       const WgmmaWeight* weights, int count, Epilogue epilogue, void* rounded,
                                       const Product& out);
// matmul_wgmma_blocks.cu (SM 90a only): up to kMaxBlocksRows rows and a block format, as stored
inline constexpr int64_t kMaxBlocksRows = 64;
[[gnu::weak]] int wgmma_blocks_splits(const Launch& on, int64_t rows, int64_t padded_k, const Weight& weight);
[[gnu::weak]] cudaError_t matmul_wgmma_blocks(const Launch& on, const void* x, int64_t rows, int64_t k,
                                              int64_t padded_k, const Weight& weight, float* parts, const Product& out);

// --- Attention ----------------------------------------------------------------------------------------------------

struct AttentionParams {
  int64_t num_heads, num_kv_heads, head_dim, group;
  int64_t kv_offset, block_size, block_stride, num_blocks, max_blocks;
  int64_t num_tokens, num_requests, rotary_dim, sliding_window;
  float scale, soft_cap, norm_eps;
  bool rope_interleaved;
  KvDtype kv_dtype;
  const float* qkv;
  void* kv_cache;
  const float* cos_sin;
  const int32_t *positions, *slot_mapping, *block_table, *query_start_loc, *seq_lens;
  const float *q_norm, *k_norm, *sinks;
  float* out;
  float* queries;           // scratch [num_tokens, num_heads, head_dim] of a step that is not split
  float* states;            // scratch of attention_state_floats()
  int* arrived;             // attention_counters() zeros, which they are again afterwards
  bool tensor_cores;        // where a step of many tokens can use them
  QuantizedRows quantized;  // of a split step with head_dim % 32 == 0: `out` once more, as int8
  void* rounded;            // `out` once more, as bfloat16; null: not wanted
};

// attention.cu: all of it. Whether it can write `quantized`, and `rounded`:
bool attention_quantizes(const AttentionParams& p);
bool attention_rounds(const AttentionParams& p);
// Floats of scratch for partial results, 0 when the step is not split.
int64_t attention_state_floats(const AttentionParams& p);
int64_t attention_counters(const AttentionParams& p);
cudaError_t paged_attention(const Launch& on, ErrorSink sink, const AttentionParams& p);
// attention_mma.cu: the last part of it, for steps that are not split
bool attends_on_tensor_cores(const AttentionParams& p);
cudaError_t attend_mma(const Launch& on, const AttentionParams& p);
// attention_decode.cu: all of it, for steps that are split
bool decodes_on_tensor_cores(const AttentionParams& p);
cudaError_t attend_decode(const Launch& on, ErrorSink sink, const AttentionParams& p, int partitions);
// attention_float.cu: as attend_decode, or with no partitions as attend_mma; for every step
cudaError_t attend_float(const Launch& on, ErrorSink sink, const AttentionParams& p, int partitions);

// --- sample.cu ----------------------------------------------------------------------------------------------------

struct SampleParams {
  const float* logits;
  int64_t rows, vocab, max_num_logprobs, mask_words;
  const float* floats;
  const int64_t* ints;
  const int32_t *history, *history_loc, *allowed, *allowed_loc, *banned, *banned_loc, *bias_ids;
  const float* bias_values;
  const int32_t* bias_loc;
  int64_t history_count, allowed_count, banned_count, bias_count;
  const uint32_t* bitmask;  // may be null
  float* processed;         // scratch [rows, vocab]
  int32_t* counts;          // scratch [rows, 2, vocab]
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;
  float* top_logprobs;
};

cudaError_t sample(const Launch& on, ErrorSink sink, const SampleParams& p);

}  // namespace trivet::cuda
