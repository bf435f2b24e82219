// clang-format off: the Vec of the tier comes first
#include "vec_sse2.h"
#include "paged_attention_tile.h"
// clang-format on

namespace trivet {

const AttentionKernels kAttentionBaseline = kAttentionKernels;

}  // namespace trivet
