#include "upload.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "context.h"

namespace trivet::cuda {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr size_t kLanes = 4;  // kLanes * kPieceBytes of pinned memory in all
constexpr size_t kSmallBytes = size_t{1} << 20;

// A pinned buffer and a stream of its own; one thread at a time uses it.
class Lane {
 public:
  Lane() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMallocHost(&buffer_, kPieceBytes), "cudaMallocHost");
  }
  ~Lane() {
    if (buffer_ != nullptr) cudaFreeHost(buffer_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void copy(char* to, const char* from, size_t bytes) {
    std::memcpy(buffer_, from, bytes);
    check(cudaMemcpyAsync(to, buffer_, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  void* buffer_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// Lanes that no upload uses, by device; making one takes milliseconds.
struct IdleLanes {
  std::mutex mutex;
  std::multimap<int, std::unique_ptr<Lane>> lanes;

  std::unique_ptr<Lane> take(int device) {
    const std::lock_guard lock(mutex);
    const auto found = lanes.find(device);
    if (found == lanes.end()) return std::make_unique<Lane>();
    std::unique_ptr<Lane> lane = std::move(found->second);
    lanes.erase(found);
    return lane;
  }

  void give(int device, std::unique_ptr<Lane> lane) {
    const std::lock_guard lock(mutex);
    lanes.emplace(device, std::move(lane));
  }
};

IdleLanes& idle_lanes() {
  static auto& idle = *new IdleLanes();  // never destroyed: at exit the driver may be gone already
  return idle;
}

class Upload {
 public:
  Upload(int device, char* to, const char* from, size_t bytes) : device_(device), to_(to), from_(from), bytes_(bytes) {}

  void run() {
    const size_t pieces = (bytes_ + kPieceBytes - 1) / kPieceBytes;
    std::vector<std::jthread> threads;  // joined also where one more cannot start
    for (size_t i = 1; i < std::min(kLanes, pieces); ++i) threads.emplace_back([this] { work(); });
    work();
    threads.clear();
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  void work() noexcept {
    try {
      check(cudaSetDevice(device_), "cudaSetDevice");
      std::unique_ptr<Lane> lane = idle_lanes().take(device_);
      for (size_t at = next_.fetch_add(kPieceBytes); at < bytes_; at = next_.fetch_add(kPieceBytes)) {
        lane->copy(to_ + at, from_ + at, std::min(kPieceBytes, bytes_ - at));
      }
      idle_lanes().give(device_, std::move(lane));
    } catch (...) {
      next_ = bytes_;
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
    }
  }

  const int device_;
  char* const to_;
  const char* const from_;
  const size_t bytes_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void upload(void* device_memory, const void* host_memory, size_t bytes) {
  if (bytes < kSmallBytes) {
    return check(cudaMemcpy(device_memory, host_memory, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, device_memory), "cudaPointerGetAttributes");
  Upload(attributes.device, static_cast<char*>(device_memory), static_cast<const char*>(host_memory), bytes).run();
}

void release_upload_buffers() {
  const std::lock_guard lock(idle_lanes().mutex);
  idle_lanes().lanes.clear();
}

}  // namespace trivet::cuda
