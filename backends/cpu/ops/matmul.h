// Drives the tier kernels over a whole product: quantises activations, hands tiles to threads, applies the epilogue.
#pragma once

#include <cstddef>
#include <span>

#include "../../common/ort_op.h"
#include "matmul_kernels.h"
#include "weight_chain.h"

namespace trivet {

struct MatMulArgs {
  const float* x;  // [m, k]
  int64_t m;
  int64_t k;
  std::span<const WeightMatrix> weights;  // with a gated epilogue: gate, up, of one n
  const float* bias;                      // null or [sum of n], added before the epilogue
  Epilogue epilogue;
  float* y;  // [m, y_stride]
  int64_t y_stride;
  const WeightTiles& next;  // of the product that the step runs next
};

void matmul(const SessionContext& session, const MatMulArgs& args);

}  // namespace trivet
