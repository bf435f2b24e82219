// The kernel tiers of this CPU against the scalar one, bit for bit, as a program that needs neither Python nor
// onnxruntime: it can be linked statically and run under an emulator. Forced tiers that the CPU lacks must be refused.
//
// Prints one line per tier; the exit status is 1 if something differs.
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../backends/common/ort_op.h"
#include "../../backends/cpu/dispatch.h"
#include "../../backends/cpu/features.h"
#include "../../backends/cpu/ops/matmul.h"
#include "../../backends/cpu/ops/rms_norm_kernel.h"
#include "../../backends/cpu/ops/sample_kernel.h"

namespace trivet {
namespace {

constexpr const char* kFormats[] = {"f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"};
constexpr TierTable<RmsNormKernels> kNorms = TRIVET_TIERS(kRmsNorm);
constexpr TierTable<SampleKernels> kSamplers = TRIVET_TIERS(kSample);

std::mt19937& generator() {
  static std::mt19937 made(20);
  return made;
}

std::vector<float> random_floats(size_t count, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> out(count);
  for (float& x : out) x = normal(generator());
  return out;
}

// Random bytes whose 16-bit words, read as binary16 or bfloat16 numbers, are finite: whatever lies there, a scale is
// one.
std::vector<uint8_t> random_weight(size_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(generator()() & 0xBB);
  return out;
}

std::vector<float> product(Tier tier, const WeightFormat& format, const std::vector<uint8_t>& weight, int64_t n,
                           const std::vector<float>& x, int64_t m, int64_t k, Epilogue epilogue) {
  const SessionContext session{ThreadPool::shared(2), tier, ActivationDtype::kInt8};
  const WeightMatrix one{&format, weight.data(), n};
  const std::vector<WeightMatrix> weights(epilogue == Epilogue::kNone ? 1 : 2, one);
  std::vector<float> y(static_cast<size_t>(m * n));
  matmul(session, {x.data(), m, k, weights, nullptr, epilogue, y.data(), n});
  return y;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Float formats add fused products in most tiers: those are compared within rounding.
bool close(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); i++) {
    if (!(a[i] - b[i] <= 1e-3f && b[i] - a[i] <= 1e-3f)) return false;
  }
  return true;
}

std::vector<std::string> matmul_problems(Tier tier) {
  std::vector<std::string> out;
  for (const char* name : kFormats) {
    const WeightFormat& format = weight_format(name);
    const int64_t k = 3 * 256;
    for (const int64_t m : {1, 2, 3, 7, 15}) {
      const int64_t n = 37;
      auto weight = random_weight(static_cast<size_t>(n * format.row_bytes(k)));
      if (!format.is_block()) {  // small numbers: the comparison is absolute
        for (size_t i = 1; i < weight.size(); i += 2) weight[i] = static_cast<uint8_t>((weight[i] & 0x81) | 0x20);
      }
      const auto x = random_floats(static_cast<size_t>(m * k), 2.0f);
      for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kSwiglu, Epilogue::kGeglu}) {
        const auto expected = product(Tier::kScalar, format, weight, n, x, m, k, epilogue);
        const auto got = product(tier, format, weight, n, x, m, k, epilogue);
        if (!(format.is_block() ? same(got, expected) : close(got, expected))) {
          out.push_back(std::string("matmul ") + name + " m=" + std::to_string(m));
        }
      }
    }
  }
  return out;
}

std::vector<std::string> row_problems(Tier tier) {
  std::vector<std::string> out;
  for (const int64_t n : {1, 3, 16, 37, 576, 1025}) {
    const auto x = random_floats(static_cast<size_t>(n), 3.0f);
    const auto weight = random_floats(static_cast<size_t>(n), 1.0f);
    std::vector<float> expected(x.size());
    std::vector<float> got(x.size());
    kNorms[Tier::kScalar].norm(x.data(), weight.data(), n, 1e-5f, expected.data());
    kNorms[tier].norm(x.data(), weight.data(), n, 1e-5f, got.data());
    if (!same(got, expected)) out.push_back("rms_norm n=" + std::to_string(n));
    const float highest = kSamplers[Tier::kScalar].highest_value(x.data(), n);
    const SampleKernels& sampler = kSamplers[tier];
    kSamplers[Tier::kScalar].weigh(x.data(), n, highest, expected.data());
    sampler.weigh(x.data(), n, highest, got.data());
    const bool sums = kSamplers[Tier::kScalar].sum_exp(x.data(), n, highest) == sampler.sum_exp(x.data(), n, highest);
    if (sampler.highest_value(x.data(), n) != highest || !same(got, expected) || !sums) {
      out.push_back("sample n=" + std::to_string(n));
    }
  }
  return out;
}

bool is_refused(Tier tier, const CpuFeatures& features) {
  try {
    resolve_tier(tier_name(tier), features);
    return false;
  } catch (const std::invalid_argument&) {
    return true;
  }
}

int check() {
  const CpuFeatures features = probe_cpu();
  int failures = 0;
  for (const Tier tier : kTiers) {
    if (!missing_features(tier, features).empty()) {
      const bool refused = is_refused(tier, features);
      std::printf("%s: %s\n", tier_name(tier), refused ? "absent, refused" : "ABSENT AND NOT REFUSED");
      failures += refused ? 0 : 1;
      continue;
    }
    std::vector<std::string> problems = matmul_problems(tier);
    for (std::string& problem : row_problems(tier)) problems.push_back(std::move(problem));
    std::printf("%s: %s\n", tier_name(tier), problems.empty() ? "as scalar" : "DIFFERS:");
    for (const std::string& problem : problems) std::printf("  %s\n", problem.c_str());
    failures += static_cast<int>(problems.size());
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace trivet

int main() { return trivet::check(); }
