// What the CPU and the operating system offer, and which kernel tiers that allows.
#pragma once

#include <string>
#include <vector>

#include "dispatch.h"

namespace trivet {

// An x86 feature counts only if the operating system also saves its registers (XCR0); Arm's are what Linux announces
// (HWCAP), under its names, or what macOS says (sysctl).
struct CpuFeatures {
  bool sse2 = false;
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx_vnni = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;
  bool avx512dq = false;
  bool avx512_vnni = false;
  bool asimd = false;    // Advanced SIMD (NEON)
  bool asimddp = false;  // dot products
  bool i8mm = false;     // matrix products of 8-bit integers
};

CpuFeatures probe_cpu();
// Whether the weights of one row's product are best prefetched into the first-level cache and not into the second: that
// takes a core which can wait for many lines there. True for AMD's family 1Ah: on a Zen 5 one row was 1.06 to 1.12
// times as fast (tests/tools/bench_ops.py --rows 1 --formats q4_1,q5_0,q8_0 --n 9728 --k 896 --copies 30, then against
// the second level two tiles ahead). Zen 4 waits for 24 lines, too few for the memory's latency: it took up to 1.8
// times as long (--n 1920 --k 576 --copies 60). Others take the second level, too, and were not compared op by op.
bool prefetches_into_l1();
// The features named in a comma-separated list; throws std::invalid_argument for an unknown name.
CpuFeatures features_from_list(const std::string& names);
std::vector<std::string> feature_names(const CpuFeatures& features);
// Features that `tier` needs and `features` lacks; empty = the tier runs.
std::vector<std::string> missing_features(Tier tier, const CpuFeatures& features);
Tier best_tier(const CpuFeatures& features);
// The tier called `name` ("" = the best one); throws std::invalid_argument if it is unknown or the CPU lacks something.
Tier resolve_tier(const std::string& name, const CpuFeatures& features);

}  // namespace trivet
