// Prints what the CPU and the operating system offer, one feature a line, and whether to prefetch into the first-level
// cache; test_features.py runs it on emulated CPUs.
#include <cstdio>

#include "../../backends/cpu/features.h"

int main() {
  for (const std::string& name : trivet::feature_names(trivet::probe_cpu())) std::printf("%s\n", name.c_str());
  if (trivet::prefetches_into_l1()) std::printf("prefetches_into_l1\n");
}
