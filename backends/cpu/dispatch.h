// Kernel tiers of the CPU back end and the table by which an op picks its functions.
#pragma once

namespace trivet {

// A tier is a set of instructions that source files named *_<tier>.cc are compiled for; see CMakeLists.txt. The tiers
// of an architecture are in ascending order. Each has the instructions of those below it, but AVX-512 VNNI does not
// need AVX-VNNI.
enum class Tier : int {
  kScalar,  // plain C++: the oracle, and all there is on an architecture without tiers
#if defined(__x86_64__)
  kBaseline,    // SSE2, which every x86-64 CPU has
  kAvx2,        // AVX2, FMA, F16C
  kAvxVnni,     // AVX2, FMA, F16C, AVX-VNNI
  kAvx512Vnni,  // AVX2, FMA, F16C, AVX-512 F, BW, VL, DQ, VNNI
#elif defined(__aarch64__)
  kNeon,     // Advanced SIMD, which every ARMv8-A CPU has
  kDotprod,  // SDOT
  kI8mm,     // SMMLA, USMMLA, USDOT
#endif
};

#if defined(__x86_64__)
inline constexpr Tier kTiers[] = {Tier::kScalar, Tier::kBaseline, Tier::kAvx2, Tier::kAvxVnni, Tier::kAvx512Vnni};
#elif defined(__aarch64__)
inline constexpr Tier kTiers[] = {Tier::kScalar, Tier::kNeon, Tier::kDotprod, Tier::kI8mm};
#else
inline constexpr Tier kTiers[] = {Tier::kScalar};
#endif

const char* tier_name(Tier tier);

// One op's function tables in the order of kTiers; a null entry takes the next lower one. The first is never null, nor
// is that of AVX-512 VNNI.
template <class Kernels>
struct TierTable {
  const Kernels* kernels[sizeof(kTiers) / sizeof(kTiers[0])];

  const Kernels& operator[](Tier tier) const {
    int index = static_cast<int>(tier);
    while (kernels[index] == nullptr) index--;
    return *kernels[index];
  }
};

}  // namespace trivet

// The TierTable of the tables prefixScalar, ... of an op that works on floats. AVX-VNNI, SDOT and the matrix products
// of Arm are for integers, so only the matrix product has kernels of those tiers.
#if defined(__x86_64__)
#define TRIVET_TIERS(prefix)                                                          \
  {                                                                                   \
    {                                                                                 \
      &prefix##Scalar, &prefix##Baseline, &prefix##Avx2, nullptr, &prefix##Avx512Vnni \
    }                                                                                 \
  }
#elif defined(__aarch64__)
#define TRIVET_TIERS(prefix)                           \
  {                                                    \
    {                                                  \
      &prefix##Scalar, &prefix##Neon, nullptr, nullptr \
    }                                                  \
  }
#else
#define TRIVET_TIERS(prefix) \
  {                          \
    {                        \
      &prefix##Scalar        \
    }                        \
  }
#endif
