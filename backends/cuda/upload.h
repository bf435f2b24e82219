// Large copies from pageable host memory, such as a mapped checkpoint, to a device.
#pragma once

#include <cstddef>

namespace trivet::cuda {

// Copies and waits. Threads read the source piece by piece into pinned buffers of a bounded size, so that reading pages
// and the transfers overlap and the host never holds a second copy. Throws CudaError.
void upload(void* device_memory, const void* host_memory, size_t bytes);
// Frees the pinned buffers, which are kept from one upload to the next.
void release_upload_buffers();

}  // namespace trivet::cuda
