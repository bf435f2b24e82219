// A session's provider: kernels of its registry, steps captured as graphs and replayed.
#include "provider.h"

#include <cstdlib>

namespace trivet::cuda {
namespace {

thread_local Provider* capturing_here = nullptr;  // the provider whose stream this thread is capturing

int graph_id(const OrtRunOptions* options) {
  const char* value = options == nullptr ? nullptr : api->GetRunConfigEntry(options, "gpu_graph_id");
  return value == nullptr ? kNoGraph : std::atoi(value);
}

void start_run(Provider& p, const OrtRunOptions* options) {
  p.context->make_current();
  p.context->forget_copies();
  p.current = p.capture ? graph_id(options) : kNoGraph;
  if (p.current == kNoGraph || p.graphs.count(p.current) != 0) return;
  check(cudaStreamBeginCapture(p.context->launch.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  p.capturing = true;
  p.failed = false;
  capturing_here = &p;
}

// A graph of a run that failed is thrown away: replaying it would do nothing, or half of the work.
void end_capture(Provider& p) {
  p.capturing = false;
  capturing_here = nullptr;
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(p.context->launch.stream, &graph);
  if (p.failed || status != cudaSuccess) {
    cudaGetLastError();
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (p.failed) return;  // the error itself is on its way to the caller
    throw CudaError("cudaStreamEndCapture", status);
  }
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(made, "cudaGraphInstantiate");
  p.graphs[p.current] = executable;
  check(cudaGraphLaunch(executable, p.context->launch.stream), "cudaGraphLaunch");  // capturing did not run it
}

OrtStatus* finished(Provider& p) {
  return guarded("CUDA", [&] {
    if (const std::string error = p.context->finish(); !error.empty()) throw OpError(error);
  });
}

}  // namespace

Provider::Provider(const OrtKernelRegistry* registry, std::shared_ptr<Context> of_session,
                   ActivationDtype activation_dtype, bool capture)
    : OrtEp{},
      registry(registry),
      context(std::move(of_session)),
      session{*context, activation_dtype, false},
      capture(capture) {
  ort_version_supported = kNeededApi;
  GetName = [](const OrtEp*) noexcept -> const char* { return kProviderName; };
  GetCapability = [](OrtEp*, const OrtGraph* graph, OrtEpGraphSupportInfo* info) noexcept -> OrtStatus* {
    return guarded("GetCapability", [&] {
      size_t count = 0;
      check_ort(api->Graph_GetNumNodes(graph, &count));
      std::vector<const OrtNode*> nodes(count);
      check_ort(api->Graph_GetNodes(graph, nodes.data(), count));
      for (const OrtNode* node : nodes) {
        const OrtKernelDef* kernel = nullptr;
        check_ort(ep_api->EpGraphSupportInfo_LookUpKernel(info, node, &kernel));
        if (kernel != nullptr) check_ort(ep_api->EpGraphSupportInfo_AddSingleNode(info, node));
      }
    });
  };
  GetKernelRegistry = [](OrtEp* self, const OrtKernelRegistry** out) noexcept -> OrtStatus* {
    *out = static_cast<Provider*>(self)->registry;
    return nullptr;
  };
  CreateAllocator = [](OrtEp* self, const OrtMemoryInfo* info, OrtAllocator** out) noexcept -> OrtStatus* {
    const auto& context = static_cast<Provider*>(self)->context;
    *out = make_allocator(info, std::shared_ptr<Arena>(context, &context->arena));
    return nullptr;
  };
  IsConcurrentRunSupported = [](OrtEp*, bool* supported) noexcept -> OrtStatus* {
    *supported = false;
    return nullptr;
  };
  OnRunStart = [](OrtEp* self, const OrtRunOptions* options) noexcept -> OrtStatus* {
    return guarded("CUDA", [&] { start_run(*static_cast<Provider*>(self), options); });
  };
  OnRunEnd = [](OrtEp* self, const OrtRunOptions*, bool synchronize) noexcept -> OrtStatus* {
    auto& p = *static_cast<Provider*>(self);
    if (p.capturing) {
      if (OrtStatus* status = guarded("CUDA", [&] { end_capture(p); }); status != nullptr) return status;
    }
    return synchronize ? finished(p) : nullptr;
  };
  Sync = [](OrtEp* self) noexcept -> OrtStatus* {
    auto& p = *static_cast<Provider*>(self);
    return p.capturing ? nullptr : finished(p);
  };
  IsGraphCaptureEnabled = [](const OrtEp* self) noexcept -> bool {
    return static_cast<const Provider*>(self)->capture;
  };
  IsGraphCaptured = [](const OrtEp* self, int id) noexcept -> bool {
    return static_cast<const Provider*>(self)->graphs.count(id) != 0;
  };
  ReplayGraph = [](OrtEp* self, int id) noexcept -> OrtStatus* {
    auto& p = *static_cast<Provider*>(self);
    return guarded("CUDA", [&] {
      p.context->make_current();
      check(cudaGraphLaunch(p.graphs.at(id), p.context->launch.stream), "cudaGraphLaunch");
    });
  };
  ReleaseCapturedGraph = [](OrtEp* self, int id) noexcept -> OrtStatus* {
    auto& p = *static_cast<Provider*>(self);
    if (const auto found = p.graphs.find(id); found != p.graphs.end()) {
      cudaGraphExecDestroy(found->second);
      p.graphs.erase(found);
    }
    return nullptr;
  };
}

bool is_capturing() { return capturing_here != nullptr; }

void note_failure() {
  if (capturing_here != nullptr) capturing_here->failed = true;
}

Session& session_of(const OrtKernelInfo* info) {
  const OrtEp* provider = nullptr;
  check_ort(ep_api->KernelInfo_GetEp(info, &provider));
  return static_cast<Provider*>(const_cast<OrtEp*>(provider))->session;
}

}  // namespace trivet::cuda
