// The kernel tiers of this CPU against the scalar one, bit for bit where both add in the same way, as a program that
// needs neither Python nor onnxruntime: it can be linked statically and run under an emulator. Forced tiers that the
// CPU lacks must be refused.
//
// Prints one line per tier; the exit status is 1 if something differs.
#include <algorithm>
#include <cmath>
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
#include "../../backends/cpu/ops/paged_attention_kernel.h"
#include "../../backends/cpu/ops/rms_norm_kernel.h"
#include "../../backends/cpu/ops/sample_kernel.h"

namespace trivet {
namespace {

constexpr const char* kFormats[] = {"f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"};
constexpr TierTable<RmsNormKernels> kNorms = TRIVET_TIERS(kRmsNorm);
constexpr TierTable<SampleKernels> kSamplers = TRIVET_TIERS(kSample);
constexpr TierTable<AttentionKernels> kAttentions = TRIVET_TIERS(kAttention);

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
  const WeightTiles nothing{};
  matmul(session, {x.data(), m, k, weights, nullptr, epilogue, y.data(), n, nothing});
  return y;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Within rounding, relative to the largest number.
bool close(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0.0f;
  for (const float x : b) largest = std::max(largest, std::fabs(x));
  for (size_t i = 0; i < a.size(); i++) {
    if (!(std::fabs(a[i] - b[i]) <= 1e-5f * largest)) return false;
  }
  return true;
}

// Whether a tier's products are the scalar ones bit for bit. Float formats add up in other orders, and the x86-64
// baseline has no fused multiply-add.
bool is_exact(Tier tier, const WeightFormat& format) {
  return format.is_block() && tier_name(tier) != std::string("baseline");
}

std::vector<std::string> matmul_problems(Tier tier) {
  std::vector<std::string> out;
  for (const char* name : kFormats) {
    const WeightFormat& format = weight_format(format_spec(name).format);
    const int64_t k = 3 * 256;
    for (const int64_t m : {1, 2, 3, 7, 15, 40}) {
      const int64_t n = 37;
      const auto weight = random_weight(static_cast<size_t>(n * format.row_bytes(k)));
      const auto x = random_floats(static_cast<size_t>(m * k), 2.0f);
      for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kSwiglu, Epilogue::kGeglu}) {
        const auto expected = product(Tier::kScalar, format, weight, n, x, m, k, epilogue);
        const auto got = product(tier, format, weight, n, x, m, k, epilogue);
        if (!(is_exact(tier, format) ? same(got, expected) : close(got, expected))) {
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

// A prompt of one request: two KV heads with three query heads each, over a whole tile of keys and a part of one.
struct Prompt {
  static constexpr int64_t kTokens = 75, kHeads = 6, kKvHeads = 2, kDim = 40, kBlockSize = 16, kBlocks = 5;
  std::vector<float> qkv = random_floats(kTokens * (kHeads + 2 * kKvHeads) * kDim, 1.0f);
  std::vector<float> cos_sin = random_floats(kTokens * kDim, 0.7f);
  std::vector<float> norm = random_floats(kDim, 1.0f);
  std::vector<int32_t> positions, block_table;
  int32_t query_start_loc[2] = {0, kTokens}, seq_len = kTokens;

  Prompt() {
    for (int32_t i = 0; i < kTokens; i++) positions.push_back(i);
    for (int32_t i = 0; i < kBlocks; i++) block_table.push_back(i);
  }

  std::vector<float> attend(Tier tier, KvDtype dtype) const {
    constexpr int64_t kPadded = (kDim + 15) / 16 * 16;
    std::vector<float> cache(kBlocks * kBlockSize * 2 * kKvHeads * kDim);
    std::vector<float> out(kTokens * kHeads * kDim), queries(out.size());
    PagedAttentionParams p{};
    p.num_tokens = kTokens, p.num_requests = 1, p.num_blocks = p.max_blocks = kBlocks;
    p.num_heads = kHeads, p.num_kv_heads = kKvHeads, p.head_dim = p.rotary_dim = p.stored_dim = p.query_stride = kDim;
    p.group = kHeads / kKvHeads, p.padded_dim = kPadded, p.block_size = kBlockSize;
    p.scale = 0.2f, p.soft_cap = 30.0f, p.norm_eps = 1e-5f, p.sliding_window = 50, p.kv_dtype = dtype;
    p.qkv = qkv.data(), p.cos_sin = cos_sin.data(), p.q_norm = p.k_norm = norm.data();
    p.positions = p.slot_mapping = positions.data(),
    p.block_table = block_table.data();  // block i holds positions 16 i...
    p.query_start_loc = query_start_loc, p.seq_lens = &seq_len, p.kv_cache = cache.data(), p.out = out.data();
    const AttentionKernels& kernels = kAttentions[tier];
    for (int64_t t = 0; t < kTokens; t++) {
      for (int64_t head = 0; head < kKvHeads; head++) {
        kernels.prepare(p, t, head, queries.data() + (t * kHeads + head * p.group) * kDim);
        kernels.store(p, t, head);
      }
    }
    const int64_t rows = kTokens * p.group;
    std::vector<float> max(rows), sum(rows), acc(rows * kPadded);
    std::vector<float> keys(kDim * kTileKeys), values(kTileKeys * kPadded), scores(kScoreRows * kTileKeys);
    const AttentionScratch scratch{keys.data(), values.data(), scores.data()};
    const AttentionState state{max.data(), sum.data(), acc.data()};
    for (int64_t head = 0; head < kKvHeads; head++) {
      const AttentionItem item{0, head, 0, kTokens, 0};
      kernels.attend(p, item, 0, {}, queries.data(), scratch, state);
      kernels.finish(p, item, state);
    }
    return out;
  }
};

std::vector<std::string> attention_problems(Tier tier) {
  std::vector<std::string> out;
  const Prompt prompt;
  for (const KvDtype dtype : {KvDtype::kFloat32, KvDtype::kFloat16, KvDtype::kBFloat16}) {
    if (!close(prompt.attend(tier, dtype), prompt.attend(Tier::kScalar, dtype))) {
      out.push_back("paged_attention, KV dtype " + std::to_string(static_cast<int>(dtype)));
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
    for (const auto& more : {row_problems(tier), attention_problems(tier)}) {
      problems.insert(problems.end(), more.begin(), more.end());
    }
    std::printf("%s: %s\n", tier_name(tier), problems.empty() ? "as scalar" : "DIFFERS:");
    for (const std::string& problem : problems) std::printf("  %s\n", problem.c_str());
    failures += static_cast<int>(problems.size());
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace trivet

int main() { return trivet::check(); }
