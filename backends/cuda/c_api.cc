#include "c_api.h"

#include "upload.h"

#define TRIVET_EXPORT extern "C" __attribute__((visibility("default")))

namespace trivet::cuda {
namespace {

std::mutex contexts_mutex;
std::map<int64_t, std::shared_ptr<Context>>& contexts() {
  static auto& all = *new std::map<int64_t, std::shared_ptr<Context>>();
  return all;
}

// Every function returns "" or an error; the text is valid until this thread's next call.
template <class F>
const char* reported(const F& f) noexcept {
  thread_local std::string text;
  try {
    text = f();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}

template <class F>
const char* with_context(int64_t handle, const F& f) noexcept {
  return reported([&]() -> std::string {
    const std::shared_ptr<Context> context = context_of(handle);
    if (context == nullptr) return "CUDA: this session is closed";
    context->make_current();
    return f(*context);
  });
}

}  // namespace

std::shared_ptr<Context> context_of(int64_t handle) {
  const std::lock_guard lock(contexts_mutex);
  const auto found = contexts().find(handle);
  return found == contexts().end() ? nullptr : found->second;
}

}  // namespace trivet::cuda

using namespace trivet::cuda;

// JSON; see describe_devices().
TRIVET_EXPORT const char* trivet_cuda_describe() {
  return reported([] { return describe_devices(); });
}

TRIVET_EXPORT const char* trivet_cuda_open(int ordinal, int64_t* handle) {
  return reported([&]() -> std::string {
    auto context = std::make_shared<Context>(ordinal);
    const std::lock_guard lock(contexts_mutex);
    static int64_t next = 0;
    *handle = ++next;
    contexts()[*handle] = std::move(context);
    return "";
  });
}

// The context goes when the session that uses it has gone as well. A load that failed leaves its buffers to this.
TRIVET_EXPORT const char* trivet_cuda_close(int64_t handle) {
  return reported([&]() -> std::string {
    release_upload_buffers();
    const std::lock_guard lock(contexts_mutex);
    contexts().erase(handle);
    return "";
  });
}

TRIVET_EXPORT const char* trivet_cuda_memory(int64_t handle, uint64_t* free_bytes, uint64_t* total_bytes) {
  return with_context(handle, [&](Context&) -> std::string {
    size_t available = 0, total = 0;
    check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    *free_bytes = available;
    *total_bytes = total;
    return "";
  });
}

// Device memory of the context's arena; it lives until the context goes or trivet_cuda_release.
TRIVET_EXPORT const char* trivet_cuda_allocate(int64_t handle, uint64_t bytes, void** memory) {
  return with_context(handle, [&](Context& context) -> std::string {
    *memory = context.arena.allocate(bytes);
    return "";
  });
}

TRIVET_EXPORT const char* trivet_cuda_release(int64_t handle, void* memory) {
  return with_context(handle, [&](Context& context) -> std::string {
    context.arena.release(memory);
    return "";
  });
}

TRIVET_EXPORT const char* trivet_cuda_allocate_pinned(int64_t handle, uint64_t bytes, void** memory) {
  return with_context(handle, [&](Context& context) -> std::string {
    *memory = context.allocate_pinned(bytes);
    return "";
  });
}

TRIVET_EXPORT const char* trivet_cuda_release_pinned(int64_t handle, void* memory) {
  return with_context(handle, [&](Context& context) -> std::string {
    context.release_pinned(memory);
    return "";
  });
}

// The last allocation that failed for want of device memory since the last call, also inside a run; "" = none.
TRIVET_EXPORT const char* trivet_cuda_take_refusal(int64_t handle) {
  return reported([&]() -> std::string {
    const std::shared_ptr<Context> context = context_of(handle);
    return context == nullptr ? "" : context->arena.take_refusal();
  });
}

// Frees what loading weights has pinned.
TRIVET_EXPORT const char* trivet_cuda_end_upload(int64_t handle) {
  return with_context(handle, [&](Context&) -> std::string {
    release_upload_buffers();
    return "";
  });
}

// Copies in the order of the stream; pinned host memory must stay as it is until trivet_cuda_finish.
TRIVET_EXPORT const char* trivet_cuda_copy(int64_t handle, void* to, const void* from, uint64_t bytes) {
  return with_context(handle, [&](Context& context) -> std::string {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, context.launch.stream), "cudaMemcpyAsync");
    return "";
  });
}

TRIVET_EXPORT const char* trivet_cuda_fill(int64_t handle, void* memory, int value, uint64_t bytes) {
  return with_context(handle, [&](Context& context) -> std::string {
    check(cudaMemsetAsync(memory, value, bytes, context.launch.stream), "cudaMemsetAsync");
    return "";
  });
}

// Waits for all work of the context; the error is a CUDA error or the first bad value that a kernel found.
TRIVET_EXPORT const char* trivet_cuda_finish(int64_t handle) {
  return with_context(handle, [&](Context& context) { return context.finish(); });
}
