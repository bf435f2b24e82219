// clang-format off: the Vec of the tier comes first
#include "vec_avx512.h"
#include "rms_norm_rows.h"
// clang-format on

namespace trivet {

const RmsNormKernels kRmsNormAvx512Vnni = kRmsNormKernels;

}  // namespace trivet
