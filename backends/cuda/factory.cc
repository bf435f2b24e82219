// What onnxruntime loads first: the devices, the ops and their kernels, and a provider for each session.
#include <cctype>
#include <cstdlib>

#include "c_api.h"
#include "provider.h"

#define TRIVET_EXPORT extern "C" __attribute__((visibility("default")))

namespace trivet::cuda {
namespace {

constexpr const char* kDomain = "ai.trivet";
constexpr const char* kOrdinalKey = "cuda_device_id";
constexpr const char* kContextOption = "ep.trivetcudaexecutionprovider.context";
constexpr const char* kCaptureOption = "ep.trivetcudaexecutionprovider.capture";

struct Factory : OrtEpFactory {
  std::vector<OrtMemoryInfo*> memory_infos;
  std::vector<OrtHardwareDevice*> hardware;
  std::vector<std::unique_ptr<OrtCustomOp>> schemas;
  OrtCustomOpDomain* domain = nullptr;
  OrtKernelRegistry* registry = nullptr;
};

// --- Devices ------------------------------------------------------------------------------------------------------

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
  return new Provider(factory.registry, std::move(context),
                      parse_activation_dtype(config_entry(*api, options, "trivet.activation_dtype")),
                      config_entry(*api, options, kCaptureOption) == "1");
}

// --- Kernels ------------------------------------------------------------------------------------------------------

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
  add_kernel(factory, "MemcpyFromHost", "", kCreateMemcpyFromHost, {.host_input = 0});
  add_kernel(factory, "MemcpyToHost", "", kCreateMemcpyToHost, {.host_output = 0});
}

// --- Factory ------------------------------------------------------------------------------------------------------

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
      *out = make_allocator(info, std::make_shared<Arena>(ordinal));
    });
  };
  f.ReleaseAllocator = [](OrtEpFactory*, OrtAllocator* allocator) noexcept { release_allocator(allocator); };
  f.CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** out) noexcept -> OrtStatus* {
    *out = make_transfer();
    return nullptr;
  };
  // One stream per session, reached by the kernels.
  f.IsStreamAware = [](const OrtEpFactory*) noexcept { return false; };
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
