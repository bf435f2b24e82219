// Prints what the CPU and the operating system offer, one feature a line; test_features.py runs it on emulated CPUs.
#include <cstdio>

#include "../../backends/cpu/features.h"

int main() {
  for (const std::string& name : trivet::feature_names(trivet::probe_cpu())) std::printf("%s\n", name.c_str());
}
