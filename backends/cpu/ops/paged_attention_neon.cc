// clang-format off: the Vec of the tier comes first
#include "vec_neon.h"
#include "paged_attention_tile.h"
// clang-format on

namespace trivet {

const AttentionKernels kAttentionNeon = kAttentionKernels;

}  // namespace trivet
