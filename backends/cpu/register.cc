// Entry points of libtrivet_cpu: RegisterCustomOps for onnxruntime, trivet_cpu_* for Python (ctypes).
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../common/ort_op.h"
#include "../common/session_options.h"
#include "byte_pairs.h"
#include "cached_pages.h"
#include "dispatch.h"
#include "features.h"
#include "ops/embed_tokens.h"
#include "ops/logits_head.h"
#include "ops/paged_attention.h"
#include "ops/qmatmul.h"
#include "ops/rms_norm.h"
#include "ops/rotary_table.h"
#include "ops/sample.h"

#if defined(_WIN32)
#define TRIVET_EXPORT extern "C" __declspec(dllexport)
#else
#define TRIVET_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace trivet {
namespace {

constexpr const char* kDomain = "ai.trivet";

// A session's ops and what they refer to. Kept for the life of the process, one per distinct configuration, because
// onnxruntime keeps pointers into it for as long as a session lives.
struct Registration {
  SessionContext session;
  std::vector<std::unique_ptr<OrtCustomOp>> ops;
  OrtCustomOpDomain* domain = nullptr;
};

int parse_num_threads(const std::string& text) {
  if (text.empty()) return default_num_threads();
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (*end != '\0' || value < 1 || value > 1024) {
    throw OpError("trivet.num_threads: expected an integer from 1 to 1024, got '" + text + "'");
  }
  return static_cast<int>(value);
}

// Session entry, then environment, then the best tier of this CPU.
Tier parse_tier(std::string text) {
  if (text.empty()) {
    const char* variable = std::getenv("TRIVET_CPU_TIER");
    if (variable != nullptr) text = variable;
  }
  try {
    return resolve_tier(text, probe_cpu());
  } catch (const std::invalid_argument& error) {
    throw OpError(std::string("trivet.cpu_tier: ") + error.what());
  }
}

template <class... Kernels>
void add_ops(const OrtApi& api, Registration& registration) {
  (registration.ops.push_back(std::make_unique<Op<Kernels>>(api, registration.session)), ...);
}

Registration& registration_for(const OrtApi& api, int num_threads, Tier tier, ActivationDtype activation_dtype) {
  using Key = std::tuple<int, Tier, ActivationDtype>;
  static std::mutex mutex;
  static auto& registrations = *new std::map<Key, std::unique_ptr<Registration>>();
  const std::lock_guard lock(mutex);
  auto& slot = registrations[{num_threads, tier, activation_dtype}];
  if (!slot) {
    auto made = std::make_unique<Registration>(
        Registration{{ThreadPool::shared(num_threads), tier, activation_dtype}, {}, nullptr});
    // One line per op of backends/contract/opset.py: add the kernel class here, its header above, its sources in
    // CMakeLists.txt.
    add_ops<EmbedTokens, QMatMul, LogitsHead>(api, *made);
    add_ops<RotaryTable, RMSNorm, AddRMSNorm, PagedAttention, Sample>(api, *made);
    check_status(api, api.CreateCustomOpDomain(kDomain, &made->domain));
    for (const auto& op : made->ops) check_status(api, api.CustomOpDomain_Add(made->domain, op.get()));
    slot = std::move(made);
  }
  return *slot;
}

std::string json_list(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ", \"" : "\"") + name + "\"";
  return text + "]";
}

std::string describe(const CpuFeatures& features) {
  std::string text = "{\"features\": " + json_list(feature_names(features)) + ", \"tiers\": {";
  for (Tier tier : kTiers) {
    text += std::string(tier == kTiers[0] ? "" : ", ") + "\"" + tier_name(tier) +
            "\": " + json_list(missing_features(tier, features));
  }
  return text + "}, \"best_tier\": \"" + tier_name(best_tier(features)) +
         "\", \"num_threads\": " + std::to_string(default_num_threads()) + "}";
}

}  // namespace
}  // namespace trivet

TRIVET_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace trivet;
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (api == nullptr) {
    // Status functions are part of every version since 1.
    const std::string message =
        std::string("trivet needs onnxruntime 1.24 or newer, this is ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  try {
    const int num_threads = parse_num_threads(config_entry(*api, options, "trivet.num_threads"));
    const ActivationDtype dtype = parse_activation_dtype(config_entry(*api, options, "trivet.activation_dtype"));
    const Tier tier = parse_tier(config_entry(*api, options, "trivet.cpu_tier"));
    return api->AddCustomOpDomain(options, registration_for(*api, num_threads, tier, dtype).domain);
  } catch (...) {
    return detail::status_of_exception(*api, "RegisterCustomOps", "");
  }
}

// JSON: {"features": [...], "tiers": {name: [missing features]}, "best_tier": name, "num_threads": int}.
// `fake_features`: null = probe this CPU; else a comma-separated list to judge instead. On an unknown name: {"error":
// text}. The text is valid until this thread's next call.
TRIVET_EXPORT const char* trivet_cpu_describe(const char* fake_features) {
  using namespace trivet;
  thread_local std::string text;
  try {
    text = describe(fake_features == nullptr ? probe_cpu() : features_from_list(fake_features));
  } catch (const std::exception& error) {
    text = std::string("{\"error\": \"") + error.what() + "\"}";
  }
  return text.c_str();
}

// Empty if the tier could be used with these features (null = this CPU's), else why not. Valid until this thread's next
// call.
TRIVET_EXPORT const char* trivet_cpu_check_tier(const char* tier, const char* fake_features) {
  using namespace trivet;
  thread_local std::string text;
  try {
    resolve_tier(tier, fake_features == nullptr ? probe_cpu() : features_from_list(fake_features));
    text.clear();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}

// See byte_pairs.h; the tables are checked by the caller. -1: out of memory.
TRIVET_EXPORT int64_t trivet_cpu_merge_byte_pairs(const trivet::BytePairTables* tables, uint32_t* ids,
                                                  const double* words, int64_t n) {
  try {
    return trivet::merge_byte_pairs(*tables, ids, words, n);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Whole blocks of `format`, a name of common/weight_format.h, as n float32; false: there is no such format.
TRIVET_EXPORT bool trivet_cpu_dequantize(const char* format, const uint8_t* blocks, int64_t n, float* out) {
  using namespace trivet;
  const auto* spec = std::find_if(std::begin(kFormatSpecs), std::end(kFormatSpecs),
                                  [&](const FormatSpec& known) { return known.name == std::string_view(format); });
  if (spec == std::end(kFormatSpecs)) return false;
  weight_format(spec->format).dequantize(blocks, n, out);
  return true;
}

// See cached_pages.h. `ranges`: addresses and sizes in turn. Returns when all is mapped, or soon after *stop is set.
TRIVET_EXPORT void trivet_cpu_map_cached_pages(const trivet::MemoryRange* ranges, int64_t count,
                                               const std::atomic<int32_t>* stop) {
  trivet::map_cached_pages(ranges, static_cast<size_t>(count), *stop);
}
