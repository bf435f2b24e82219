// PagedAttention and Sample: shapes on the host, then launches.
#include "kernels.h"

namespace trivet::cuda {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 30;

[[noreturn]] void fail(const std::string& message) { throw OpError(message); }

void bind_cache(AttentionParams& p, KernelContext& ctx, const AttentionAttributes& attributes, cudaStream_t stream) {
  const Tensor cache = ctx.input(PagedAttentionSpec::kKvCache);
  const KvCacheShape shape = kv_cache_shape(ctx.input(PagedAttentionSpec::kKvLayout), cache, attributes,
                                            {KvDtype::kFloat32, KvDtype::kFloat16, KvDtype::kBFloat16, KvDtype::kE4M3});
  if (p.head_dim * shape.element_bytes % 16 != 0) {
    fail("attribute 'head_dim': expected a multiple of " + std::to_string(16 / shape.element_bytes) +
         " for this KV dtype, got " + std::to_string(p.head_dim));
  }
  const int64_t start = p.kv_offset * shape.block_size * shape.element_bytes;
  if (cache.shape[1] % 16 != 0 || start % 16 != 0) {
    fail("kv_cache: expected blocks and layers that start at multiples of 16 bytes, got blocks of " +
         std::to_string(cache.shape[1]) + " bytes and this layer at byte " + std::to_string(start));
  }
  p.kv_dtype = shape.dtype;
  p.block_size = shape.block_size;
  p.num_blocks = shape.num_blocks;
  p.block_stride = shape.block_stride;
  const Tensor out = ctx.output(1, cache.shape);
  if (out.data != cache.data && cache.size() > 0) {  // the caller bound them apart
    check(cudaMemcpyAsync(out.data, cache.data, static_cast<size_t>(cache.size()), cudaMemcpyDeviceToDevice, stream),
          "copy of the KV cache");
  }
  p.kv_cache = out.data;
}

}  // namespace

PagedAttention::PagedAttention(const KernelInfo& info, Session& session, int32_t node)
    : session(session), node(node), attributes(attention_attributes(info)) {}

void PagedAttention::compute(KernelContext& ctx) {
  AttentionParams p{};
  assign(p, attributes);
  assign(p, attention_inputs(ctx, attributes));
  if (p.num_tokens > kMaxTokens) fail("qkv: expected at most 2^30 tokens, got " + std::to_string(p.num_tokens));
  Context& context = session.context;
  bind_cache(p, ctx, attributes, context.launch.stream);
  p.out = ctx.output(0, {p.num_tokens, p.num_heads * p.head_dim}).mutable_as<float>();
  if (p.num_tokens == 0) return;
  if (p.num_requests == 0)
    fail("seq_lens: expected at least one request for " + std::to_string(p.num_tokens) + " tokens");
  if (p.max_blocks == 0) fail("block_table: expected at least 1 columns, got 0");
  p.queries = context.scratch<float>(Context::kQueries, p.num_tokens * p.num_heads * p.head_dim);
  p.states = context.scratch<float>(Context::kStates, attention_state_floats(p));
  p.tensor_cores = session.activation_dtype == ActivationDtype::kInt8;
  p.arrived = context.zeros(attention_counters(p));
  context.overwritten(p.out);
  if (wants_int8(session, p.num_tokens) && attention_quantizes(p)) {
    p.quantized = context.quantized_for(p.out, p.num_tokens, p.num_heads * p.head_dim);
  }
  if (wants_bfloat16(session, p.num_tokens) && attention_rounds(p) && p.num_heads * p.head_dim % 64 == 0) {
    p.rounded = context.rounded_for(p.out, p.num_tokens, p.num_heads * p.head_dim);
  }
  check(paged_attention(context.launch, context.sink(node), p), "paged_attention");
}

// --- Sample -------------------------------------------------------------------------------------------------------

Sample::Sample(const KernelInfo&, Session& session, int32_t node) : session(session), node(node) {}

void Sample::compute(KernelContext& ctx) {
  const SampleInputs in = sample_inputs(ctx);
  SampleParams p{};
  p.rows = in.rows;
  p.vocab = in.vocab;
  p.logits = in.logits;
  p.floats = in.floats;
  p.ints = in.ints;
  const auto list = [](const TokenList& from, const int32_t*& ids, const int32_t*& loc, int64_t& count) {
    ids = from.ids;
    loc = from.loc;
    count = from.count;
  };
  list(in.history, p.history, p.history_loc, p.history_count);
  list(in.allowed, p.allowed, p.allowed_loc, p.allowed_count);
  list(in.banned, p.banned, p.banned_loc, p.banned_count);
  list(in.bias, p.bias_ids, p.bias_loc, p.bias_count);
  p.bias_values = in.bias_values;
  p.max_num_logprobs = in.max_num_logprobs;
  p.mask_words = in.mask_words;
  p.bitmask = in.bitmask;
  p.token_ids = ctx.output(0, {p.rows}).mutable_as<int32_t>();
  p.logprobs = ctx.output(1, {p.rows}).mutable_as<float>();
  p.ranks = ctx.output(2, {p.rows}).mutable_as<int32_t>();
  p.top_ids = ctx.output(3, {p.rows, p.max_num_logprobs}).mutable_as<int32_t>();
  p.top_logprobs = ctx.output(4, {p.rows, p.max_num_logprobs}).mutable_as<float>();
  Context& context = session.context;
  const bool listed = p.history_count + p.allowed_count + p.banned_count + p.bias_count > 0 || p.bitmask != nullptr;
  if (listed) p.processed = context.scratch<float>(Context::kProcessed, p.rows * p.vocab);
  if (p.history_count > 0) p.counts = context.scratch<int32_t>(Context::kCounts, 2 * p.rows * p.vocab);
  check(sample(context.launch, context.sink(node), p), "sample");
}

}  // namespace trivet::cuda
