// clang-format off: the Vec of the tier comes first
#include "vec_scalar.h"
#include "rms_norm_rows.h"
// clang-format on

namespace trivet {

const RmsNormKernels kRmsNormScalar = kRmsNormKernels;

}  // namespace trivet
