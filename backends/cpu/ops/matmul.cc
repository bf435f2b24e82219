#include "matmul.h"

#include <algorithm>
#include <cstring>

namespace trivet {
namespace {

// Activation rows that are quantised and multiplied at a time: bounds scratch, and a weight tile is unpacked once per
// so many rows.
constexpr int64_t kMaxRows = 256;
// With fewer tiles than threads can share well, rows are split too, but not below this many.
constexpr int64_t kMinSplitRows = 32;

// Slots of ThreadScratch. A caller's slots are read by its workers; the last three belong to the thread that runs a
// tile.
enum Slot { kSlotQuantized, kSlotPadded, kSlotTileAcc, kSlotTileWeights, kSlotPanel };

struct Product {
  const SessionContext& session;
  const MatMulKernels& kernels;
  const MatMulArgs& args;
  int64_t row0;  // first row of the block
  int64_t m;     // rows of the block
  // Activations in the form that the formats at hand need; the others are null.
  QuantizedRows quantized{};             // without correction
  const int32_t* corrections[256] = {};  // by zero point, + 1 for formats with halves
  const float* x_float = nullptr;        // [m, float_k], zeros past k
  int64_t float_k = 0;                   // k rounded up to 16

  bool uses_float(const WeightFormat& format) const {
    return !format.is_block() || session.activation_dtype == ActivationDtype::kFloat32;
  }
};

int correction_key(const WeightFormat& format) { return format.zero_point | (format.format == Format::kQ6_K ? 1 : 0); }

void quantize_rows(Product& p) {
  const int64_t blocks = p.args.k / kBlock;
  const int64_t count = p.m * blocks;
  int num_corrections = 0;
  bool wanted[256] = {};
  for (const WeightMatrix& w : p.args.weights) {
    if (p.uses_float(*w.format) || wanted[correction_key(*w.format)]) continue;
    wanted[correction_key(*w.format)] = true;
    num_corrections++;
  }
  if (num_corrections == 0) return;

  const auto align = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const int64_t q_bytes = align(p.m * p.args.k * p.kernels.q_bytes);
  const int64_t float_bytes = align(count * 4);
  const int64_t sums_bytes = align(count * 8);
  auto* at =
      ThreadScratch::get<uint8_t>(kSlotQuantized, q_bytes + 2 * float_bytes + (1 + num_corrections) * sums_bytes);
  const auto take = [&at](int64_t bytes) {
    auto* part = at;
    at += bytes;
    return part;
  };
  auto* q = take(q_bytes);
  auto* d = reinterpret_cast<float*>(take(float_bytes));
  auto* sum = reinterpret_cast<float*>(take(float_bytes));
  auto* sums = reinterpret_cast<int32_t*>(take(sums_bytes));
  for (int key = 0; key < 256; key++) {
    if (wanted[key]) p.corrections[key] = reinterpret_cast<int32_t*>(take(sums_bytes));
  }
  p.quantized = {q, d, sum, nullptr};

  p.session.pool.parallel_for(p.m, [&](int64_t i, int) {
    p.kernels.quantize(p.args.x + (p.row0 + i) * p.args.k, p.args.k, q + i * p.args.k * p.kernels.q_bytes,
                       d + i * blocks, sum + i * blocks, sums + 2 * i * blocks);
    for (int key = 0; key < 256; key++) {
      if (!wanted[key]) continue;
      auto* correction = const_cast<int32_t*>(p.corrections[key]);
      const int zero_point = key & ~1;
      for (int64_t b = i * blocks; b < (i + 1) * blocks; b++) {
        const bool halves = (key & 1) != 0;
        correction[2 * b] = -zero_point * (halves ? sums[2 * b] : sums[2 * b] + sums[2 * b + 1]);
        correction[2 * b + 1] = -zero_point * sums[2 * b + 1];
      }
    }
  });
}

void prepare_float_rows(Product& p) {
  bool wanted = false;
  for (const WeightMatrix& w : p.args.weights) wanted = wanted || p.uses_float(*w.format);
  if (!wanted) return;
  const int64_t k = p.args.k;
  const float* x = p.args.x + p.row0 * k;
  p.float_k = (k + 15) / 16 * 16;
  if (p.float_k == k) {
    p.x_float = x;
    return;
  }
  float* padded = ThreadScratch::get<float>(kSlotPadded, p.m * p.float_k);
  for (int64_t i = 0; i < p.m; i++) {
    std::copy_n(x + i * k, k, padded + i * p.float_k);
    std::fill_n(padded + i * p.float_k + k, p.float_k - k, 0.0f);
  }
  p.x_float = padded;
}

void convert_row(const MatMulKernels& kernels, const WeightFormat& format, const uint8_t* row, int64_t k, float* out) {
  if (format.format == Format::kF16 && kernels.convert_f16 != nullptr) {
    kernels.convert_f16(row, k, out);
  } else if (format.format == Format::kBF16 && kernels.convert_bf16 != nullptr) {
    kernels.convert_bf16(row, k, out);
  } else {
    format.dequantize(row, k, out);
  }
}

// acc[m, acc_stride] = rows [i0, i0 + m) of the block times `rows` weight rows from row r0 on; may write 16 columns.
void multiply_tile(const Product& p, const WeightMatrix& w, int64_t r0, int rows, int64_t i0, int64_t m, float* acc,
                   int64_t acc_stride) {
  const int64_t k = p.args.k;
  const int64_t row_bytes = w.format->row_bytes(k);
  const uint8_t* weight = w.data + r0 * row_bytes;
  if (!p.uses_float(*w.format)) {
    const int64_t blocks = k / kBlock;
    QuantizedRows x = p.quantized;
    x.q = static_cast<const uint8_t*>(x.q) + i0 * k * p.kernels.q_bytes;
    x.d += i0 * blocks;
    x.sum += i0 * blocks;
    x.correction = p.corrections[correction_key(*w.format)] + 2 * i0 * blocks;
    if (rows < kTileRows) {  // zeros stand in for the missing rows
      uint8_t* whole = ThreadScratch::get<uint8_t>(kSlotTileWeights, kTileRows * row_bytes);
      std::copy_n(weight, rows * row_bytes, whole);
      std::fill_n(whole + rows * row_bytes, (kTileRows - rows) * row_bytes, uint8_t{0});
      weight = whole;
    }
    p.kernels.tile[static_cast<int>(w.format->format)](
        {weight, row_bytes, blocks, x, m, acc, acc_stride, ThreadScratch::get<Panel>(kSlotPanel, 1)});
    return;
  }
  FloatTileArgs tile{nullptr, k, rows, p.x_float + i0 * p.float_k, p.float_k, m, p.float_k, acc, acc_stride};
  const bool in_place =
      w.format->format == Format::kF32 && p.float_k == k && reinterpret_cast<uintptr_t>(weight) % alignof(float) == 0;
  if (in_place) {
    tile.weight = reinterpret_cast<const float*>(weight);
  } else {
    float* converted = ThreadScratch::get<float>(kSlotTileWeights, kTileRows * p.float_k);
    for (int r = 0; r < rows; r++) {
      convert_row(p.kernels, *w.format, weight + r * row_bytes, k, converted + r * p.float_k);
      std::fill_n(converted + r * p.float_k + k, p.float_k - k, 0.0f);
    }
    tile.weight = converted;
    tile.weight_stride = p.float_k;
  }
  p.kernels.float_tile(tile);
}

void add_bias(const float* bias, int n, int64_t m, float* acc, int64_t acc_stride) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < m; i++) {
    for (int r = 0; r < n; r++) acc[i * acc_stride + r] += bias[r];
  }
}

// One tile of one weight, columns [column0 + r0, ...) of y.
void run_plain(const Product& p, const WeightMatrix& w, int64_t column0, int64_t r0, int64_t i0, int64_t m) {
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, w.n - r0));
  const float* bias = p.args.bias == nullptr ? nullptr : p.args.bias + column0 + r0;
  float* y = p.args.y + (p.row0 + i0) * p.args.y_stride + column0 + r0;
  if (rows == kTileRows) {
    multiply_tile(p, w, r0, rows, i0, m, y, p.args.y_stride);
    add_bias(bias, rows, m, y, p.args.y_stride);
    return;
  }
  float* acc = ThreadScratch::get<float>(kSlotTileAcc, 2 * m * kTileRows);
  multiply_tile(p, w, r0, rows, i0, m, acc, kTileRows);
  add_bias(bias, rows, m, acc, kTileRows);
  for (int64_t i = 0; i < m; i++) std::copy_n(acc + i * kTileRows, rows, y + i * p.args.y_stride);
}

// The same tile of gate and up, and their gated product.
void run_gated(const Product& p, int64_t r0, int64_t i0, int64_t m) {
  const WeightMatrix& gate = p.args.weights[0];
  const WeightMatrix& up = p.args.weights[1];
  const int rows = static_cast<int>(std::min<int64_t>(kTileRows, gate.n - r0));
  float* acc = ThreadScratch::get<float>(kSlotTileAcc, 2 * m * kTileRows);
  float* acc_up = acc + m * kTileRows;
  if (rows < kTileRows) std::fill_n(acc, 2 * m * kTileRows, 0.0f);  // float_tile writes `rows` columns, glu reads 16
  multiply_tile(p, gate, r0, rows, i0, m, acc, kTileRows);
  multiply_tile(p, up, r0, rows, i0, m, acc_up, kTileRows);
  if (p.args.bias != nullptr) {
    add_bias(p.args.bias + r0, rows, m, acc, kTileRows);
    add_bias(p.args.bias + gate.n + r0, rows, m, acc_up, kTileRows);
  }
  p.kernels.glu(p.args.epilogue, acc, acc_up, m, rows, p.args.y + (p.row0 + i0) * p.args.y_stride + r0,
                p.args.y_stride);
}

void run_block(Product& p) {
  quantize_rows(p);
  prepare_float_rows(p);
  const bool gated = p.args.epilogue != Epilogue::kNone;
  const auto tiles_of = [](const WeightMatrix& w) { return (w.n + kTileRows - 1) / kTileRows; };
  int64_t tiles = 0;
  for (const WeightMatrix& w : p.args.weights) {
    tiles += tiles_of(w);
    if (gated) break;
  }
  const int64_t threads = p.session.pool.num_threads();
  int64_t splits = 1;
  if (tiles < 4 * threads) splits = std::clamp<int64_t>(p.m / kMinSplitRows, 1, threads);
  const int64_t split_rows = (p.m + splits - 1) / splits;
  // Runs of neighbouring tiles, about eight per thread: few enough hand-outs, fine enough to balance.
  const int64_t run = std::max<int64_t>(1, tiles / (8 * threads));
  const int64_t runs = (tiles + run - 1) / run;
  p.session.pool.parallel_for(runs * splits, [&](int64_t task, int) {
    const int64_t i0 = task % splits * split_rows;
    const int64_t m = std::min(split_rows, p.m - i0);
    if (m <= 0) return;
    for (int64_t t = task / splits * run; t < std::min(tiles, (task / splits + 1) * run); t++) {
      if (gated) {
        run_gated(p, t * kTileRows, i0, m);
        continue;
      }
      int64_t tile = t;
      int64_t column0 = 0;
      size_t which = 0;
      for (; tile >= tiles_of(p.args.weights[which]); which++) {
        tile -= tiles_of(p.args.weights[which]);
        column0 += p.args.weights[which].n;
      }
      run_plain(p, p.args.weights[which], column0, tile * kTileRows, i0, m);
    }
  });
}

}  // namespace

const MatMulKernels& matmul_kernels(Tier tier) {
#if defined(__aarch64__)
  static constexpr TierTable<MatMulKernels> kTable{{&kMatMulScalar, &kMatMulNeon, &kMatMulDotprod, &kMatMulI8mm}};
#else
  static constexpr TierTable<MatMulKernels> kTable = TRIVET_TIERS(kMatMul);
#endif
  return kTable[tier];
}

void matmul(const SessionContext& session, const MatMulArgs& args) {
  for (int64_t row0 = 0; row0 < args.m; row0 += kMaxRows) {
    Product product{session, matmul_kernels(session.tier), args, row0, std::min(kMaxRows, args.m - row0)};
    run_block(product);
  }
}

}  // namespace trivet
