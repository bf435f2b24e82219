#include "matmul.h"

#include <algorithm>

#include "../features.h"
#include "matmul_activations.h"

namespace trivet {
namespace {

// Activation rows that are quantised and multiplied at a time: bounds scratch, and a weight tile is unpacked once per
// so many rows.
constexpr int64_t kMaxRows = 512;
// With fewer tiles than threads can share well, rows are split too, but not below this many.
constexpr int64_t kMinSplitRows = 32;
constexpr int kMaxTiles = 2;  // of 16 weight rows, multiplied at a time: all there are where activations are packed

struct Product {
  const SessionContext& session;
  const MatMulKernels& kernels;
  const MatMulArgs& args;
  int64_t row0;  // first row of the block
  Activations x;

  // Weight rows that are multiplied at a time.
  int64_t width() const { return x.packs ? kMaxTiles * kTileRows : kTileRows; }
};

// Some rows of the block: whole groups, where activations are packed.
struct RowRange {
  int64_t first;
  int64_t m;
  int64_t first_group;
  int64_t last_group;
};

void convert_row(const MatMulKernels& kernels, const WeightFormat& format, const uint8_t* row, int64_t k, float* out) {
  if (format.format == Format::kF16 && kernels.convert_f16 != nullptr) {
    kernels.convert_f16(row, k, out);
  } else if (format.format == Format::kBF16 && kernels.convert_bf16 != nullptr) {
    kernels.convert_bf16(row, k, out);
  } else {
    format.dequantize(row, k, out);
  }
}

Sums scratch_sums(float* memory, int64_t m) { return {{memory, memory + m * kTileRows}, kTileRows}; }

void multiply_float(const Product& p, const WeightMatrix& w, int64_t r0, int rows, RowRange range, float* acc,
                    int64_t acc_stride) {
  const int64_t k = p.args.k;
  const int64_t row_bytes = w.format->row_bytes(k);
  const uint8_t* weight = w.data + r0 * row_bytes;
  const int64_t float_k = p.x.float_k;
  const float* x = p.x.x_float + range.first * float_k;
  FloatTileArgs tile{nullptr, k, rows, x, float_k, range.m, float_k, acc, acc_stride};
  const bool in_place =
      w.format->format == Format::kF32 && float_k == k && reinterpret_cast<uintptr_t>(weight) % alignof(float) == 0;
  if (in_place) {
    tile.weight = reinterpret_cast<const float*>(weight);
  } else {
    float* converted = ThreadScratch::get<float>(kSlotTileWeights, kTileRows * float_k);
    for (int r = 0; r < rows; r++) {
      convert_row(p.kernels, *w.format, weight + r * row_bytes, k, converted + r * float_k);
      std::fill_n(converted + r * float_k + k, float_k - k, 0.0f);
    }
    tile.weight = converted;
    tile.weight_stride = float_k;
  }
  p.kernels.float_tile(tile);
}

void multiply_blocks(const Product& p, const WeightMatrix& w, int64_t r0, int rows, RowRange range, Sums acc) {
  const int64_t blocks = p.args.k / kBlock;
  const int64_t row_bytes = w.format->row_bytes(p.args.k);
  const uint8_t* weight = w.data + r0 * row_bytes;
  if (rows < p.width()) {  // zeros stand in for the missing rows
    uint8_t* whole = ThreadScratch::get<uint8_t>(kSlotTileWeights, p.width() * row_bytes);
    std::copy_n(weight, rows * row_bytes, whole);
    std::fill_n(whole + rows * row_bytes, (p.width() - rows) * row_bytes, uint8_t{0});
    weight = whole;
  }
  static const bool into_l1 = prefetches_into_l1();
  const auto format = static_cast<int>(w.format->format);
  const QuantizedForm& form = p.x.form_for(*w.format);
  Panel* panels = ThreadScratch::get<Panel>(kSlotPanel, kMaxTiles);
  if (p.x.packs) {
    float* partial = ThreadScratch::get<float>(kSlotPartial, range.m * kMaxTiles * kTileRows);
    p.kernels.packed_tiles[format]({weight, row_bytes, blocks, form.packed, RowGroups(p.x.m), range.first_group,
                                    range.last_group, acc, partial, panels, into_l1});
    return;
  }
  QuantizedRows x = p.x.rows;
  x.q = static_cast<const uint8_t*>(x.q) + range.first * p.args.k * p.kernels.q_bytes;
  x.d += range.first * blocks;
  x.sum += range.first * blocks;
  x.correction = form.correction + 2 * range.first * blocks;
  p.kernels.tile[format]({weight, row_bytes, blocks, x, range.m, acc.tile[0], acc.stride, panels, into_l1});
}

void add_bias(const float* bias, int n, int64_t m, float* acc, int64_t acc_stride) {
  for (int64_t i = 0; i < m; i++) {
    for (int r = 0; r < n; r++) acc[i * acc_stride + r] += bias[r];
  }
}

// acc = the rows of `range` times `rows` weight rows from row r0 on, plus bias; may write all columns of its tiles.
void multiply(const Product& p, const WeightMatrix& w, const float* bias, int64_t r0, int rows, RowRange range,
              Sums acc) {
  const bool as_float = uses_float(p.session, *w.format);
  if (!as_float) multiply_blocks(p, w, r0, rows, range, acc);
  for (int c0 = 0, t = 0; c0 < rows; c0 += kTileRows, t++) {
    const int n = std::min(kTileRows, rows - c0);
    if (as_float) multiply_float(p, w, r0 + c0, n, range, acc.tile[t], acc.stride);
    if (bias != nullptr) add_bias(bias + c0, n, range.m, acc.tile[t], acc.stride);
  }
}

// width() columns of one weight, [column0 + r0, ...) of y.
void run_plain(const Product& p, const WeightMatrix& w, int64_t column0, int64_t r0, RowRange range) {
  const int rows = static_cast<int>(std::min(p.width(), w.n - r0));
  const float* bias = p.args.bias == nullptr ? nullptr : p.args.bias + column0 + r0;
  float* y = p.args.y + (p.row0 + range.first) * p.args.y_stride + column0 + r0;
  if (rows == p.width()) {
    multiply(p, w, bias, r0, rows, range, {{y, y + kTileRows}, p.args.y_stride});
    return;
  }
  const Sums acc = scratch_sums(ThreadScratch::get<float>(kSlotTileAcc, range.m * kMaxTiles * kTileRows), range.m);
  multiply(p, w, bias, r0, rows, range, acc);
  for (int c = 0; c < rows; c++) {
    for (int64_t i = 0; i < range.m; i++) {
      y[i * p.args.y_stride + c] = acc.tile[c / kTileRows][i * kTileRows + c % kTileRows];
    }
  }
}

// The same columns of gate and up, and their gated product.
void run_gated(const Product& p, int64_t r0, RowRange range) {
  const WeightMatrix& gate = p.args.weights[0];
  const WeightMatrix& up = p.args.weights[1];
  const int rows = static_cast<int>(std::min(p.width(), gate.n - r0));
  const int64_t size = kMaxTiles * kTileRows * range.m;
  float* memory = ThreadScratch::get<float>(kSlotTileAcc, 2 * size);
  // float_tile writes the columns there are, glu reads 16.
  if (rows < p.width()) std::fill_n(memory, 2 * size, 0.0f);
  const Sums acc[2] = {scratch_sums(memory, range.m), scratch_sums(memory + size, range.m)};
  const float* bias = p.args.bias;
  multiply(p, gate, bias == nullptr ? nullptr : bias + r0, r0, rows, range, acc[0]);
  multiply(p, up, bias == nullptr ? nullptr : bias + gate.n + r0, r0, rows, range, acc[1]);
  float* y = p.args.y + (p.row0 + range.first) * p.args.y_stride + r0;
  for (int c0 = 0, t = 0; c0 < rows; c0 += kTileRows, t++) {
    p.kernels.glu(p.args.epilogue, acc[0].tile[t], acc[1].tile[t], range.m, std::min(kTileRows, rows - c0), y + c0,
                  p.args.y_stride);
  }
}

// Part `split` of `splits` of the block's rows.
RowRange row_range(const Activations& x, int64_t split, int64_t splits) {
  const RowGroups groups = x.packs ? RowGroups(x.m) : RowGroups(x.m, x.m);
  const int64_t first_group = split * groups.count / splits;
  const int64_t last_group = (split + 1) * groups.count / splits;
  const int64_t first = groups.start(first_group);
  return {first, groups.start(last_group) - first, first_group, last_group};
}

void run_block(const Product& p) {
  const bool gated = p.args.epilogue != Epilogue::kNone;
  const auto units_of = [&](const WeightMatrix& w) { return (w.n + p.width() - 1) / p.width(); };
  int64_t units = 0;
  for (const WeightMatrix& w : p.args.weights) {
    units += units_of(w);
    if (gated) break;
  }
  const int64_t threads = p.session.pool.num_threads();
  int64_t splits = 1;
  if (units < 4 * threads) splits = std::clamp<int64_t>(p.x.m / kMinSplitRows, 1, threads);
  // Shares of neighbouring units: a tile's kernel fetches what follows in memory.
  const auto run_task = [&](int64_t task, int) {
    const RowRange range = row_range(p.x, task % splits, splits);
    int64_t unit = task / splits;
    if (gated) return run_gated(p, unit * p.width(), range);
    int64_t column0 = 0;
    size_t which = 0;
    for (; unit >= units_of(p.args.weights[which]); which++) {
      unit -= units_of(p.args.weights[which]);
      column0 += p.args.weights[which].n;
    }
    run_plain(p, p.args.weights[which], column0, unit * p.width(), range);
  };
  p.session.pool.parallel_shares(units * splits, run_task, WeightPrefetcher(p.args.next));
}

}  // namespace

const MatMulKernels& matmul_kernels(Tier tier) {
#if defined(__x86_64__)
  static constexpr TierTable<MatMulKernels> kTable{
      {&kMatMulScalar, &kMatMulBaseline, &kMatMulAvx2, &kMatMulAvxVnni, &kMatMulAvx512Vnni}};
#elif defined(__aarch64__)
  static constexpr TierTable<MatMulKernels> kTable{{&kMatMulScalar, &kMatMulNeon, &kMatMulDotprod, &kMatMulI8mm}};
#else
  static constexpr TierTable<MatMulKernels> kTable = TRIVET_TIERS(kMatMul);
#endif
  return kTable[tier];
}

void matmul(const SessionContext& session, const MatMulArgs& args) {
  const MatMulKernels& kernels = matmul_kernels(session.tier);
  for (int64_t row0 = 0; row0 < args.m; row0 += kMaxRows) {
    const int64_t m = std::min(kMaxRows, args.m - row0);
    run_block({session, kernels, args, row0, prepare_activations(session, kernels, args, row0, m)});
  }
}

}  // namespace trivet
