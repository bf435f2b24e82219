// The plug-in execution provider: devices, allocator, transfer, kernels and captured graphs, for the stock onnxruntime.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>

#include "../common/session_options.h"
#include "c_api.h"
#include "ops/kernels.h"
#include "upload.h"

#define TRIVET_EXPORT extern "C" __attribute__((visibility("default")))

namespace trivet::cuda {
namespace {

constexpr uint32_t kVendor = 0x10DE;
constexpr uint32_t kNeededApi = 27;  // graph capture through the plug-in API, released whole
constexpr const char* kDomain = "ai.trivet";
constexpr const char* kOrdinalKey = "cuda_device_id";
constexpr const char* kContextOption = "ep.trivetcudaexecutionprovider.context";
constexpr const char* kCaptureOption = "ep.trivetcudaexecutionprovider.capture";
constexpr int kNoGraph = -1;

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

void check_ort(OrtStatus* status) { check_status(*api, status); }

// --- Allocator ----------------------------------------------------------------------------------------------------

struct Allocator : OrtAllocator {
  Allocator(const OrtMemoryInfo* info, std::shared_ptr<Arena> memory)
      : OrtAllocator{}, info(info), arena(std::move(memory)) {
    version = kOrtApiVersion;
    OrtAllocator::Alloc = [](OrtAllocator* self, size_t bytes) -> void* {
      return static_cast<Allocator*>(self)->get(bytes);
    };
    OrtAllocator::Reserve = OrtAllocator::Alloc;
    OrtAllocator::Free = [](OrtAllocator* self, void* memory) {
      static_cast<Allocator*>(self)->arena->release(memory);
    };
    OrtAllocator::Info = [](const OrtAllocator* self) { return static_cast<const Allocator*>(self)->info; };
  }

  void* get(size_t bytes) noexcept {
    try {
      return arena->allocate(bytes);
    } catch (const std::exception&) {
      note_failure();
      return nullptr;  // onnxruntime reports the size that it could not get
    }
  }

  const OrtMemoryInfo* info;
  std::shared_ptr<Arena> arena;
};

// --- Provider -----------------------------------------------------------------------------------------------------

struct Factory : OrtEpFactory {
  std::vector<OrtMemoryInfo*> memory_infos;
  std::vector<OrtHardwareDevice*> hardware;
  std::vector<std::unique_ptr<OrtCustomOp>> schemas;
  OrtCustomOpDomain* domain = nullptr;
  OrtKernelRegistry* registry = nullptr;
};

}  // namespace

struct Provider : OrtEp {
  Provider(const Factory& factory, std::shared_ptr<Context> of_session, ActivationDtype activation_dtype, bool capture);
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

namespace {

thread_local Provider* capturing_here = nullptr;  // the provider whose stream this thread is capturing

int graph_id(const OrtRunOptions* options) {
  const char* value = options == nullptr ? nullptr : api->GetRunConfigEntry(options, "gpu_graph_id");
  return value == nullptr ? kNoGraph : std::atoi(value);
}

void start_run(Provider& p, const OrtRunOptions* options) {
  p.context->make_current();
  p.context->forget_quantized();
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

Provider::Provider(const Factory& factory, std::shared_ptr<Context> of_session, ActivationDtype activation_dtype,
                   bool capture)
    : OrtEp{},
      registry(factory.registry),
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
    *out = new Allocator(info, std::shared_ptr<Arena>(context, &context->arena));
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

void note_failure() {
  if (capturing_here != nullptr) capturing_here->failed = true;
}

Session& session_of(const OrtKernelInfo* info) {
  const OrtEp* provider = nullptr;
  check_ort(ep_api->KernelInfo_GetEp(info, &provider));
  return static_cast<Provider*>(const_cast<OrtEp*>(provider))->session;
}

namespace {

// --- Copies between host and device -------------------------------------------------------------------------------

// What onnxruntime inserts where a tensor changes sides. To the host it waits, so that the host may read at once.
template <bool kToHost>
struct Memcpy : OrtKernelImpl {
  explicit Memcpy(Session& session) : OrtKernelImpl{}, session(session) {
    ort_version_supported = kOrtApiVersion;
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<Memcpy*>(self); };
    Compute = [](OrtKernelImpl* self, OrtKernelContext* raw) noexcept -> OrtStatus* {
      OrtStatus* status = guarded("Memcpy", [&] { static_cast<Memcpy*>(self)->run(raw); });
      if (status != nullptr) note_failure();
      return status;
    };
  }

  void run(OrtKernelContext* raw) {
    static constexpr TensorSpec kTensor[] = {{"tensor", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED}};
    KernelContext ctx(*api, raw, kTensor, kTensor);
    const OrtValue* value = nullptr;
    check_ort(api->KernelContext_GetInput(raw, 0, &value));
    size_t bytes = 0;
    check_ort(api->GetTensorSizeInBytes(value, &bytes));
    const Tensor in = ctx.input(0), out = ctx.output(0, in.shape);
    if (bytes == 0) return;
    const cudaStream_t stream = session.context.launch.stream;
    check(cudaMemcpyAsync(out.data, in.data, bytes, kToHost ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream),
          "cudaMemcpy");
    if (kToHost) check(cudaStreamSynchronize(stream), "a kernel failed");
  }

  static OrtStatus* ORT_API_CALL create(void*, const OrtKernelInfo* info, OrtKernelImpl** out) noexcept {
    return guarded("Memcpy", [&] { *out = new Memcpy(session_of(info)); });
  }

  Session& session;
};

bool is_ours(const OrtMemoryDevice* device) {
  return ep_api->MemoryDevice_GetDeviceType(device) == OrtMemoryInfoDeviceType_GPU &&
         ep_api->MemoryDevice_GetVendorId(device) == kVendor;
}

struct Transfer : OrtDataTransferImpl {
  Transfer() : OrtDataTransferImpl{} {
    ort_version_supported = kOrtApiVersion;
    Release = [](OrtDataTransferImpl* self) noexcept { delete static_cast<Transfer*>(self); };
    CanCopy = [](const OrtDataTransferImpl*, const OrtMemoryDevice* from, const OrtMemoryDevice* to) noexcept -> bool {
      const auto is_host = [](const OrtMemoryDevice* device) {
        return ep_api->MemoryDevice_GetDeviceType(device) == OrtMemoryInfoDeviceType_CPU;
      };
      return (is_ours(from) && (is_ours(to) || is_host(to))) || (is_host(from) && is_ours(to));
    };
    CopyTensors = [](OrtDataTransferImpl*, const OrtValue** from, OrtValue** to, OrtSyncStream**,
                     size_t count) noexcept -> OrtStatus* {
      return guarded("copy", [&] {
        if (capturing_here != nullptr) {
          note_failure();
          throw std::runtime_error("a captured step needs all its inputs and outputs bound on the device");
        }
        for (size_t i = 0; i < count; ++i) copy(from[i], to[i]);
      });
    };
  }

  // The legacy stream would not wait for the session's non-blocking one, so what the session made is waited for.
  static void copy(const OrtValue* from, OrtValue* to) {
    size_t bytes = 0;
    check_ort(api->GetTensorSizeInBytes(from, &bytes));
    if (bytes == 0) return;
    void *source = nullptr, *target = nullptr;
    check_ort(api->GetTensorMutableData(const_cast<OrtValue*>(from), &source));
    check_ort(api->GetTensorMutableData(to, &target));
    if (target == nullptr) throw std::runtime_error("there is no memory for " + std::to_string(bytes) + " bytes");
    const bool from_device = is_ours(ep_api->Value_GetMemoryDevice(from));
    if (!from_device && is_ours(ep_api->Value_GetMemoryDevice(to))) return upload(target, source, bytes);
    if (from_device) check(cudaDeviceSynchronize(), "a kernel failed");
    check(cudaMemcpy(target, source, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }
};

// --- Factory ------------------------------------------------------------------------------------------------------

std::string device_id_file(const std::string& bus_id) { return "/sys/bus/pci/devices/" + bus_id + "/device"; }

uint32_t pci_device_id(int ordinal) {
  char bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, ordinal) != cudaSuccess) return 0;
  for (char* c = bus_id; *c != '\0'; ++c) *c = static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  unsigned id = 0;
  if (FILE* file = std::fopen(device_id_file(bus_id).c_str(), "r")) {
    if (std::fscanf(file, "%x", &id) != 1) id = 0;
    std::fclose(file);
  }
  return id;
}

OrtEpDevice* make_device(Factory& factory, int ordinal) {
  const std::string text = std::to_string(ordinal);
  OrtKeyValuePairs *hardware_facts = nullptr, *provider_facts = nullptr;
  api->CreateKeyValuePairs(&hardware_facts);
  api->CreateKeyValuePairs(&provider_facts);
  api->AddKeyValuePair(hardware_facts, kOrdinalKey, text.c_str());
  api->AddKeyValuePair(provider_facts, kOrdinalKey, text.c_str());
  OrtHardwareDevice* hardware = nullptr;
  check_ort(ep_api->CreateHardwareDevice(OrtHardwareDeviceType_GPU, kVendor, pci_device_id(ordinal), "NVIDIA",
                                         hardware_facts, &hardware));
  factory.hardware.push_back(hardware);
  OrtMemoryInfo* memory = nullptr;
  check_ort(api->CreateMemoryInfo_V2("TrivetCuda", OrtMemoryInfoDeviceType_GPU, kVendor, ordinal,
                                     OrtDeviceMemoryType_DEFAULT, 0, OrtDeviceAllocator, &memory));
  factory.memory_infos.push_back(memory);
  OrtEpDevice* device = nullptr;
  check_ort(ep_api->CreateEpDevice(&factory, hardware, provider_facts, nullptr, &device));
  check_ort(ep_api->EpDevice_AddAllocatorInfo(device, memory));
  api->ReleaseKeyValuePairs(hardware_facts);
  api->ReleaseKeyValuePairs(provider_facts);
  return device;
}

OrtEp* make_provider(Factory& factory, const OrtKeyValuePairs* facts, const OrtSessionOptions* options) {
  const char* text = api->GetKeyValue(facts, kOrdinalKey);
  const int ordinal = text == nullptr ? 0 : std::atoi(text);
  const std::string handle = config_entry(*api, options, kContextOption);
  std::shared_ptr<Context> context =
      handle.empty() ? std::make_shared<Context>(ordinal) : context_of(std::strtoll(handle.c_str(), nullptr, 10));
  if (context == nullptr || context->ordinal != ordinal) {
    throw OpError(std::string(kContextOption) + ": no context '" + handle + "' of device " + std::to_string(ordinal));
  }
  context->make_current();
  return new Provider(factory, std::move(context),
                      parse_activation_dtype(config_entry(*api, options, "trivet.activation_dtype")),
                      config_entry(*api, options, kCaptureOption) == "1");
}

struct KernelOptions {
  int alias_input = -1, alias_output = -1;
  int host_input = -1, host_output = -1;
};

void add_kernel(Factory& factory, const char* op, const char* domain, OrtKernelCreateFunc create,
                KernelOptions options = {}) {
  OrtKernelDefBuilder* builder = nullptr;
  check_ort(ep_api->CreateKernelDefBuilder(&builder));
  check_ort(ep_api->KernelDefBuilder_SetOperatorType(builder, op));
  check_ort(ep_api->KernelDefBuilder_SetDomain(builder, domain));
  check_ort(ep_api->KernelDefBuilder_SetSinceVersion(builder, 1, INT32_MAX));
  check_ort(ep_api->KernelDefBuilder_SetExecutionProvider(builder, kProviderName));
  if (options.alias_input >= 0) {
    check_ort(ep_api->KernelDefBuilder_AddInputOutputAliases(builder, &options.alias_input, &options.alias_output, 1));
  }
  if (options.host_input >= 0) {
    check_ort(
        ep_api->KernelDefBuilder_SetInputMemType(builder, static_cast<size_t>(options.host_input), OrtMemTypeCPUInput));
  }
  if (options.host_output >= 0) {
    check_ort(ep_api->KernelDefBuilder_SetOutputMemType(builder, static_cast<size_t>(options.host_output),
                                                        OrtMemTypeCPUOutput));
  }
  OrtKernelDef* definition = nullptr;
  check_ort(ep_api->KernelDefBuilder_Build(builder, &definition));
  ep_api->ReleaseKernelDefBuilder(builder);
  OrtStatus* status = ep_api->KernelRegistry_AddKernel(factory.registry, definition, create, nullptr);
  ep_api->ReleaseKernelDef(definition);
  check_ort(status);
}

template <class K>
void add_op(Factory& factory, KernelOptions options = {}) {
  factory.schemas.push_back(std::make_unique<SchemaOp<K>>());
  check_ort(api->CustomOpDomain_Add(factory.domain, factory.schemas.back().get()));
  add_kernel(factory, K::kName, kDomain, EpKernel<K>::create, options);
}

void register_ops(Factory& factory) {
  check_ort(api->CreateCustomOpDomain(kDomain, &factory.domain));
  check_ort(ep_api->CreateKernelRegistry(&factory.registry));
  add_op<EmbedTokens>(factory);
  add_op<RotaryTable>(factory);
  add_op<RMSNorm>(factory);
  add_op<AddRMSNorm>(factory);
  add_op<QMatMul>(factory);
  add_op<PagedAttention>(factory, {.alias_input = 1, .alias_output = 1, .host_input = 2});
  add_op<LogitsHead>(factory);
  add_op<Sample>(factory, {.host_input = 13});
  add_kernel(factory, "MemcpyFromHost", "", Memcpy<false>::create, {.host_input = 0});
  add_kernel(factory, "MemcpyToHost", "", Memcpy<true>::create, {.host_output = 0});
}

std::unique_ptr<Factory> make_factory() {
  auto made = std::make_unique<Factory>();
  Factory& f = *made;
  static_cast<OrtEpFactory&>(f) = OrtEpFactory{};
  f.ort_version_supported = kNeededApi;
  f.GetName = [](const OrtEpFactory*) noexcept -> const char* { return kProviderName; };
  f.GetVendor = [](const OrtEpFactory*) noexcept -> const char* { return "trivet"; };
  f.GetVendorId = [](const OrtEpFactory*) noexcept -> uint32_t { return kVendor; };
  f.GetVersion = [](const OrtEpFactory*) noexcept -> const char* { return "1.0.0"; };
  f.GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const*, size_t, OrtEpDevice** devices,
                             size_t most, size_t* num) noexcept -> OrtStatus* {
    *num = 0;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;  // no driver: nothing to offer, and trivet_cuda_describe says why
    }
    return guarded("GetSupportedDevices", [&] {
      for (int i = 0; i < count && *num < most; ++i) devices[(*num)++] = make_device(*static_cast<Factory*>(self), i);
    });
  };
  f.CreateEp = [](OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const* facts,
                  size_t count, const OrtSessionOptions* options, const OrtLogger*,
                  OrtEp** out) noexcept -> OrtStatus* {
    return guarded("CreateEp", [&] {
      if (count != 1) throw OpError("expected one device per session, got " + std::to_string(count));
      *out = make_provider(*static_cast<Factory*>(self), facts[0], options);
    });
  };
  f.ReleaseEp = [](OrtEpFactory*, OrtEp* provider) noexcept { delete static_cast<Provider*>(provider); };
  f.CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo* info, const OrtKeyValuePairs*,
                         OrtAllocator** out) noexcept -> OrtStatus* {
    return guarded("CreateAllocator", [&] {
      int ordinal = 0;
      check_ort(api->MemoryInfoGetId(info, &ordinal));
      *out = new Allocator(info, std::make_shared<Arena>(ordinal));
    });
  };
  f.ReleaseAllocator = [](OrtEpFactory*, OrtAllocator* allocator) noexcept {
    delete static_cast<Allocator*>(allocator);
  };
  f.CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** out) noexcept -> OrtStatus* {
    *out = new Transfer();
    return nullptr;
  };
  f.IsStreamAware = [](const OrtEpFactory*) noexcept {
    return false;
  };  // one stream per session, reached by the kernels
  f.GetNumCustomOpDomains = [](OrtEpFactory*, size_t* count) noexcept -> OrtStatus* {
    *count = 1;
    return nullptr;
  };
  f.GetCustomOpDomains = [](OrtEpFactory* self, OrtCustomOpDomain** domains, size_t) noexcept -> OrtStatus* {
    domains[0] = static_cast<Factory*>(self)->domain;
    return nullptr;
  };
  register_ops(f);
  return made;
}

}  // namespace
}  // namespace trivet::cuda

TRIVET_EXPORT OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*,
                                           OrtEpFactory** factories, size_t most, size_t* count) {
  using namespace trivet;
  cuda::api = base->GetApi(cuda::kNeededApi);
  if (cuda::api == nullptr) {
    const std::string message =
        std::string("trivet's CUDA device needs onnxruntime 1.27 or newer, this is ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  cuda::ep_api = cuda::api->GetEpApi();
  if (most < 1) return cuda::api->CreateStatus(ORT_INVALID_ARGUMENT, "CreateEpFactories: no room for a factory");
  return cuda::guarded("CreateEpFactories", [&] {
    factories[0] = cuda::make_factory().release();
    *count = 1;
  });
}

TRIVET_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* raw) {
  using namespace trivet::cuda;
  const std::unique_ptr<Factory> factory(static_cast<Factory*>(raw));
  ep_api->ReleaseKernelRegistry(factory->registry);
  for (OrtMemoryInfo* info : factory->memory_infos) api->ReleaseMemoryInfo(info);
  for (OrtHardwareDevice* device : factory->hardware) ep_api->ReleaseHardwareDevice(device);
  api->ReleaseCustomOpDomain(factory->domain);
  return nullptr;
}
