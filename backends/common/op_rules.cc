#include "op_rules.h"

#include <algorithm>
#include <cmath>

namespace trivet {
namespace {

template <class T>
std::string text(T value) {
  return std::to_string(value);
}

void check_attribute(bool good, const char* name, const std::string& expected, const std::string& got) {
  if (!good) throw OpError(std::string("attribute '") + name + "': expected " + expected + ", got " + got);
}

const float* optional_floats(const KernelContext& ctx, size_t index, int64_t count) {
  if (!ctx.has_input(index)) return nullptr;
  const Tensor tensor = ctx.input(index);
  tensor.check_shape({count});
  return tensor.as<float>();
}

const int32_t* ints(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  tensor.check_shape(shape);
  return tensor.as<int32_t>();
}

}  // namespace

// --- Formats ------------------------------------------------------------------------------------------------------

const FormatSpec& format_spec(std::string_view name) {
  std::string known;
  for (const FormatSpec& format : kFormatSpecs) {
    if (name == format.name) return format;
    known += (known.empty() ? "" : ", ") + std::string(format.name);
  }
  throw OpError("unknown weight format '" + std::string(name) + "', known: " + known);
}

void check_row(const FormatSpec& format, int64_t n, const char* what) {
  if (n < 1 || n % format.block_size != 0) {
    throw OpError(std::string(what) + ": expected a positive multiple of the " + format.name + " block size " +
                  text(format.block_size) + ", got " + text(n));
  }
}

// --- EmbedTokens, norms, LogitsHead -------------------------------------------------------------------------------

float eps_attribute(const KernelInfo& info) {
  const float eps = info.attr_float("eps");
  check_attribute(std::isfinite(eps) && eps >= 0, "eps", "a finite number from 0", text(eps));
  return eps;
}

float finite_attribute(const KernelInfo& info, const char* name) {
  const float value = info.attr_float(name);
  check_attribute(std::isfinite(value), name, "a finite number", text(value));
  return value;
}

EmbedAttributes embed_attributes(const KernelInfo& info) {
  const EmbedAttributes a{format_spec(info.attr_string("format")), info.attr_int("dim"), info.attr_float("scale")};
  check_row(a.format, a.dim, "dim");
  return a;
}

NormInputs norm_inputs(const KernelContext& ctx) {
  const Tensor x = ctx.input(0), weight = ctx.input(1);
  x.check_shape({-1, -1});
  weight.check_shape({x.shape[1]});
  return {x.as<float>(), nullptr, weight.as<float>(), nullptr, nullptr, x.shape[0], x.shape[0], x.shape[1]};
}

NormInputs add_norm_inputs(const KernelContext& ctx) {
  const Tensor x = ctx.input(0), residual = ctx.input(1), weight = ctx.input(2);
  x.check_shape({-1, -1});
  const int64_t x_rows = x.shape[0], n = x.shape[1];
  residual.check_shape({x_rows, n});
  weight.check_shape({n});
  NormInputs in{
      x.as<float>(), residual.as<float>(), weight.as<float>(), optional_floats(ctx, 3, n), nullptr, x_rows, x_rows, n};
  if (ctx.has_input(4)) {
    const Tensor rows = ctx.input(4);
    in.index = ints(rows, {-1});
    in.rows = rows.shape[0];
    if (in.rows > 0 && x_rows == 0) throw OpError("rows: expected none, as x has none, got " + text(in.rows));
  }
  return in;
}

HeadAttributes head_attributes(const KernelInfo& info) {
  const HeadAttributes a{format_spec(info.attr_string("format")), info.attr_int("in_features"),
                         info.attr_int("vocab_size"), info.attr_float("soft_cap")};
  check_row(a.format, a.in_features, "in_features");
  if (a.vocab_size < 1) throw OpError("vocab_size: expected a positive number, got " + text(a.vocab_size));
  if (!(a.soft_cap >= 0.0f)) throw OpError("soft_cap: expected 0 or more, got " + text(a.soft_cap));
  return a;
}

const uint8_t* head_weight(const HeadAttributes& a, const Tensor& tensor) {
  tensor.check_shape({a.vocab_size, a.format.row_bytes(a.in_features)});
  return tensor.as<uint8_t>();
}

// --- QMatMul ------------------------------------------------------------------------------------------------------

namespace {

Epilogue parse_epilogue(const std::string& name) {
  if (name == "none") return Epilogue::kNone;
  if (name == "swiglu") return Epilogue::kSwiglu;
  if (name == "geglu") return Epilogue::kGeglu;
  throw OpError("epilogue: expected none, swiglu or geglu, got '" + name + "'");
}

}  // namespace

ProductAttributes product_attributes(const KernelInfo& info) {
  ProductAttributes a{{},
                      info.attr_ints("out_features"),
                      info.attr_int("in_features"),
                      parse_epilogue(info.attr_string("epilogue")),
                      0};
  for (const std::string& name : info.attr_names("formats")) {
    a.formats.push_back(&format_spec(name));
    check_row(*a.formats.back(), a.in_features, "in_features");
  }
  if (a.formats.empty() || a.formats.size() > kMaxWeights || a.formats.size() != a.out_features.size()) {
    throw OpError("formats and out_features: expected one entry per weight, 1 to 3, got " + text(a.formats.size()) +
                  " and " + text(a.out_features.size()));
  }
  for (int64_t n : a.out_features) {
    if (n < 1) throw OpError("out_features: expected positive numbers, got " + text(n));
    a.total += n;
  }
  if (a.epilogue != Epilogue::kNone && (a.formats.size() != 2 || a.out_features[0] != a.out_features[1])) {
    throw OpError("epilogue: a gated one needs two weights of the same out_features");
  }
  return a;
}

void check_weight_given(const ProductAttributes& a, size_t i, bool given) {
  if (given == (i < a.formats.size())) return;
  throw OpError("w" + text(i) + ": expected " + text(a.formats.size()) + " weights as in `formats`, this one is " +
                (given ? "extra" : "absent"));
}

const uint8_t* product_weight(const ProductAttributes& a, size_t i, const Tensor& tensor) {
  tensor.check_shape({a.out_features[i], a.formats[i]->row_bytes(a.in_features)});
  return tensor.as<uint8_t>();
}

const float* product_bias(const ProductAttributes& a, const Tensor& tensor) {
  tensor.check_shape({a.total});
  return tensor.as<float>();
}

ProductInputs product_inputs(const KernelContext& ctx, const ProductAttributes& a) {
  const Tensor x = ctx.input(QMatMulSpec::kX);
  x.check_shape({-1, a.in_features});
  ProductInputs in{x.as<float>(), x.shape[0], {}, nullptr};
  for (size_t i = 0; i < kMaxWeights; i++) {
    const bool given = ctx.has_input(QMatMulSpec::kFirstWeight + i);
    check_weight_given(a, i, given);
    if (given) in.weights[i] = product_weight(a, i, ctx.input(QMatMulSpec::kFirstWeight + i));
  }
  if (ctx.has_input(QMatMulSpec::kBias)) in.bias = product_bias(a, ctx.input(QMatMulSpec::kBias));
  return in;
}

// --- PagedAttention -----------------------------------------------------------------------------------------------

AttentionAttributes attention_attributes(const KernelInfo& info) {
  AttentionAttributes a{};
  a.num_heads = info.attr_int("num_heads");
  a.num_kv_heads = info.attr_int("num_kv_heads");
  a.head_dim = info.attr_int("head_dim");
  a.kv_offset = info.attr_int("kv_offset");
  a.scale = finite_attribute(info, "scale");
  a.sliding_window = info.attr_int("sliding_window");
  a.soft_cap = info.attr_float("soft_cap");
  a.norm_eps = info.attr_float("norm_eps");
  const int64_t interleaved = info.attr_int("rope_interleaved");
  check_attribute(a.num_kv_heads > 0 && a.num_kv_heads <= kMaxHeads, "num_kv_heads", "1 to " + text(kMaxHeads),
                  text(a.num_kv_heads));
  check_attribute(a.num_heads > 0 && a.num_heads <= kMaxHeads && a.num_heads % a.num_kv_heads == 0, "num_heads",
                  "a multiple of num_kv_heads = " + text(a.num_kv_heads) + " up to " + text(kMaxHeads),
                  text(a.num_heads));
  check_attribute(a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 8 == 0, "head_dim",
                  "a multiple of 8 up to " + text(kMaxHeadDim), text(a.head_dim));
  check_attribute(a.kv_offset >= 0 && a.kv_offset < int64_t{1} << 32, "kv_offset", "0 or more", text(a.kv_offset));
  check_attribute(a.sliding_window >= 0, "sliding_window", "0 or more", text(a.sliding_window));
  check_attribute(std::isfinite(a.soft_cap) && a.soft_cap >= 0, "soft_cap", "a finite number from 0", text(a.soft_cap));
  check_attribute(std::isfinite(a.norm_eps) && a.norm_eps >= 0, "norm_eps", "a finite number from 0", text(a.norm_eps));
  check_attribute(interleaved == 0 || interleaved == 1, "rope_interleaved", "0 or 1", text(interleaved));
  a.rope_interleaved = interleaved == 1;
  a.group = a.num_heads / a.num_kv_heads;
  return a;
}

AttentionInputs attention_inputs(const KernelContext& ctx, const AttentionAttributes& a) {
  using Spec = PagedAttentionSpec;
  const Tensor qkv = ctx.input(Spec::kQkv), cos_sin = ctx.input(Spec::kCosSin), table = ctx.input(Spec::kBlockTable);
  const Tensor seq_lens = ctx.input(Spec::kSeqLens);
  AttentionInputs in{};
  qkv.check_shape({-1, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim});
  in.num_tokens = qkv.shape[0];
  in.qkv = qkv.as<float>();
  cos_sin.check_shape({in.num_tokens, -1});
  in.rotary_dim = cos_sin.shape[1];
  in.cos_sin = cos_sin.as<float>();
  if (in.rotary_dim % 2 != 0 || in.rotary_dim > a.head_dim) {
    throw OpError("cos_sin: expected an even rotary_dim of at most head_dim = " + text(a.head_dim) + ", got shape " +
                  cos_sin.shape_text());
  }
  seq_lens.check_shape({-1});
  in.num_requests = seq_lens.shape[0];
  in.seq_lens = seq_lens.as<int32_t>();
  in.positions = ints(ctx.input(Spec::kPositions), {in.num_tokens});
  in.slot_mapping = ints(ctx.input(Spec::kSlotMapping), {in.num_tokens});
  in.block_table = ints(table, {in.num_requests, -1});
  in.max_blocks = table.shape[1];
  in.query_start_loc = ints(ctx.input(Spec::kQueryStartLoc), {in.num_requests + 1});
  in.q_norm = optional_floats(ctx, Spec::kQNorm, a.head_dim);
  in.k_norm = optional_floats(ctx, Spec::kKNorm, a.head_dim);
  in.sinks = optional_floats(ctx, Spec::kSinks, a.num_heads);
  return in;
}

namespace {

int64_t bytes_of(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kFloat32:
      return 4;
    case KvDtype::kFloat16:
    case KvDtype::kBFloat16:
    case KvDtype::kInt16:
      return 2;
    case KvDtype::kE4M3:
      return 1;
  }
  return 0;
}

}  // namespace

KvCacheShape kv_cache_shape(const Tensor& layout, const Tensor& cache, const AttentionAttributes& a,
                            std::initializer_list<KvDtype> types) {
  layout.check_shape({2});
  cache.check_shape({-1, -1});
  const int32_t code = layout.as<int32_t>()[0], block_size = layout.as<int32_t>()[1];
  const KvDtype dtype = static_cast<KvDtype>(code);
  if (std::find(types.begin(), types.end(), dtype) == types.end()) {
    std::string codes;
    for (const KvDtype type : types) codes += (codes.empty() ? "" : ", ") + text(static_cast<int32_t>(type));
    throw OpError("kv_layout[0]: expected a KV dtype code among " + codes + ", got " + text(code));
  }
  if (block_size < 1) throw OpError("kv_layout[1]: expected a block size of at least 1, got " + text(block_size));
  const int64_t width = bytes_of(dtype), element_row = block_size * width;  // one element of all tokens of a block
  int64_t stored_dim = a.head_dim, kv_offset = a.kv_offset;
  if (dtype == KvDtype::kInt16) {
    if (kv_offset % a.head_dim != 0) {
      throw OpError("attribute 'kv_offset': expected a multiple of head_dim " + text(a.head_dim) +
                    " for this KV dtype, got " + text(kv_offset));
    }
    stored_dim += kInt16ScaleElements;
    kv_offset = kv_offset / a.head_dim * stored_dim;
  }
  const int64_t needed = kv_offset + 2 * a.num_kv_heads * stored_dim;  // in rows: the product may not fit 64 bits
  if (cache.shape[1] / element_row < needed || cache.shape[1] % element_row != 0) {
    throw OpError("kv_cache: expected blocks of at least " + text(needed) + " * " + text(element_row) +
                  " bytes, a multiple of " + text(element_row) + ", got shape " + cache.shape_text());
  }
  return {dtype, width, cache.shape[0], block_size, cache.shape[1] / width, stored_dim, kv_offset};
}

// --- Sample -------------------------------------------------------------------------------------------------------

namespace {

TokenList token_list(const KernelContext& ctx, SampleSpec::Input ids, SampleSpec::Input loc, int64_t rows) {
  const Tensor id_tensor = ctx.input(ids), loc_tensor = ctx.input(loc);
  id_tensor.check_shape({-1});
  return {id_tensor.name, loc_tensor.name, id_tensor.as<int32_t>(), ints(loc_tensor, {rows + 1}), id_tensor.shape[0]};
}

}  // namespace

SampleInputs sample_inputs(const KernelContext& ctx) {
  using Spec = SampleSpec;
  const Tensor logits = ctx.input(Spec::kLogits), floats = ctx.input(Spec::kFloats), whole = ctx.input(Spec::kInts);
  logits.check_shape({-1, -1});
  SampleInputs in{};
  in.rows = logits.shape[0];
  in.vocab = logits.shape[1];
  if (in.vocab < 1) throw OpError("logits: expected at least one column, got shape " + logits.shape_text());
  floats.check_shape({in.rows, kNumSampleFloats});
  whole.check_shape({in.rows, kNumSampleInts});
  in.logits = logits.as<float>();
  in.floats = floats.as<float>();
  in.ints = whole.as<int64_t>();
  in.history = token_list(ctx, Spec::kHistory, Spec::kHistoryLoc, in.rows);
  in.allowed = token_list(ctx, Spec::kAllowed, Spec::kAllowedLoc, in.rows);
  in.banned = token_list(ctx, Spec::kBanned, Spec::kBannedLoc, in.rows);
  in.bias = token_list(ctx, Spec::kBiasIds, Spec::kBiasLoc, in.rows);
  const Tensor bias_values = ctx.input(Spec::kBiasValues), bitmask = ctx.input(Spec::kBitmask);
  const Tensor limit = ctx.input(Spec::kMaxNumLogprobs);
  bias_values.check_shape({in.bias.count});
  in.bias_values = bias_values.as<float>();
  limit.check_shape({});
  in.max_num_logprobs = limit.as<int32_t>()[0];  // in host memory
  if (in.max_num_logprobs < 0 || in.max_num_logprobs > in.vocab) {
    throw OpError("max_num_logprobs: expected 0 to " + text(in.vocab) + ", got " + text(in.max_num_logprobs));
  }
  in.mask_words = (in.vocab + 31) / 32;
  if (bitmask.size() > 0 || bitmask.shape.size() != 2 || bitmask.shape[0] != 0) {
    bitmask.check_shape({in.rows, in.mask_words});
    in.bitmask = reinterpret_cast<const uint32_t*>(bitmask.as<int32_t>());
  }
  return in;
}

}  // namespace trivet
