// What Python (ctypes) uses beside onnxruntime: contexts, device memory, copies on the session's stream.
#pragma once

#include <cstdint>
#include <memory>

#include "context.h"

namespace trivet::cuda {

// The context behind a handle of trivet_cuda_open, or null.
std::shared_ptr<Context> context_of(int64_t handle);

}  // namespace trivet::cuda
