// Device memory as onnxruntime sees it: its allocator, copies between host and device.
#include "provider.h"
#include "upload.h"

namespace trivet::cuda {
namespace {

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
        if (is_capturing()) {
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

}  // namespace

OrtAllocator* make_allocator(const OrtMemoryInfo* info, std::shared_ptr<Arena> arena) {
  return new Allocator(info, std::move(arena));
}

void release_allocator(OrtAllocator* allocator) { delete static_cast<Allocator*>(allocator); }

OrtDataTransferImpl* make_transfer() { return new Transfer(); }

const OrtKernelCreateFunc kCreateMemcpyFromHost = Memcpy<false>::create, kCreateMemcpyToHost = Memcpy<true>::create;

}  // namespace trivet::cuda
