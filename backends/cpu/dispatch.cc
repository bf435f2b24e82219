#include "dispatch.h"

namespace trivet {

const char* tier_name(Tier tier) {
  switch (tier) {
    case Tier::kScalar:
      return "scalar";
    case Tier::kBaseline:
      return "baseline";
    case Tier::kAvx2:
      return "avx2";
    case Tier::kAvx512Vnni:
      return "avx512_vnni";
  }
  return "unknown";
}

}  // namespace trivet
