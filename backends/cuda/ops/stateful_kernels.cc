// PagedAttention and Sample: shapes on the host, then launches.
#include <cmath>

#include "kernels.h"

namespace trivet::cuda {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxTokens = int64_t{1} << 30;

[[noreturn]] void fail(const std::string& message) { throw OpError(message); }

void check_attribute(bool good, const char* name, const std::string& expected, const std::string& got) {
  if (!good) fail(std::string("attribute '") + name + "': expected " + expected + ", got " + got);
}

const float* optional_floats(KernelContext& ctx, size_t index, int64_t count) {
  if (!ctx.has_input(index)) return nullptr;
  const Tensor tensor = ctx.input(index);
  tensor.check_shape({count});
  return tensor.as<float>();
}

const int32_t* ints(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  tensor.check_shape(shape);
  return tensor.as<int32_t>();
}

enum AttentionInput : size_t {
  kQkv,
  kKvCache,
  kKvLayout,
  kCosSin,
  kPositions,
  kSlotMapping,
  kBlockTable,
  kQueryStartLoc,
  kSeqLens,
  kQNorm,
  kKNorm,
  kSinks
};

void bind_cache(AttentionParams& p, KernelContext& ctx, cudaStream_t stream) {
  const Tensor layout = ctx.input(kKvLayout), cache = ctx.input(kKvCache);  // the layout is in host memory
  layout.check_shape({2});
  cache.check_shape({-1, -1});
  const int32_t code = layout.as<int32_t>()[0], block_size = layout.as<int32_t>()[1];
  if (code < 0 || code > 2) fail("kv_layout[0]: expected a KV dtype code from 0 to 2, got " + std::to_string(code));
  if (block_size < 1) fail("kv_layout[1]: expected a block size of at least 1, got " + std::to_string(block_size));
  p.kv_dtype = code;
  p.block_size = block_size;
  p.num_blocks = cache.shape[0];
  const int64_t width = code == 0 ? 4 : 2;
  const int64_t needed = (p.kv_offset + 2 * p.num_kv_heads * p.head_dim) * block_size * width;
  if (cache.shape[1] < needed || cache.shape[1] % (block_size * width) != 0) {
    fail("kv_cache: expected blocks of at least " + std::to_string(needed) + " bytes, a multiple of " +
         std::to_string(block_size * width) + ", got shape " + cache.shape_text());
  }
  if (cache.shape[1] % 16 != 0 || p.kv_offset * block_size * width % 16 != 0) {
    fail("kv_cache: expected blocks and layers that start at multiples of 16 bytes, got blocks of " +
         std::to_string(cache.shape[1]) + " bytes and this layer at byte " +
         std::to_string(p.kv_offset * block_size * width));
  }
  p.block_stride = cache.shape[1] / width;
  const Tensor out = ctx.output(1, cache.shape);
  if (out.data != cache.data && cache.size() > 0) {  // the caller bound them apart
    check(cudaMemcpyAsync(out.data, cache.data, static_cast<size_t>(cache.size()), cudaMemcpyDeviceToDevice, stream),
          "copy of the KV cache");
  }
  p.kv_cache = out.data;
}

}  // namespace

PagedAttention::PagedAttention(const KernelInfo& info, Session& session, int32_t node) : session(session), node(node) {
  AttentionParams& p = attributes;
  p.num_heads = info.attr_int("num_heads");
  p.num_kv_heads = info.attr_int("num_kv_heads");
  p.head_dim = info.attr_int("head_dim");
  p.kv_offset = info.attr_int("kv_offset");
  p.scale = info.attr_float("scale");
  p.sliding_window = info.attr_int("sliding_window");
  p.soft_cap = info.attr_float("soft_cap");
  p.norm_eps = info.attr_float("norm_eps");
  const int64_t interleaved = info.attr_int("rope_interleaved");
  const auto text = [](auto value) { return std::to_string(value); };
  check_attribute(p.num_kv_heads > 0 && p.num_kv_heads <= 1 << 14, "num_kv_heads", "1 to 16384", text(p.num_kv_heads));
  check_attribute(p.num_heads > 0 && p.num_heads <= 1 << 14 && p.num_heads % p.num_kv_heads == 0, "num_heads",
                  "a multiple of num_kv_heads = " + text(p.num_kv_heads), text(p.num_heads));
  check_attribute(p.head_dim > 0 && p.head_dim <= kMaxHeadDim && p.head_dim % 8 == 0, "head_dim",
                  "a multiple of 8 up to " + text(kMaxHeadDim), text(p.head_dim));
  check_attribute(p.kv_offset >= 0 && p.kv_offset < int64_t{1} << 32, "kv_offset", "0 or more", text(p.kv_offset));
  check_attribute(std::isfinite(p.scale), "scale", "a finite number", text(p.scale));
  check_attribute(p.sliding_window >= 0, "sliding_window", "0 or more", text(p.sliding_window));
  check_attribute(std::isfinite(p.soft_cap) && p.soft_cap >= 0, "soft_cap", "a finite number from 0", text(p.soft_cap));
  check_attribute(std::isfinite(p.norm_eps) && p.norm_eps >= 0, "norm_eps", "a finite number from 0", text(p.norm_eps));
  check_attribute(interleaved == 0 || interleaved == 1, "rope_interleaved", "0 or 1", text(interleaved));
  p.rope_interleaved = interleaved == 1;
  p.group = p.num_heads / p.num_kv_heads;
}

void PagedAttention::compute(KernelContext& ctx) {
  AttentionParams p = attributes;
  Context& context = session.context;
  const Tensor qkv = ctx.input(kQkv), cos_sin = ctx.input(kCosSin), table = ctx.input(kBlockTable);
  const Tensor seq_lens = ctx.input(kSeqLens);
  qkv.check_shape({-1, (p.num_heads + 2 * p.num_kv_heads) * p.head_dim});
  p.num_tokens = qkv.shape[0];
  if (p.num_tokens > kMaxTokens) fail("qkv: expected at most 2^30 tokens, got shape " + qkv.shape_text());
  p.qkv = qkv.as<float>();
  cos_sin.check_shape({p.num_tokens, -1});
  p.rotary_dim = cos_sin.shape[1];
  p.cos_sin = cos_sin.as<float>();
  if (p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) {
    fail("cos_sin: expected an even rotary_dim of at most head_dim = " + std::to_string(p.head_dim) + ", got shape " +
         cos_sin.shape_text());
  }
  seq_lens.check_shape({-1});
  p.num_requests = seq_lens.shape[0];
  p.seq_lens = seq_lens.as<int32_t>();
  p.positions = ints(ctx.input(kPositions), {p.num_tokens});
  p.slot_mapping = ints(ctx.input(kSlotMapping), {p.num_tokens});
  p.block_table = ints(table, {p.num_requests, -1});
  p.max_blocks = table.shape[1];
  p.query_start_loc = ints(ctx.input(kQueryStartLoc), {p.num_requests + 1});
  p.q_norm = optional_floats(ctx, kQNorm, p.head_dim);
  p.k_norm = optional_floats(ctx, kKNorm, p.head_dim);
  p.sinks = optional_floats(ctx, kSinks, p.num_heads);
  bind_cache(p, ctx, context.launch.stream);
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
  check(paged_attention(context.launch, context.sink(node), p), "paged_attention");
}

// --- Sample -------------------------------------------------------------------------------------------------------

enum SampleInput : size_t {
  kLogits,
  kFloats,
  kInts,
  kHistory,
  kHistoryLoc,
  kAllowed,
  kAllowedLoc,
  kBanned,
  kBannedLoc,
  kBiasIds,
  kBiasValues,
  kBiasLoc,
  kBitmask,
  kMaxNumLogprobs
};

Sample::Sample(const KernelInfo&, Session& session, int32_t node) : session(session), node(node) {}

void Sample::compute(KernelContext& ctx) {
  const Tensor logits = ctx.input(kLogits), floats = ctx.input(kFloats), whole = ctx.input(kInts);
  logits.check_shape({-1, -1});
  SampleParams p{};
  p.rows = logits.shape[0];
  p.vocab = logits.shape[1];
  if (p.vocab < 1) throw OpError("logits: expected at least one column, got shape " + logits.shape_text());
  floats.check_shape({p.rows, 6});
  whole.check_shape({p.rows, 6});
  p.logits = logits.as<float>();
  p.floats = floats.as<float>();
  p.ints = whole.as<int64_t>();
  const auto list = [&](SampleInput input, SampleInput loc, const int32_t*& ids, const int32_t*& bounds,
                        int64_t& count) {
    const Tensor tensor = ctx.input(input);
    tensor.check_shape({-1});
    ids = tensor.as<int32_t>();
    count = tensor.shape[0];
    bounds = ints(ctx.input(loc), {p.rows + 1});
  };
  list(kHistory, kHistoryLoc, p.history, p.history_loc, p.history_count);
  list(kAllowed, kAllowedLoc, p.allowed, p.allowed_loc, p.allowed_count);
  list(kBanned, kBannedLoc, p.banned, p.banned_loc, p.banned_count);
  list(kBiasIds, kBiasLoc, p.bias_ids, p.bias_loc, p.bias_count);
  const Tensor bias_values = ctx.input(kBiasValues), bitmask = ctx.input(kBitmask), limit = ctx.input(kMaxNumLogprobs);
  bias_values.check_shape({p.bias_count});
  p.bias_values = bias_values.as<float>();
  limit.check_shape({});
  p.max_num_logprobs = limit.as<int32_t>()[0];  // in host memory
  if (p.max_num_logprobs < 0 || p.max_num_logprobs > p.vocab) {
    throw OpError("max_num_logprobs: expected 0 to " + std::to_string(p.vocab) + ", got " +
                  std::to_string(p.max_num_logprobs));
  }
  p.mask_words = (p.vocab + 31) / 32;
  if (bitmask.size() > 0 || bitmask.shape.size() != 2 || bitmask.shape[0] != 0) {
    bitmask.check_shape({p.rows, p.mask_words});
    p.bitmask = reinterpret_cast<const uint32_t*>(bitmask.as<int32_t>());
  }
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
