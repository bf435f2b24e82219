#include "context.h"

#include <algorithm>
#include <utility>

namespace trivet::cuda {

CudaError::CudaError(const std::string& what, cudaError_t status)
    : std::runtime_error("CUDA: " + what + ": " + cudaGetErrorString(status)) {}

namespace {

// How much memory the current device has left, where a call failed for want of it.
std::string memory_left(cudaError_t status) {
  size_t available = 0, total = 0;
  if (status != cudaErrorMemoryAllocation || cudaMemGetInfo(&available, &total) != cudaSuccess) return "";
  return ", " + std::to_string(available) + " of " + std::to_string(total) + " bytes are free";
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky must not show up in the next call
  throw CudaError(what + memory_left(status), status);
}

// --- Arena --------------------------------------------------------------------------------------------------------

constexpr size_t kGranule = 512;
constexpr size_t kReadAhead = 16;  // kernels read whole words of data that ends inside one

Arena::~Arena() {
  for (const auto& [memory, size] : sizes_) cudaFree(memory);
}

static size_t block_size(size_t bytes) { return (bytes + kReadAhead + kGranule - 1) / kGranule * kGranule; }

void* Arena::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t size = block_size(bytes);
  const std::lock_guard lock(mutex_);
  const auto fit = free_.lower_bound(size);
  if (fit != free_.end() && fit->first <= size + size / 4 + 65536) {
    void* memory = fit->second;
    free_.erase(fit);
    return memory;
  }
  return make(size);
}

void* Arena::allocate_unused(size_t bytes) {
  const std::lock_guard lock(mutex_);
  return make(block_size(bytes));
}

void* Arena::make(size_t size) {
  const RelaxedCapture relaxed;
  check(cudaSetDevice(ordinal_), "cudaSetDevice");
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, size);
  if (status != cudaSuccess) refuse(size, status);
  sizes_[memory] = size;
  return memory;
}

void Arena::refuse(size_t bytes, cudaError_t status) {
  cudaGetLastError();
  const std::string what = "cannot allocate " + std::to_string(bytes) + " bytes on device " + std::to_string(ordinal_);
  const CudaError error(what + memory_left(status), status);
  if (status == cudaErrorMemoryAllocation) refusal_ = error.what();
  throw error;
}

std::string Arena::take_refusal() {
  const std::lock_guard lock(mutex_);
  return std::exchange(refusal_, "");
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
  launch.has_wgmma = properties.major == 9 && properties.minor == 0 && matmul_wgmma != nullptr;
  launch.shared_bytes = properties.sharedMemPerBlockOptin;
  check(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  error_ = static_cast<DeviceError*>(allocate_pinned(sizeof(DeviceError)));
  *error_ = {};
}

Context::~Context() {
  cudaSetDevice(ordinal);
  if (launch.stream != nullptr) {
    cudaStreamSynchronize(launch.stream);
    cudaStreamDestroy(launch.stream);
  }
  for (void* memory : pinned_) cudaFreeHost(memory);
}

void* Context::allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  check(cudaMallocHost(&memory, bytes), ("cannot pin " + std::to_string(bytes) + " bytes of host memory").c_str());
  const std::lock_guard lock(pinned_mutex_);
  pinned_.insert(memory);
  return memory;
}

void Context::release_pinned(void* memory) {
  const std::lock_guard lock(pinned_mutex_);
  if (pinned_.erase(memory) == 0) throw std::runtime_error("CUDA: release of host memory that is not pinned here");
  check(cudaFreeHost(memory), "cudaFreeHost");
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

int* Context::zeros(int64_t count) {
  Scratch& zeros = scratch_[kZeros];
  if (const size_t bytes = static_cast<size_t>(count) * sizeof(int); bytes > zeros.size) {
    zeros = {arena.allocate_unused(2 * bytes), 2 * bytes};
    check(cudaMemsetAsync(zeros.memory, 0, zeros.size, launch.stream), "cudaMemset");
  }
  return static_cast<int*>(zeros.memory);
}

QuantizedRows Context::quantized_of(const float* x, int64_t rows, int64_t k) const {
  return quantized_source_.is(x, rows, k) ? quantized_ : QuantizedRows{};
}

QuantizedRows Context::quantized_for(const float* x, int64_t rows, int64_t k) {
  const bool other = !quantized_source_.other;
  quantized_source_ = {x, rows, k, other};
  quantized_ = {scratch<int8_t>(other ? kOtherActivations : kActivations, rows * k),
                scratch<float2>(other ? kOtherScales : kScales, rows * k / 32)};
  return quantized_;
}

void* Context::rounded_of(const float* x, int64_t rows, int64_t k) const {
  return rounded_source_.is(x, rows, k) ? rounded_ : nullptr;
}

void* Context::rounded_for(const float* x, int64_t rows, int64_t k) {
  const bool other = !rounded_source_.other;
  rounded_source_ = {x, rows, k, other};
  rounded_ = scratch<uint16_t>(other ? kOtherRounded : kRounded, rows * ((k + 63) / 64 * 64));
  return rounded_;
}

void Context::overwritten(const void* x) {
  if (x == quantized_source_.x) quantized_source_.x = nullptr;
  if (x == rounded_source_.x) rounded_source_.x = nullptr;
}

int32_t Context::add_node(const std::string& name) {
  nodes_.push_back(name);
  return static_cast<int32_t>(nodes_.size() - 1);
}

std::string Context::finish() {
  check(cudaStreamSynchronize(launch.stream), "a kernel failed");
  if (error_->code == DeviceErrorCode::kNone) return "";
  const DeviceError error = std::exchange(*error_, {});
  return nodes_.at(static_cast<size_t>(error.node)) + ": " + describe(error);
}

}  // namespace trivet::cuda
