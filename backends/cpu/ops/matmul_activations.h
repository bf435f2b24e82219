// The activations of a product in the forms that its weights need.
#pragma once

#include <span>

#include "matmul.h"
#include "matmul_kernels.h"

namespace trivet {

// Slots of ThreadScratch. A caller's slots are read by its workers; from kSlotGroup on they belong to the thread that
// runs a task.
enum Slot {
  kSlotQuantized,
  kSlotPadded,
  kSlotGroup,
  kSlotTileAcc,
  kSlotPartial,
  kSlotTileWeights,
  kSlotPanel,
};
static_assert(kSlotPanel < ThreadScratch::kSlots);

// Quantised activations as formats with one zero point (and halves, or not) take them: row by row or packed.
struct QuantizedForm {
  int zero_point;
  bool halves;
  int32_t* correction;  // of QuantizedRows; null when packed
  uint8_t* packed;      // all groups; null when row by row

  bool serves(const WeightFormat& format) const;
};

// A block of rows; what no weight needs is null.
struct Activations {
  int64_t m;
  bool packs;            // quantised activations are packed
  QuantizedRows rows{};  // without correction; null when packed
  int num_forms = 0;
  QuantizedForm forms[kMaxWeights];
  const float* x_float = nullptr;  // [m, float_k], zeros past k
  int64_t float_k = 0;             // k rounded up to 16

  const QuantizedForm& form_for(const WeightFormat& format) const;
};

inline bool uses_float(const SessionContext& session, const WeightFormat& format) {
  return !format.is_block() || session.activation_dtype == ActivationDtype::kFloat32;
}

// Rows [row0, row0 + m) of args.x; valid until the calling thread's next call.
Activations prepare_activations(const SessionContext& session, const MatMulKernels& kernels, const MatMulArgs& args,
                                int64_t row0, int64_t m);

}  // namespace trivet
