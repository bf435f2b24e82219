#include "kernels.h"

#include <algorithm>

namespace trivet::cuda {
namespace {

constexpr int64_t kMaxGridRows = 65535;  // blockIdx.y and z
// Up to here the rows of a product are taken as int8 (block formats) or float32. Where warpgroup tensor cores take
// over, they keep up with the memory from fewer rows on.
constexpr int64_t kFewRows = 16, kFewRowsBesideWgmma = 8, kFewElementRows = 4;

int64_t few_rows(const Launch& launch) { return launch.has_wgmma ? kFewRowsBesideWgmma : kFewRows; }

constexpr int64_t kMaxDequantized = int64_t{128} << 20;  // bytes of scratch for weights in bfloat16

}  // namespace

bool wants_int8(const Session& session, int64_t rows) {
  return session.has_block_formats && session.activation_dtype == ActivationDtype::kInt8 &&
         rows <= few_rows(session.context.launch);
}

bool wants_bfloat16(const Session& session, int64_t rows) {
  return session.has_bfloat16_products && session.activation_dtype == ActivationDtype::kInt8 &&
         rows > kFewElementRows && !wants_int8(session, rows);
}

// --- EmbedTokens, RotaryTable, norms ------------------------------------------------------------------------------

EmbedTokens::EmbedTokens(const KernelInfo& info, Session& session, int32_t node)
    : session(session), node(node), attributes(embed_attributes(info)) {}

void EmbedTokens::compute(KernelContext& ctx) {
  const auto& [format, dim, scale] = attributes;
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
    : session(session), node(node), scale(finite_attribute(info, "scale")) {}

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

RMSNorm::RMSNorm(const KernelInfo& info, Session& session, int32_t node)
    : session(session), node(node), eps(eps_attribute(info)) {}

namespace {

// Runs the norm; its rows are written once more as the product that usually follows takes them.
void run_norm(Session& session, int32_t node, const NormInputs& in, float eps, float* y, float* residual_out) {
  NormParams p{in.x, in.residual, in.weight, in.post_weight, in.index, in.rows, in.x_rows,
               in.n, eps,         y,         residual_out,   {},       nullptr};
  Context& context = session.context;
  context.overwritten(p.y);
  context.overwritten(p.residual_out);
  if (norm_writes_copies(p.n)) {
    if (wants_int8(session, p.rows)) p.quantized = context.quantized_for(p.y, p.rows, p.n);
    if (wants_bfloat16(session, p.rows)) p.rounded = context.rounded_for(p.y, p.rows, p.n);
  }
  check(rms_norm(context.launch, context.sink(node), p), "rms_norm");
}

}  // namespace

void RMSNorm::compute(KernelContext& ctx) {
  const NormInputs in = norm_inputs(ctx);
  float* y = ctx.output(0, {in.rows, in.n}).mutable_as<float>();
  run_norm(session, node, in, eps, y, nullptr);
}

AddRMSNorm::AddRMSNorm(const KernelInfo& info, Session& session, int32_t node)
    : session(session), node(node), eps(eps_attribute(info)) {}

void AddRMSNorm::compute(KernelContext& ctx) {
  const NormInputs in = add_norm_inputs(ctx);
  float* y = ctx.output(0, {in.rows, in.n}).mutable_as<float>();
  float* sum = ctx.output(1, {in.rows, in.n}).mutable_as<float>();
  run_norm(session, node, in, eps, y, sum);
}

// --- Products -----------------------------------------------------------------------------------------------------

namespace {

// Products of the same rows with several weights; what a weight's path needs of the rows is made once.
class Products {
 public:
  Products(Session& session, const Rows& rows) : session_(session), context_(session.context), rows_(rows) {
    if (rows.count > kMaxGridRows) {
      throw OpError("x: expected at most " + std::to_string(kMaxGridRows) + " rows, got " + std::to_string(rows.count));
    }
  }

  bool takes_int8(const WeightFormat& format) const {
    return session_.activation_dtype == ActivationDtype::kInt8 && format.is_block() &&
           rows_.count <= few_rows(context_.launch) && matvec_int8_takes(context_.launch, format.format, rows_.k);
  }

  bool takes_float(const WeightFormat& format) const {
    return rows_.count <= kFewElementRows || session_.activation_dtype == ActivationDtype::kFloat32 ||
           format.format == Format::kF32;
  }

  // Whether run_gated takes both weights of a pair at a time.
  bool takes_gate(const WeightFormat& format) const {
    return takes_int8(format) || (!format.is_block() && takes_float(format));
  }

  // Whether run_wgmma takes a weight of this format, also together with others.
  bool takes_wgmma(const WeightFormat& format) const {
    return context_.launch.has_wgmma && !takes_int8(format) && !takes_float(format) &&
           (!format.is_block() || rows_.count > kMaxBlocksRows);
  }

  // `count` weights of one format whose columns lie side by side in y.
  void run(const WeightFormat& format, const Weight* weights, int count, const Product& out) {
    if (takes_int8(format)) {
      check(matvec_int8(context_.launch, quantized(), rows_.count, rows_.k, weights, count, {}, out), "matvec_int8");
      return;
    }
    if (!format.is_block() && takes_float(format)) {
      check(matvec_elements(context_.launch, rows_, weights, count, {}, out), "matvec_elements");
      return;
    }
    Product part = out;
    for (int i = 0; i < count; ++i) {
      if (takes_float(format)) {
        check(matvec_float(context_.launch, rows_, weights[i], part), "matvec_float");
      } else if (takes_wgmma(format)) {
        run_wgmma(weights + i, 1, Epilogue::kNone, part);
      } else if (context_.launch.has_wgmma) {
        run_wgmma_blocks(weights[i], part);
      } else {
        check(matmul_mma(context_.launch, rounded(), rows_.count, rows_.k, padded_k(), weights[i], part), "matmul_mma");
      }
      part.y += weights[i].rows;
      if (part.bias != nullptr) part.bias += weights[i].rows;
    }
  }

  // Both weights of a gated pair of one format, where takes_gate. An int8 product writes y as int8 as well, for the
  // product that usually follows.
  void run_gated(const WeightFormat& format, const Weight& weight, const uint8_t* up, Epilogue epilogue,
                 const Product& out) {
    Gate gate{up, epilogue, {}};
    if (!takes_int8(format)) {
      check(matvec_elements(context_.launch, rows_, &weight, 1, gate, out), "matvec_elements");
      return;
    }
    const QuantizedRows x = quantized();
    if (weight.rows % 32 == 0) gate.quantized = context_.quantized_for(out.y, rows_.count, weight.rows);
    check(matvec_int8(context_.launch, x, rows_.count, rows_.k, &weight, 1, gate, out), "matvec_int8");
  }

  // Many rows, weights of any formats side by side or a gated pair: those that are not bfloat16 rows as the kernel
  // wants them become such, some columns at a time. A gated product writes y as bfloat16 as well.
  void run_wgmma(const Weight* weights, int count, Epilogue epilogue, const Product& out) {
    const void* x = rounded();
    const int64_t k = padded_k();
    int64_t widest = 0, made_rows = 0;
    for (int i = 0; i < count; ++i) {
      widest = std::max(widest, weights[i].rows);
      if (!is_wgmma_weight(weights[i])) made_rows += weights[i].rows;
    }
    const bool at_once = 2 * k * made_rows <= kMaxDequantized;
    const int64_t most = at_once ? widest : std::max<int64_t>(256, kMaxDequantized / (2 * k * count) / 256 * 256);
    uint16_t* scratch = context_.scratch<uint16_t>(Context::kDequantized, k * std::min(made_rows, most * count));
    const bool rounds = epilogue != Epilogue::kNone && out.stride % 64 == 0;
    void* rounded_y = rounds ? context_.rounded_for(out.y, rows_.count, out.stride) : nullptr;
    for (int64_t first = 0; first < widest; first += most) {
      WgmmaWeight parts[kMaxSegments];
      int num_parts = 0;
      uint16_t* made = scratch;
      for (int64_t i = 0, column = first; i < count; column += weights[i++].rows) {
        Weight part = weights[i];
        part.rows = std::min(part.rows - first, most);
        part.data += first * part.row_bytes;
        if (part.rows <= 0) continue;
        const bool ready = is_wgmma_weight(part);
        if (!ready) check(dequantize_rows(context_.launch, part, rows_.k, k, made), "dequantize_rows");
        parts[num_parts++] = {ready ? part.data : static_cast<const void*>(made), part.rows, ready ? rows_.k : k,
                              column, ready};
        if (!ready) made += part.rows * k;
      }
      check(matmul_wgmma(context_.launch, x, rows_.count, k, parts, num_parts, epilogue, rounded_y, out),
            "matmul_wgmma");
    }
  }

 private:
  int64_t padded_k() const { return (rows_.k + 63) / 64 * 64; }

  bool is_wgmma_weight(const Weight& weight) const {
    return weight.format == Format::kBF16 && rows_.k % 8 == 0 && reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
  }

  // A block format as it is stored.
  void run_wgmma_blocks(const Weight& weight, const Product& out) {
    const Launch& launch = context_.launch;
    const int64_t k = padded_k();
    const int splits = wgmma_blocks_splits(launch, rows_.count, k, weight);
    float* parts = context_.scratch<float>(Context::kParts, splits == 1 ? 0 : splits * rows_.count * weight.rows);
    check(matmul_wgmma_blocks(launch, rounded(), rows_.count, rows_.k, k, weight, parts, out), "matmul_wgmma_blocks");
  }

  QuantizedRows quantized() {
    if (quantized_.values == nullptr) quantized_ = context_.quantized_of(rows_.x, rows_.count, rows_.k);
    if (quantized_.values == nullptr) {
      quantized_ = context_.quantized_for(rows_.x, rows_.count, rows_.k);
      check(quantize_rows(context_.launch, rows_, quantized_), "quantize_rows");
    }
    return quantized_;
  }

  const void* rounded() {
    if (rounded_ == nullptr) rounded_ = context_.rounded_of(rows_.x, rows_.count, rows_.k);
    if (rounded_ == nullptr) {
      void* made = context_.rounded_for(rows_.x, rows_.count, rows_.k);
      check(round_rows(context_.launch, rows_, padded_k(), made), "round_rows");
      rounded_ = made;
    }
    return rounded_;
  }

  Session& session_;
  Context& context_;
  const Rows rows_;
  QuantizedRows quantized_{};
  const void* rounded_ = nullptr;
};

}  // namespace

QMatMul::QMatMul(const KernelInfo& info, Session& session, int32_t)
    : session(session), attributes(product_attributes(info)) {
  for (const WeightFormat* format : attributes.formats) {
    session.has_block_formats |= format->is_block();
    session.has_bfloat16_products |= format->format != Format::kF32;
  }
}

void QMatMul::compute(KernelContext& ctx) {
  const auto& [formats, out_features, in_features, epilogue, total] = attributes;
  const ProductInputs in = product_inputs(ctx, attributes);
  const int64_t rows = in.rows, columns = attributes.columns();
  Weight weights[kMaxWeights] = {};
  for (size_t i = 0; i < formats.size(); i++) {
    weights[i] = {in.weights[i], formats[i]->format, out_features[i], formats[i]->row_bytes(in_features)};
  }
  float* y = ctx.output(0, {rows, columns}).mutable_as<float>();
  session.context.overwritten(y);
  Products products(session, {in.x, rows, in_features});
  if (epilogue != Epilogue::kNone && formats[0] == formats[1] && products.takes_gate(*formats[0])) {
    return products.run_gated(*formats[0], weights[0], weights[1].data, epilogue, {y, columns, in.bias, 0.0f});
  }
  const auto takes_wgmma = [&](const WeightFormat* format) { return products.takes_wgmma(*format); };
  if (rows > 0 && std::all_of(formats.begin(), formats.end(), takes_wgmma)) {
    return products.run_wgmma(weights, static_cast<int>(formats.size()), epilogue, {y, columns, in.bias, 0.0f});
  }
  float* target = epilogue == Epilogue::kNone ? y : session.context.scratch<float>(Context::kGates, rows * total);
  int64_t column = 0;
  for (size_t i = 0, count = 1; i < formats.size(); i += count, count = 1) {
    int64_t width = out_features[i];
    for (; i + count < formats.size() && formats[i + count] == formats[i]; ++count) width += out_features[i + count];
    products.run(*formats[i], weights + i, static_cast<int>(count),
                 {target + column, total, in.bias == nullptr ? nullptr : in.bias + column, 0.0f});
    column += width;
  }
  if (epilogue != Epilogue::kNone) {
    Context& context = session.context;
    void* rounded =
        wants_bfloat16(session, rows) && columns % 64 == 0 ? context.rounded_for(y, rows, columns) : nullptr;
    check(gate_rows(context.launch, target, rows, columns, epilogue, y, rounded), "gate_rows");
  }
}

LogitsHead::LogitsHead(const KernelInfo& info, Session& session, int32_t)
    : session(session), attributes(head_attributes(info)) {}

void LogitsHead::compute(KernelContext& ctx) {
  const auto& [format, in_features, vocab_size, soft_cap] = attributes;
  const Tensor x = ctx.input(0), weight = ctx.input(1);
  x.check_shape({-1, in_features});
  const int64_t rows = x.shape[0];
  float* logits = ctx.output(0, {rows, vocab_size}).mutable_as<float>();
  session.context.overwritten(logits);
  Products products(session, {x.as<float>(), rows, in_features});
  const Weight head{head_weight(attributes, weight), format.format, vocab_size, format.row_bytes(in_features)};
  products.run(format, &head, 1, {logits, vocab_size, nullptr, soft_cap});
}

}  // namespace trivet::cuda
