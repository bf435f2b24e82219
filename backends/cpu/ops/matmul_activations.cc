#include "matmul_activations.h"

#include <algorithm>

namespace trivet {
namespace {

constexpr int64_t kSerialElements = 1 << 14;  // that one thread quantises sooner than it wakes another

bool has_halves(const WeightFormat& format) { return format.format == Format::kQ6_K; }

// Consecutive parts of one scratch slot, each on a cache line of its own.
class Carver {
 public:
  Carver(int slot, int64_t bytes) : at_(ThreadScratch::get<uint8_t>(slot, bytes)) {}

  static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  template <class T>
  T* take(int64_t count) {
    auto* part = reinterpret_cast<T*>(at_);
    at_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return part;
  }

 private:
  uint8_t* at_;
};

// Quantised rows and the sums that corrections are made of.
struct RowBuffers {
  uint8_t* q;
  float* d;
  float* sum;
  int32_t* sums;

  static int64_t bytes(int64_t m, int64_t k, int q_bytes) {
    const int64_t values = Carver::aligned(m * (k / kBlock) * 4);
    return Carver::aligned(m * k * q_bytes) + 2 * values + Carver::aligned(m * (k / kBlock) * 8);
  }

  RowBuffers(Carver& carver, int64_t m, int64_t k, int q_bytes)
      : q(carver.take<uint8_t>(m * k * q_bytes)),
        d(carver.take<float>(m * (k / kBlock))),
        sum(carver.take<float>(m * (k / kBlock))),
        sums(carver.take<int32_t>(2 * m * (k / kBlock))) {}

  void quantize(const MatMulKernels& kernels, const float* x, int64_t k, int64_t i) const {
    const int64_t at = i * (k / kBlock);
    kernels.quantize(x, k, q + i * k * kernels.q_bytes, d + at, sum + at, sums + 2 * at);
  }
};

void quantize_rows(Activations& a, const SessionContext& session, const MatMulKernels& kernels, const float* x,
                   int64_t k) {
  const int64_t blocks = k / kBlock;
  const int64_t correction_bytes = Carver::aligned(a.m * blocks * 8);
  Carver carver(kSlotQuantized, RowBuffers::bytes(a.m, k, kernels.q_bytes) + a.num_forms * correction_bytes);
  const RowBuffers rows(carver, a.m, k, kernels.q_bytes);
  for (int f = 0; f < a.num_forms; f++) a.forms[f].correction = carver.take<int32_t>(2 * a.m * blocks);
  a.rows = {rows.q, rows.d, rows.sum, nullptr};
  session.pool.parallel_for(a.m, [&](int64_t i, int) {
    rows.quantize(kernels, x + i * k, k, i);
    for (const QuantizedForm& form : std::span(a.forms, static_cast<size_t>(a.num_forms))) {
      for (int64_t b = i * blocks; b < (i + 1) * blocks; b++) {
        const int32_t first = form.halves ? rows.sums[2 * b] : rows.sums[2 * b] + rows.sums[2 * b + 1];
        form.correction[2 * b] = -form.zero_point * first;
        form.correction[2 * b + 1] = -form.zero_point * rows.sums[2 * b + 1];
      }
    }
  });
}

void pack_rows(Activations& a, const SessionContext& session, const MatMulKernels& kernels, const float* x, int64_t k) {
  const int64_t blocks = k / kBlock;
  int64_t bytes = 0;
  for (int f = 0; f < a.num_forms; f++) {
    bytes += Carver::aligned(a.m * blocks * packed_block_bytes(a.forms[f].halves));
  }
  Carver carver(kSlotQuantized, bytes);
  for (int f = 0; f < a.num_forms; f++) {
    a.forms[f].packed = carver.take<uint8_t>(a.m * blocks * packed_block_bytes(a.forms[f].halves));
  }
  // Tasks are groups; where those are few, runs of their blocks, if that is worth waking a thread: threads that took
  // rows would write to the same cache lines.
  const RowGroups groups(a.m);
  const int64_t wanted = a.m * k >= kSerialElements ? 2 * session.pool.num_threads() / groups.count : 1;
  const int64_t runs = std::max<int64_t>(1, std::min(wanted, blocks));
  session.pool.parallel_for(groups.count * runs, [&](int64_t task, int) {
    const int64_t row = groups.start(task / runs);
    const int64_t count = groups.start(task / runs + 1) - row;
    const int64_t first = task % runs * blocks / runs;
    const int64_t length = (task % runs + 1) * blocks / runs - first;
    Carver own(kSlotGroup, RowBuffers::bytes(kGroupRows, length * kBlock, kernels.q_bytes));
    const RowBuffers rows(own, kGroupRows, length * kBlock, kernels.q_bytes);
    for (int64_t i = 0; i < count; i++) {
      rows.quantize(kernels, x + (row + i) * k + first * kBlock, length * kBlock, i);
    }
    for (const QuantizedForm& form : std::span(a.forms, static_cast<size_t>(a.num_forms))) {
      uint8_t* out = form.packed + (row * blocks + count * first) * packed_block_bytes(form.halves);
      kernels.pack({rows.q, rows.d, rows.sum, nullptr}, rows.sums, count, length, form.zero_point, form.halves, out);
    }
  });
}

void pad_rows(Activations& a, const float* x, int64_t k) {
  a.float_k = (k + 15) / 16 * 16;
  if (a.float_k == k) {
    a.x_float = x;
    return;
  }
  float* padded = ThreadScratch::get<float>(kSlotPadded, a.m * a.float_k);
  for (int64_t i = 0; i < a.m; i++) {
    std::copy_n(x + i * k, k, padded + i * a.float_k);
    std::fill_n(padded + i * a.float_k + k, a.float_k - k, 0.0f);
  }
  a.x_float = padded;
}

}  // namespace

bool QuantizedForm::serves(const WeightFormat& format) const {
  return zero_point == format.zero_point && halves == has_halves(format);
}

const QuantizedForm& Activations::form_for(const WeightFormat& format) const {
  const auto* end = forms + num_forms;
  return *std::find_if(forms, end, [&](const QuantizedForm& form) { return form.serves(format); });
}

Activations prepare_activations(const SessionContext& session, const MatMulKernels& kernels, const MatMulArgs& args,
                                int64_t row0, int64_t m) {
  Activations a{.m = m, .packs = kernels.pack != nullptr && m >= kMinPackedRows, .forms = {}};
  const float* x = args.x + row0 * args.k;
  bool as_float = false;
  for (const WeightMatrix& w : args.weights) {
    if (uses_float(session, *w.format)) {
      as_float = true;
    } else if (std::none_of(a.forms, a.forms + a.num_forms,
                            [&](const QuantizedForm& form) { return form.serves(*w.format); })) {
      a.forms[a.num_forms++] = {w.format->zero_point, has_halves(*w.format), nullptr, nullptr};
    }
  }
  if (as_float) pad_rows(a, x, args.k);
  if (a.num_forms > 0) (a.packs ? pack_rows : quantize_rows)(a, session, kernels, x, args.k);
  return a;
}

}  // namespace trivet
