// clang-format off: the Vec of the tier comes first
#include "vec_avx512.h"
#include "sample_rows.h"
// clang-format on

namespace trivet {

const SampleKernels kSampleAvx512Vnni = kSampleKernels;

}  // namespace trivet
