#include "features.h"

#include <array>
#include <cstdint>
#include <iterator>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace trivet {
namespace {

struct FeatureName {
  const char* name;
  bool CpuFeatures::* member;
  Tier first;  // the tiers from this one on need it
  Tier last = kTiers[std::size(kTiers) - 1];
};

#if defined(__x86_64__)
constexpr FeatureName kFeatureNames[] = {
    {"sse2", &CpuFeatures::sse2, Tier::kBaseline},
    {"avx2", &CpuFeatures::avx2, Tier::kAvx2},
    {"fma", &CpuFeatures::fma, Tier::kAvx2},
    {"f16c", &CpuFeatures::f16c, Tier::kAvx2},
    {"avx_vnni", &CpuFeatures::avx_vnni, Tier::kAvxVnni, Tier::kAvxVnni},  // a Zen 4 has AVX-512 VNNI without it
    {"avx512f", &CpuFeatures::avx512f, Tier::kAvx512Vnni},
    {"avx512bw", &CpuFeatures::avx512bw, Tier::kAvx512Vnni},
    {"avx512vl", &CpuFeatures::avx512vl, Tier::kAvx512Vnni},
    {"avx512dq", &CpuFeatures::avx512dq, Tier::kAvx512Vnni},
    {"avx512_vnni", &CpuFeatures::avx512_vnni, Tier::kAvx512Vnni},
};
#elif defined(__aarch64__)
constexpr FeatureName kFeatureNames[] = {
    {"asimd", &CpuFeatures::asimd, Tier::kNeon},
    {"asimddp", &CpuFeatures::asimddp, Tier::kDotprod},
    {"i8mm", &CpuFeatures::i8mm, Tier::kI8mm},
};
#else
constexpr std::array<FeatureName, 0> kFeatureNames{};
#endif

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

#if defined(__x86_64__)
// Extended control register 0: the register sets that the operating system saves. Needs CPUID.1:ECX.OSXSAVE.
uint64_t read_xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}
#elif defined(__aarch64__) && defined(__APPLE__)
// False also for a name that this macOS does not know; then a lower tier runs.
bool sysctl_flag(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

}  // namespace

CpuFeatures probe_cpu() {
  CpuFeatures f;
#if defined(__x86_64__)
  const auto bit = [](uint32_t reg, int index) { return ((reg >> index) & 1u) != 0; };
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return f;
  f.sse2 = bit(edx, 26);
  const bool osxsave = bit(ecx, 27);
  const bool cpu_avx = bit(ecx, 28);
  const bool cpu_fma = bit(ecx, 12);
  const bool cpu_f16c = bit(ecx, 29);
  const uint64_t xcr0 = osxsave ? read_xcr0() : 0;
  const bool ymm_saved = (xcr0 & 0x06) == 0x06;               // XMM, YMM
  const bool zmm_saved = ymm_saved && (xcr0 & 0xE0) == 0xE0;  // opmask, upper half of ZMM0-15, ZMM16-31
  f.fma = ymm_saved && cpu_avx && cpu_fma;
  f.f16c = ymm_saved && cpu_avx && cpu_f16c;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return f;
  f.avx2 = ymm_saved && cpu_avx && bit(ebx, 5);
  f.avx512f = zmm_saved && bit(ebx, 16);
  f.avx512dq = zmm_saved && bit(ebx, 17);
  f.avx512bw = zmm_saved && bit(ebx, 30);
  f.avx512vl = zmm_saved && bit(ebx, 31);
  f.avx512_vnni = zmm_saved && bit(ecx, 11);
  const bool has_subleaf_1 = eax >= 1;
  if (!has_subleaf_1 || __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return f;
  f.avx_vnni = ymm_saved && cpu_avx && bit(eax, 4);
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long caps = getauxval(AT_HWCAP);
  f.asimd = (caps & HWCAP_ASIMD) != 0;
  f.asimddp = (caps & HWCAP_ASIMDDP) != 0;
  f.i8mm = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  f.asimd = true;  // of every Mac's Arm CPU; macOS has no name for it
  f.asimddp = sysctl_flag("hw.optional.arm.FEAT_DotProd");
  f.i8mm = sysctl_flag("hw.optional.arm.FEAT_I8MM");
#endif
  return f;
}

bool prefetches_into_l1() {
#if defined(__x86_64__)
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool amd = ebx == signature_AMD_ebx && ecx == signature_AMD_ecx && edx == signature_AMD_edx;
  if (!amd || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  return ((eax >> 8) & 0xF) + ((eax >> 20) & 0xFF) == 0x1A;  // the family: base and extended
#else
  return false;
#endif
}

CpuFeatures features_from_list(const std::string& names) {
  CpuFeatures f;
  for (size_t begin = 0; begin < names.size();) {
    size_t end = names.find(',', begin);
    if (end == std::string::npos) end = names.size();
    const std::string name = names.substr(begin, end - begin);
    bool known = false;
    for (const FeatureName& feature : kFeatureNames) {
      if (name == feature.name) f.*feature.member = known = true;
    }
    if (!known) {
      std::vector<std::string> all;
      for (const FeatureName& feature : kFeatureNames) all.emplace_back(feature.name);
      throw std::invalid_argument("unknown CPU feature '" + name + "', known: " + joined(all));
    }
    begin = end + 1;
  }
  return f;
}

std::vector<std::string> feature_names(const CpuFeatures& features) {
  std::vector<std::string> names;
  for (const FeatureName& feature : kFeatureNames) {
    if (features.*feature.member) names.emplace_back(feature.name);
  }
  return names;
}

std::vector<std::string> missing_features(Tier tier, const CpuFeatures& features) {
  std::vector<std::string> names;
  for (const FeatureName& feature : kFeatureNames) {
    if (feature.first <= tier && tier <= feature.last && !(features.*feature.member)) names.emplace_back(feature.name);
  }
  return names;
}

Tier best_tier(const CpuFeatures& features) {
  Tier best = Tier::kScalar;
  for (Tier tier : kTiers) {
    if (missing_features(tier, features).empty()) best = tier;
  }
  return best;
}

Tier resolve_tier(const std::string& name, const CpuFeatures& features) {
  if (name.empty()) return best_tier(features);
  std::vector<std::string> known;
  for (Tier tier : kTiers) {
    known.emplace_back(tier_name(tier));
    if (name != tier_name(tier)) continue;
    const std::vector<std::string> missing = missing_features(tier, features);
    if (missing.empty()) return tier;
    throw std::invalid_argument("CPU tier '" + name + "': this CPU (or its operating system) lacks " + joined(missing) +
                                "; the best tier here is '" + tier_name(best_tier(features)) + "'");
  }
  throw std::invalid_argument("unknown CPU tier '" + name + "', known: " + joined(known));
}

}  // namespace trivet
