// One per session: the device, the stream that everything runs on, and memory that kernels keep between calls.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/launch.h"

namespace trivet::cuda {

// A CUDA call failed: what was tried, and what CUDA says.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& what, cudaError_t status);
};

void check(cudaError_t status, const char* what);

// Calls that a stream capture would forbid on this thread (allocation) are allowed while this lives.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Device memory that is kept: freed blocks are reused, best fit first; nothing goes back before the end. So a captured
// graph can be replayed as long as its arena lives.
class Arena {
 public:
  explicit Arena(int ordinal) : ordinal_(ordinal) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  void* allocate(size_t bytes);  // null for 0 bytes; throws CudaError
  // Memory that no captured graph writes to, as it does to blocks that it used and gave back: for what outlasts a step.
  void* allocate_unused(size_t bytes);
  void release(void* memory);
  // What was last refused for want of memory since the last call, with figures; "" = nothing.
  std::string take_refusal();

 private:
  void* make(size_t size);
  [[noreturn]] void refuse(size_t bytes, cudaError_t status);

  int ordinal_;
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
  std::multimap<size_t, void*> free_;
  std::string refusal_;
};

class Context {
 public:
  explicit Context(int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Scratch of one purpose, valid until this purpose asks for more; what it replaces is kept for captured graphs.
  enum Purpose : int {
    kActivations,  // and the next one, in turn: a kernel may read int8 rows while it writes others
    kOtherActivations,
    kScales,
    kOtherScales,
    kRounded,  // and the next one, in turn
    kOtherRounded,
    kDequantized,
    kParts,
    kGates,
    kQueries,
    kStates,
    kProcessed,
    kCounts,
    kZeros,
    kPurposes
  };
  template <class T>
  T* scratch(Purpose purpose, int64_t count) {
    return static_cast<T*>(scratch_bytes(purpose, static_cast<size_t>(count) * sizeof(T)));
  }

  // `count` zeros, which kernels leave as zeros when they are done.
  int* zeros(int64_t count);

  // The rows of [rows, k] floats at x as int8, if the last kernel that made int8 rows made them of these; else null
  // values.
  QuantizedRows quantized_of(const float* x, int64_t rows, int64_t k) const;
  // Memory for the rows at x as int8. The int8 rows made before these are forgotten, but stay readable until the next
  // call.
  QuantizedRows quantized_for(const float* x, int64_t rows, int64_t k);
  // The same for bfloat16 rows, which end with zeros up to a multiple of 64.
  void* rounded_of(const float* x, int64_t rows, int64_t k) const;
  void* rounded_for(const float* x, int64_t rows, int64_t k);
  // A kernel writes to x: copies that were made of what lay there are not its copies any more.
  void overwritten(const void* x);
  // A new run begins: what lies where may have changed without a kernel.
  void forget_copies() { quantized_source_.x = rounded_source_.x = nullptr; }

  // A number by which kernels report errors of this node.
  int32_t add_node(const std::string& name);
  ErrorSink sink(int32_t node) const { return {error_, node}; }
  // Waits for all work. Returns the first error that a kernel reported since the last call, else "".
  std::string finish();
  void make_current() const;
  // Host memory that the device copies from and to directly; it lives until the context goes or release_pinned.
  void* allocate_pinned(size_t bytes);
  void release_pinned(void* memory);

  const int ordinal;
  Launch launch{};
  Arena arena;

 private:
  void* scratch_bytes(Purpose purpose, size_t bytes);

  struct Scratch {
    void* memory = nullptr;
    size_t size = 0;
  };
  Scratch scratch_[kPurposes];
  struct Source {  // what the last copy was made of
    const float* x = nullptr;
    int64_t rows = 0, k = 0;
    bool other = false;  // of the two scratches
    bool is(const float* wanted, int64_t wanted_rows, int64_t wanted_k) const {
      return wanted != nullptr && wanted == x && wanted_rows == rows && wanted_k == k;
    }
  };
  Source quantized_source_, rounded_source_;
  QuantizedRows quantized_{};
  void* rounded_ = nullptr;
  DeviceError* error_ = nullptr;  // pinned: kernels write it, no copy of its own ends a step
  std::vector<std::string> nodes_;
  std::mutex pinned_mutex_;
  std::set<void*> pinned_;
};

// The message of a kernel's report.
std::string describe(const DeviceError& error);

// Facts for `trivet doctor` as JSON.
std::string describe_devices();
// Empty if the ordinal can be used, else why not.
std::string check_device(int ordinal);

}  // namespace trivet::cuda
