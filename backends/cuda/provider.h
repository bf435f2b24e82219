// The plug-in execution provider in parts: provider.cc runs sessions and captures their steps, ep_memory.cc allocates
// and copies, factory.cc offers devices and registers the kernels.
#pragma once

#include <map>

#include "../common/session_options.h"
#include "ops/kernels.h"

namespace trivet::cuda {

inline constexpr uint32_t kVendor = 0x10DE;
inline constexpr uint32_t kNeededApi = 27;  // graph capture through the plug-in API, released whole

// Runs f and turns what it throws into a status.
template <class F>
OrtStatus* guarded(const char* where, const F& f) noexcept {
  try {
    f();
    return nullptr;
  } catch (...) {
    return detail::status_of_exception(*api, where, "");
  }
}

inline void check_ort(OrtStatus* status) { check_status(*api, status); }

// --- provider.cc --------------------------------------------------------------------------------------------------

inline constexpr int kNoGraph = -1;

struct Provider : OrtEp {
  Provider(const OrtKernelRegistry* registry, std::shared_ptr<Context> of_session, ActivationDtype activation_dtype,
           bool capture);
  ~Provider() {
    for (auto& [id, graph] : graphs) cudaGraphExecDestroy(graph);
  }

  const OrtKernelRegistry* registry;
  std::shared_ptr<Context> context;
  Session session;
  bool capture;                           // runs with a gpu_graph_id are captured
  std::map<int, cudaGraphExec_t> graphs;  // by gpu_graph_id
  int current = kNoGraph;
  bool capturing = false, failed = false;
};

// Whether this thread is capturing a step.
bool is_capturing();

// --- ep_memory.cc -------------------------------------------------------------------------------------------------

OrtAllocator* make_allocator(const OrtMemoryInfo* info, std::shared_ptr<Arena> arena);
void release_allocator(OrtAllocator* allocator);
OrtDataTransferImpl* make_transfer();
// Kernels of the nodes that onnxruntime inserts where a tensor changes sides.
extern const OrtKernelCreateFunc kCreateMemcpyFromHost, kCreateMemcpyToHost;

}  // namespace trivet::cuda
