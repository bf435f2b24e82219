// What attributes and shapes of the ops may be, on every back end alike. Whatever does not fit is an OpError that names
// the attribute or the input, what was expected and what came. Values in device memory are not looked at here.
#pragma once

#include "op_specs.h"
#include "op_types.h"
#include "weight_format.h"

namespace trivet {

float eps_attribute(const KernelInfo& info);
float finite_attribute(const KernelInfo& info, const char* name);

// --- EmbedTokens, norms, LogitsHead -------------------------------------------------------------------------------

struct EmbedAttributes {
  const FormatSpec& format;
  int64_t dim;
  float scale;
};
EmbedAttributes embed_attributes(const KernelInfo& info);

// Of RMSNorm, and of AddRMSNorm (residual not null). x and residual are [x_rows, n], the weights [n]; post_weight may
// be null. `index` [rows] says which rows of x and residual to take, null: all of them (x_rows = rows).
struct NormInputs {
  const float *x, *residual, *weight, *post_weight;
  const int32_t* index;
  int64_t rows, x_rows, n;
};
NormInputs norm_inputs(const KernelContext& ctx);
NormInputs add_norm_inputs(const KernelContext& ctx);

struct HeadAttributes {
  const FormatSpec& format;
  int64_t in_features, vocab_size;
  float soft_cap;
};
HeadAttributes head_attributes(const KernelInfo& info);
const uint8_t* head_weight(const HeadAttributes& attributes, const Tensor& tensor);

// --- QMatMul ------------------------------------------------------------------------------------------------------

struct ProductAttributes {
  std::vector<const FormatSpec*> formats;
  std::vector<int64_t> out_features;
  int64_t in_features;
  Epilogue epilogue;
  int64_t total;  // sum of out_features

  int64_t columns() const { return epilogue == Epilogue::kNone ? total : out_features[0]; }  // of y
};
ProductAttributes product_attributes(const KernelInfo& info);
// Throws unless weight i is given exactly if there is a format for it.
void check_weight_given(const ProductAttributes& attributes, size_t i, bool given);
const uint8_t* product_weight(const ProductAttributes& attributes, size_t i, const Tensor& tensor);
const float* product_bias(const ProductAttributes& attributes, const Tensor& tensor);

struct ProductInputs {
  const float* x;  // [rows, in_features]
  int64_t rows;
  const uint8_t* weights[kMaxWeights];  // as many as there are formats
  const float* bias;                    // [total] or null
};
ProductInputs product_inputs(const KernelContext& ctx, const ProductAttributes& attributes);

// --- PagedAttention -----------------------------------------------------------------------------------------------

struct AttentionAttributes {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t group;  // query heads per KV head
  int64_t kv_offset, sliding_window;
  float scale, soft_cap, norm_eps;
  bool rope_interleaved;
};
AttentionAttributes attention_attributes(const KernelInfo& info);

struct AttentionInputs {
  int64_t num_tokens, num_requests, max_blocks, rotary_dim;
  const float* qkv;
  const float* cos_sin;
  const int32_t *positions, *slot_mapping, *block_table, *query_start_loc, *seq_lens;
  const float *q_norm, *k_norm, *sinks;  // or null
};
AttentionInputs attention_inputs(const KernelContext& ctx, const AttentionAttributes& attributes);

struct KvCacheShape {
  KvDtype dtype;
  int64_t element_bytes;
  int64_t num_blocks, block_size;  // block_size: tokens
  int64_t block_stride;            // elements from one block to the next
  int64_t stored_dim;              // elements of a key or value, its scale counted in
  int64_t kv_offset;               // elements per token that earlier layers hold, their scales counted in
};
// `layout` is in host memory; `types`: those that the back end has.
KvCacheShape kv_cache_shape(const Tensor& layout, const Tensor& cache, const AttentionAttributes& attributes,
                            std::initializer_list<KvDtype> types);

// Copies the fields that a kernel's parameters have under the same names.
template <class Params>
void assign(Params& p, const AttentionAttributes& a) {
  p.num_heads = a.num_heads;
  p.num_kv_heads = a.num_kv_heads;
  p.head_dim = a.head_dim;
  p.group = a.group;
  p.kv_offset = a.kv_offset;
  p.sliding_window = a.sliding_window;
  p.scale = a.scale;
  p.soft_cap = a.soft_cap;
  p.norm_eps = a.norm_eps;
  p.rope_interleaved = a.rope_interleaved;
}

template <class Params>
void assign(Params& p, const AttentionInputs& in) {
  p.num_tokens = in.num_tokens;
  p.num_requests = in.num_requests;
  p.max_blocks = in.max_blocks;
  p.rotary_dim = in.rotary_dim;
  p.qkv = in.qkv;
  p.cos_sin = in.cos_sin;
  p.positions = in.positions;
  p.slot_mapping = in.slot_mapping;
  p.block_table = in.block_table;
  p.query_start_loc = in.query_start_loc;
  p.seq_lens = in.seq_lens;
  p.q_norm = in.q_norm;
  p.k_norm = in.k_norm;
  p.sinks = in.sinks;
}

// --- Sample -------------------------------------------------------------------------------------------------------

// Token ids of rows, packed: those of row s are ids[loc[s]] to ids[loc[s + 1]].
struct TokenList {
  const char* name;
  const char* loc_name;
  const int32_t* ids;
  const int32_t* loc;  // [rows + 1]
  int64_t count;
};

struct SampleInputs {
  int64_t rows, vocab;
  const float* logits;
  const float* floats;  // [rows, kNumSampleFloats]
  const int64_t* ints;  // [rows, kNumSampleInts]
  TokenList history, allowed, banned, bias;
  const float* bias_values;  // [bias.count]
  const uint32_t* bitmask;   // [rows, mask_words] or null
  int64_t mask_words;
  int64_t max_num_logprobs;
};
SampleInputs sample_inputs(const KernelContext& ctx);

}  // namespace trivet
