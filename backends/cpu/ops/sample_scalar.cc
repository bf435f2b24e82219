// clang-format off: the Vec of the tier comes first
#include "vec_scalar.h"
#include "sample_rows.h"
// clang-format on

namespace trivet {

const SampleKernels kSampleScalar = kSampleKernels;

}  // namespace trivet
