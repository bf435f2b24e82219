// Typed glue between a kernel class and the plug-in API: the class is written as for common/ort_op.h, but its
// constructor and compute() get the Context of the session. Kernels only enqueue work on the context's stream.
#pragma once

#include "../common/ort_op.h"
#include "context.h"

namespace trivet::cuda {

struct Provider;

// The API tables, set once by CreateEpFactories.
inline const OrtApi* api = nullptr;
inline const OrtEpApi* ep_api = nullptr;

// What kernels may know of the session that they run in.
struct Session {
  Context& context;
  ActivationDtype activation_dtype;
  bool has_block_formats = false;      // some product of this session takes int8 rows
  bool has_bfloat16_products = false;  // some product takes bfloat16 rows, where they are many
};

Session& session_of(const OrtKernelInfo* info);
// Remembers that the step being captured has failed, so that its graph is never replayed.
void note_failure();

inline constexpr const char* kProviderName = "TrivetCudaExecutionProvider";

template <class K>
class EpKernel : public OrtKernelImpl {
 public:
  static OrtStatus* ORT_API_CALL create(void*, const OrtKernelInfo* raw, OrtKernelImpl** out) noexcept {
    std::string node;
    try {
      const KernelInfo info(*api, raw, K::kInputs);
      node = info.node_name();
      *out = new EpKernel(info, session_of(raw), node);
      return nullptr;
    } catch (...) {
      return detail::status_of_exception(*api, K::kName, node);
    }
  }

 private:
  EpKernel(const KernelInfo& info, Session& session, const std::string& node)
      : OrtKernelImpl{},
        node_(node),
        kernel_(info, session, session.context.add_node(std::string(K::kName) + " '" + node + "'")) {
    ort_version_supported = kOrtApiVersion;
    Compute = [](OrtKernelImpl* self, OrtKernelContext* raw) noexcept -> OrtStatus* {
      auto& kernel = *static_cast<EpKernel*>(self);
      try {
        KernelContext context(*api, raw, K::kInputs, K::kOutputs);
        kernel.kernel_.compute(context);
        return nullptr;
      } catch (...) {
        note_failure();
        return detail::status_of_exception(*api, K::kName, kernel.node_);
      }
    };
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<EpKernel*>(self); };
  }

  std::string node_;
  K kernel_;
};

// The schema of an op for onnxruntime's type checks; its CPU kernel only says that there is none.
template <class K>
class SchemaOp : public OpSchema<K> {
 public:
  SchemaOp() {
    OrtCustomOp::CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* a, const OrtKernelInfo*, void**) -> OrtStatus* {
      return a->CreateStatus(ORT_NOT_IMPLEMENTED,
                             (std::string(K::kName) + ": this node was not given to the CUDA device").c_str());
    };
    OrtCustomOp::KernelComputeV2 = [](void*, OrtKernelContext*) -> OrtStatus* { return nullptr; };
    OrtCustomOp::KernelDestroy = [](void*) {};
  }
};

}  // namespace trivet::cuda
