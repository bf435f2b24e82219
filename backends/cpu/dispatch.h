// Kernel tiers of the CPU back end and the table by which an op picks its functions.
#pragma once

namespace trivet {

// A tier is a set of instructions that source files named *_<tier>.cc are compiled for; see CMakeLists.txt.
enum class Tier : int {
  kScalar,      // plain C++: the oracle, and all there is on a CPU that is not x86-64
  kBaseline,    // SSE2, which every x86-64 CPU has
  kAvx2,        // AVX2, FMA, F16C
  kAvx512Vnni,  // AVX-512 F, BW, VL, DQ, VNNI
};

inline constexpr Tier kTiers[] = {Tier::kScalar, Tier::kBaseline, Tier::kAvx2, Tier::kAvx512Vnni};

const char* tier_name(Tier tier);

// One op's function tables, one per tier; a null entry takes the next lower one. `scalar` is never null.
template <class Kernels>
struct TierTable {
  const Kernels* scalar;
  const Kernels* baseline;
  const Kernels* avx2;
  const Kernels* avx512_vnni;

  const Kernels& operator[](Tier tier) const {
    if (tier >= Tier::kAvx512Vnni && avx512_vnni != nullptr) return *avx512_vnni;
    if (tier >= Tier::kAvx2 && avx2 != nullptr) return *avx2;
    if (tier >= Tier::kBaseline && baseline != nullptr) return *baseline;
    return *scalar;
  }
};

}  // namespace trivet

// The TierTable of the tables prefixScalar, prefixBaseline, ...; only the first exists where the CPU is not x86-64.
#if defined(__x86_64__) || defined(_M_X64)
#define TRIVET_TIERS(prefix) {&prefix##Scalar, &prefix##Baseline, &prefix##Avx2, &prefix##Avx512Vnni}
#else
#define TRIVET_TIERS(prefix) {&prefix##Scalar, nullptr, nullptr, nullptr}
#endif
