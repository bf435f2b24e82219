// clang-format off: the Vec of the tier comes first
#include "vec_neon.h"
#include "sample_rows.h"
// clang-format on

namespace trivet {

const SampleKernels kSampleNeon = kSampleKernels;

}  // namespace trivet
