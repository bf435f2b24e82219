#include "context.h"

#include <algorithm>

namespace trivet::cuda {

CudaError::CudaError(const std::string& what, cudaError_t status)
    : std::runtime_error("CUDA: " + what + ": " + cudaGetErrorString(status)) {}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky must not show up in the next call
  throw CudaError(what, status);
}

// --- Arena --------------------------------------------------------------------------------------------------------

constexpr size_t kGranule = 512;
constexpr size_t kReadAhead = 16;  // kernels read whole words of data that ends inside one

Arena::~Arena() {
  for (const auto& [memory, size] : sizes_) cudaFree(memory);
}

void* Arena::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t size = (bytes + kReadAhead + kGranule - 1) / kGranule * kGranule;
  const std::lock_guard lock(mutex_);
  const auto fit = free_.lower_bound(size);
  if (fit != free_.end() && fit->first <= size + size / 4 + 65536) {
    void* memory = fit->second;
    free_.erase(fit);
    return memory;
  }
  const RelaxedCapture relaxed;
  check(cudaSetDevice(ordinal_), "cudaSetDevice");
  void* memory = nullptr;
  const std::string what = "cannot allocate " + std::to_string(size) + " bytes on device " + std::to_string(ordinal_);
  check(cudaMalloc(&memory, size), what.c_str());
  sizes_[memory] = size;
  return memory;
}

void Arena::release(void* memory) {
  if (memory == nullptr) return;
  const std::lock_guard lock(mutex_);
  free_.emplace(sizes_.at(memory), memory);
}

// --- Context ------------------------------------------------------------------------------------------------------

Context::Context(int ordinal) : ordinal(ordinal), arena(ordinal) {
  if (const std::string why = check_device(ordinal); !why.empty()) throw std::runtime_error(why);
  make_current();
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  launch.num_multiprocessors = properties.multiProcessorCount;
  launch.dependent_launch = properties.major >= 9;
  check(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  error_ = static_cast<DeviceError*>(arena.allocate(sizeof(DeviceError)));
  check(cudaMallocHost(reinterpret_cast<void**>(&error_on_host_), sizeof(DeviceError)), "cudaMallocHost");
  check(cudaMemsetAsync(error_, 0, sizeof(DeviceError), launch.stream), "cudaMemset");
}

Context::~Context() {
  cudaSetDevice(ordinal);
  if (launch.stream != nullptr) {
    cudaStreamSynchronize(launch.stream);
    cudaStreamDestroy(launch.stream);
  }
  if (error_on_host_ != nullptr) cudaFreeHost(error_on_host_);
}

void Context::make_current() const { check(cudaSetDevice(ordinal), "cudaSetDevice"); }

void* Context::scratch_bytes(Purpose purpose, size_t bytes) {
  Scratch& scratch = scratch_[purpose];
  if (bytes > scratch.size) {
    scratch.memory = arena.allocate(bytes + bytes / 4);  // the old one stays for the graphs that use it
    scratch.size = bytes + bytes / 4;
  }
  return scratch.memory;
}

QuantizedRows Context::quantized_of(const float* x, int64_t rows, int64_t k) const {
  const bool same = x != nullptr && x == quantized_source_ && rows == quantized_rows_ && k == quantized_k_;
  return same ? quantized_ : QuantizedRows{};
}

QuantizedRows Context::quantized_for(const float* x, int64_t rows, int64_t k) {
  quantized_ = {scratch<int8_t>(kActivations, rows * k), scratch<float2>(kScales, rows * k / 32)};
  quantized_source_ = x;
  quantized_rows_ = rows;
  quantized_k_ = k;
  return quantized_;
}

void Context::overwritten(const void* x) {
  if (x == quantized_source_) quantized_source_ = nullptr;
}

int32_t Context::add_node(const std::string& name) {
  nodes_.push_back(name);
  return static_cast<int32_t>(nodes_.size() - 1);
}

std::string Context::finish() {
  check(cudaMemcpyAsync(error_on_host_, error_, sizeof(DeviceError), cudaMemcpyDeviceToHost, launch.stream),
        "cudaMemcpy");
  check(cudaStreamSynchronize(launch.stream), "a kernel failed");
  if (error_on_host_->code == DeviceErrorCode::kNone) return "";
  check(cudaMemsetAsync(error_, 0, sizeof(DeviceError), launch.stream), "cudaMemset");
  return nodes_.at(static_cast<size_t>(error_on_host_->node)) + ": " + describe(*error_on_host_);
}

}  // namespace trivet::cuda
