#include "dispatch.h"

namespace trivet {

const char* tier_name(Tier tier) {
  switch (tier) {
    case Tier::kScalar:
      return "scalar";
#if defined(__x86_64__)
    case Tier::kBaseline:
      return "baseline";
    case Tier::kAvx2:
      return "avx2";
    case Tier::kAvxVnni:
      return "avx_vnni";
    case Tier::kAvx512Vnni:
      return "avx512_vnni";
#elif defined(__aarch64__)
    case Tier::kNeon:
      return "neon";
    case Tier::kDotprod:
      return "dotprod";
    case Tier::kI8mm:
      return "i8mm";
#endif
  }
  return "unknown";
}

}  // namespace trivet
