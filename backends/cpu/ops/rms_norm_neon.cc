// clang-format off: the Vec of the tier comes first
#include "vec_neon.h"
#include "rms_norm_rows.h"
// clang-format on

namespace trivet {

const RmsNormKernels kRmsNormNeon = kRmsNormKernels;

}  // namespace trivet
