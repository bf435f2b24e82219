// clang-format off: the Vec of the tier comes first
#include "vec_avx512.h"
#include "paged_attention_avx512_vnni_int16.inl"
// clang-format on

namespace trivet {

const AttentionKernels kAttentionAvx512Vnni = kAttentionKernelsWithInt16;

}  // namespace trivet
