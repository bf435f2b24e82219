#include "kernels.h"

#include <algorithm>
#include <cmath>

namespace trivet::cuda {
namespace {

constexpr WeightFormat kFormats[] = {
    {"f32", Format::kF32, 1, 4},       {"f16", Format::kF16, 1, 2},       {"bf16", Format::kBF16, 1, 2},
    {"q4_0", Format::kQ4_0, 32, 18},   {"q4_1", Format::kQ4_1, 32, 20},   {"q5_0", Format::kQ5_0, 32, 22},
    {"q5_1", Format::kQ5_1, 32, 24},   {"q8_0", Format::kQ8_0, 32, 34},   {"q4_k", Format::kQ4_K, 256, 144},
    {"q5_k", Format::kQ5_K, 256, 176}, {"q6_k", Format::kQ6_K, 256, 210},
};

constexpr int64_t kMaxGridRows = 65535;  // blockIdx.y and z
// Up to here the rows of a product are taken as int8 (block formats) or float32. Where warpgroup tensor cores take
// over, they keep up with the memory from fewer rows on.
constexpr int64_t kFewRows = 16, kFewRowsBesideWgmma = 4, kFewElementRows = 4;

int64_t few_rows(const Launch& launch) { return launch.has_wgmma ? kFewRowsBesideWgmma : kFewRows; }

constexpr int64_t kMaxDequantized = int64_t{128} << 20;  // bytes of scratch for weights in bfloat16

float checked_eps(const KernelInfo& info) {
  const float eps = info.attr_float("eps");
  if (!std::isfinite(eps) || eps < 0) {
    throw OpError("attribute 'eps': expected a finite number from 0, got " + std::to_string(eps));
  }
  return eps;
}

}  // namespace

const WeightFormat& weight_format(std::string_view name) {
  std::string known;
  for (const WeightFormat& format : kFormats) {
    if (name == format.name) return format;
    known += (known.empty() ? "" : ", ") + std::string(format.name);
  }
  throw OpError("unknown weight format '" + std::string(name) + "', known: " + known);
}

void check_row(const WeightFormat& format, int64_t n, const char* what) {
  if (n < 1 || n % format.block_size != 0) {
    throw OpError(std::string(what) + ": expected a positive multiple of the " + format.name + " block size " +
                  std::to_string(format.block_size) + ", got " + std::to_string(n));
  }
}

bool wants_int8(const Session& session, int64_t rows) {
  return session.has_block_formats && session.activation_dtype == ActivationDtype::kInt8 &&
         rows <= few_rows(session.context.launch);
}

// --- EmbedTokens, RotaryTable, norms ------------------------------------------------------------------------------

EmbedTokens::EmbedTokens(const KernelInfo& info, Session& session, int32_t node)
    : session(session),
      node(node),
      format(weight_format(info.attr_string("format"))),
      dim(info.attr_int("dim")),
      scale(info.attr_float("scale")) {
  check_row(format, dim, "dim");
}

void EmbedTokens::compute(KernelContext& ctx) {
  const Tensor ids = ctx.input(0), weight = ctx.input(1);
  ids.check_shape({-1});
  weight.check_shape({-1, format.row_bytes(dim)});
  const int64_t tokens = ids.shape[0];
  float* hidden = ctx.output(0, {tokens, dim}).mutable_as<float>();
  Context& context = session.context;
  context.overwritten(hidden);
  check(embed_tokens(context.launch, context.sink(node), ids.as<int32_t>(), tokens, format.format, weight.as<uint8_t>(),
                     weight.shape[0], weight.shape[1], dim, scale, hidden),
        "embed_tokens");
}

RotaryTable::RotaryTable(const KernelInfo& info, Session& session, int32_t node)
    : session(session), node(node), scale(info.attr_float("scale")) {
  if (!std::isfinite(scale)) {
    throw OpError("attribute 'scale': expected a finite number, got " + std::to_string(scale));
  }
}

void RotaryTable::compute(KernelContext& ctx) {
  const Tensor positions = ctx.input(0), inv_freq = ctx.input(1);
  positions.check_shape({-1});
  inv_freq.check_shape({-1});
  const int64_t tokens = positions.shape[0], half = inv_freq.shape[0];
  float* table = ctx.output(0, {tokens, 2 * half}).mutable_as<float>();
  Context& context = session.context;
  check(rotary_table(context.launch, context.sink(node), positions.as<int32_t>(), tokens, inv_freq.as<float>(), half,
                     scale, table),
        "rotary_table");
}

RMSNorm::RMSNorm(const KernelInfo& info, Session& session, int32_t) : session(session), eps(checked_eps(info)) {}

namespace {

// Runs the norm; few rows are written as int8 as well, for the product that usually follows.
void run_norm(Session& session, NormParams p) {
  Context& context = session.context;
  context.overwritten(p.y);
  context.overwritten(p.residual_out);
  if (wants_int8(session, p.rows) && norm_quantizes(p.n)) p.quantized = context.quantized_for(p.y, p.rows, p.n);
  check(rms_norm(context.launch, p), "rms_norm");
}

}  // namespace

void RMSNorm::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0), weight = ctx.input(1);
  x.check_shape({-1, -1});
  const int64_t rows = x.shape[0], n = x.shape[1];
  weight.check_shape({n});
  float* y = ctx.output(0, x.shape).mutable_as<float>();
  run_norm(session, {x.as<float>(), nullptr, weight.as<float>(), nullptr, rows, n, eps, y, nullptr, {}});
}

AddRMSNorm::AddRMSNorm(const KernelInfo& info, Session& session, int32_t) : session(session), eps(checked_eps(info)) {}

void AddRMSNorm::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0), residual = ctx.input(1), weight = ctx.input(2);
  x.check_shape({-1, -1});
  const int64_t rows = x.shape[0], n = x.shape[1];
  residual.check_shape({rows, n});
  weight.check_shape({n});
  const float* post = nullptr;
  if (ctx.has_input(3)) {
    const Tensor post_weight = ctx.input(3);
    post_weight.check_shape({n});
    post = post_weight.as<float>();
  }
  float* y = ctx.output(0, x.shape).mutable_as<float>();
  float* sum = ctx.output(1, x.shape).mutable_as<float>();
  run_norm(session, {x.as<float>(), residual.as<float>(), weight.as<float>(), post, rows, n, eps, y, sum, {}});
}

// --- Products -----------------------------------------------------------------------------------------------------

namespace {

constexpr size_t kMaxWeights = 3;
constexpr size_t kFirstWeight = 2;  // index of w0 among the inputs

Epilogue parse_epilogue(const std::string& name) {
  if (name == "none") return Epilogue::kNone;
  if (name == "swiglu") return Epilogue::kSwiglu;
  if (name == "geglu") return Epilogue::kGeglu;
  throw OpError("epilogue: expected none, swiglu or geglu, got '" + name + "'");
}

// Products of the same rows with several weights; what a weight's path needs of the rows is made once.
class Products {
 public:
  Products(Session& session, int32_t node, const Rows& rows)
      : session_(session), context_(session.context), sink_(context_.sink(node)), rows_(rows) {
    if (rows.count > kMaxGridRows) {
      throw OpError("x: expected at most " + std::to_string(kMaxGridRows) + " rows, got " + std::to_string(rows.count));
    }
  }

  bool takes_int8(const WeightFormat& format) const {
    return session_.activation_dtype == ActivationDtype::kInt8 && format.is_block() &&
           rows_.count <= few_rows(context_.launch) && matvec_int8_takes(rows_.k);
  }

  // `count` weights of one format whose columns lie side by side in y.
  void run(const WeightFormat& format, const Weight* weights, int count, const Product& out) {
    if (takes_int8(format)) {
      check(matvec_int8(context_.launch, quantized(), rows_.count, rows_.k, weights, count, {}, out), "matvec_int8");
      return;
    }
    const bool in_float = rows_.count <= kFewElementRows || session_.activation_dtype == ActivationDtype::kFloat32 ||
                          format.format == Format::kF32;
    Product part = out;
    for (int i = 0; i < count; ++i) {
      if (in_float) {
        check(matvec_float(context_.launch, sink_, rows_, weights[i], part), "matvec_float");
      } else if (context_.launch.has_wgmma) {
        run_wgmma(format, weights[i], part);
      } else {
        check(matmul_mma(context_.launch, rounded(), rows_.count, rows_.k, padded_k(), weights[i], part), "matmul_mma");
      }
      part.y += weights[i].rows;
      if (part.bias != nullptr) part.bias += weights[i].rows;
    }
  }

  // Both weights of a gated pair, of one format that takes int8. y is written as int8 as well, for the product that
  // usually follows.
  void run_gated(const Weight& weight, const uint8_t* up, Epilogue epilogue, const Product& out) {
    const QuantizedRows x = quantized();
    Gate gate{up, epilogue, {}};
    if (weight.rows % 32 == 0) gate.quantized = context_.quantized_for(out.y, rows_.count, weight.rows);
    check(matvec_int8(context_.launch, x, rows_.count, rows_.k, &weight, 1, gate, out), "matvec_int8");
  }

 private:
  int64_t padded_k() const { return (rows_.k + 63) / 64 * 64; }

  // Many rows: weights that are not bfloat16 rows as the kernel wants them become such, some columns at a time.
  void run_wgmma(const WeightFormat& format, Weight weight, Product out) {
    const Launch& launch = context_.launch;
    const int64_t k = padded_k();
    if (format.is_block() && rows_.count <= kMaxBlocksRows) {
      const int splits = wgmma_blocks_splits(launch, rows_.count, k, weight);
      float* parts = context_.scratch<float>(Context::kParts, splits == 1 ? 0 : splits * rows_.count * weight.rows);
      check(matmul_wgmma_blocks(launch, rounded(), rows_.count, rows_.k, k, weight, parts, out), "matmul_wgmma_blocks");
      return;
    }
    const bool as_stored = weight.format == Format::kBF16 && rows_.k == k;
    const int64_t most = as_stored ? weight.rows : std::max<int64_t>(128, kMaxDequantized / (2 * k) / 128 * 128);
    for (int64_t left = weight.rows; left > 0; left -= most) {
      Weight part = weight;
      part.rows = std::min(left, most);
      const void* values = part.data;
      if (!as_stored) {
        void* made = context_.scratch<uint16_t>(Context::kDequantized, part.rows * k);
        check(dequantize_rows(launch, part, rows_.k, k, made), "dequantize_rows");
        values = made;
      }
      const int splits = wgmma_splits(launch, rows_.count, part.rows, k);
      float* parts = context_.scratch<float>(Context::kParts, splits == 1 ? 0 : splits * rows_.count * part.rows);
      check(matmul_wgmma(launch, rounded(), rows_.count, k, values, part.rows, parts, out), "matmul_wgmma");
      weight.data += part.rows * weight.row_bytes;
      out.y += part.rows;
      if (out.bias != nullptr) out.bias += part.rows;
    }
  }

  QuantizedRows quantized() {
    if (quantized_.values == nullptr && rows_.index == nullptr) {
      quantized_ = context_.quantized_of(rows_.x, rows_.count, rows_.k);
    }
    if (quantized_.values == nullptr) {
      quantized_ = context_.quantized_for(rows_.index == nullptr ? rows_.x : nullptr, rows_.count, rows_.k);
      check(quantize_rows(context_.launch, sink_, rows_, quantized_), "quantize_rows");
    }
    return quantized_;
  }

  void* rounded() {
    if (rounded_ == nullptr) {
      rounded_ = context_.scratch<uint16_t>(Context::kRounded, rows_.count * padded_k());
      check(round_rows(context_.launch, sink_, rows_, padded_k(), rounded_), "round_rows");
    }
    return rounded_;
  }

  Session& session_;
  Context& context_;
  const ErrorSink sink_;
  const Rows rows_;
  QuantizedRows quantized_{};
  void* rounded_ = nullptr;
};

}  // namespace

QMatMul::QMatMul(const KernelInfo& info, Session& session, int32_t node)
    : session(session),
      node(node),
      out_features(info.attr_ints("out_features")),
      in_features(info.attr_int("in_features")),
      epilogue(parse_epilogue(info.attr_string("epilogue"))) {
  for (const std::string& name : info.attr_names("formats")) {
    formats.push_back(&weight_format(name));
    check_row(*formats.back(), in_features, "in_features");
    session.has_block_formats |= formats.back()->is_block();
  }
  if (formats.empty() || formats.size() > kMaxWeights || formats.size() != out_features.size()) {
    throw OpError("formats and out_features: expected one entry per weight, 1 to 3, got " +
                  std::to_string(formats.size()) + " and " + std::to_string(out_features.size()));
  }
  for (int64_t n : out_features) {
    if (n < 1) throw OpError("out_features: expected positive numbers, got " + std::to_string(n));
  }
  if (epilogue != Epilogue::kNone && (formats.size() != 2 || out_features[0] != out_features[1])) {
    throw OpError("epilogue: a gated one needs two weights of the same out_features");
  }
}

void QMatMul::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0);
  x.check_shape({-1, in_features});
  Weight weights[kMaxWeights] = {};
  int64_t total = 0;
  for (size_t i = 0; i < kMaxWeights; i++) {
    const bool given = ctx.has_input(kFirstWeight + i);
    if (given != (i < formats.size())) {
      throw OpError("w" + std::to_string(i) + ": expected " + std::to_string(formats.size()) +
                    " weights as in `formats`, this one is " + (given ? "extra" : "absent"));
    }
    if (!given) continue;
    const Tensor w = ctx.input(kFirstWeight + i);
    w.check_shape({out_features[i], formats[i]->row_bytes(in_features)});
    weights[i] = {w.as<uint8_t>(), formats[i]->format, out_features[i], formats[i]->row_bytes(in_features)};
    total += out_features[i];
  }
  const float* bias = nullptr;
  if (ctx.has_input(1)) {
    const Tensor tensor = ctx.input(1);
    tensor.check_shape({total});
    bias = tensor.as<float>();
  }
  const int64_t rows = x.shape[0], columns = epilogue == Epilogue::kNone ? total : out_features[0];
  float* y = ctx.output(0, {rows, columns}).mutable_as<float>();
  session.context.overwritten(y);
  Products products(session, node, {x.as<float>(), rows, in_features, nullptr, rows});
  if (epilogue != Epilogue::kNone && formats[0] == formats[1] && products.takes_int8(*formats[0])) {
    return products.run_gated(weights[0], weights[1].data, epilogue, {y, columns, bias, 0.0f});
  }
  float* target = epilogue == Epilogue::kNone ? y : session.context.scratch<float>(Context::kGates, rows * total);
  int64_t column = 0;
  for (size_t i = 0, count = 1; i < formats.size(); i += count, count = 1) {
    int64_t width = out_features[i];
    for (; i + count < formats.size() && formats[i + count] == formats[i]; ++count) width += out_features[i + count];
    products.run(*formats[i], weights + i, static_cast<int>(count),
                 {target + column, total, bias == nullptr ? nullptr : bias + column, 0.0f});
    column += width;
  }
  if (epilogue != Epilogue::kNone) {
    check(gate_rows(session.context.launch, target, rows, columns, epilogue, y), "gate_rows");
  }
}

LogitsHead::LogitsHead(const KernelInfo& info, Session& session, int32_t node)
    : session(session),
      node(node),
      format(weight_format(info.attr_string("format"))),
      in_features(info.attr_int("in_features")),
      vocab_size(info.attr_int("vocab_size")),
      soft_cap(info.attr_float("soft_cap")) {
  check_row(format, in_features, "in_features");
  if (vocab_size < 1) throw OpError("vocab_size: expected a positive number, got " + std::to_string(vocab_size));
  if (!(soft_cap >= 0.0f)) throw OpError("soft_cap: expected 0 or more, got " + std::to_string(soft_cap));
}

void LogitsHead::compute(KernelContext& ctx) {
  const Tensor x = ctx.input(0), indices = ctx.input(1), weight = ctx.input(2);
  x.check_shape({-1, in_features});
  indices.check_shape({-1});
  weight.check_shape({vocab_size, format.row_bytes(in_features)});
  const int64_t rows = indices.shape[0];
  float* logits = ctx.output(0, {rows, vocab_size}).mutable_as<float>();
  session.context.overwritten(logits);
  if (rows > 0 && x.shape[0] == 0) throw OpError("logits_indices: x has no rows");
  Products products(session, node, {x.as<float>(), rows, in_features, indices.as<int32_t>(), x.shape[0]});
  const Weight head{weight.as<uint8_t>(), format.format, vocab_size, weight.shape[1]};
  products.run(format, &head, 1, {logits, vocab_size, nullptr, soft_cap});
}

}  // namespace trivet::cuda
