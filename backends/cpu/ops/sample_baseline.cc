// clang-format off: the Vec of the tier comes first
#include "vec_sse2.h"
#include "sample_rows.h"
// clang-format on

namespace trivet {

const SampleKernels kSampleBaseline = kSampleKernels;

}  // namespace trivet
