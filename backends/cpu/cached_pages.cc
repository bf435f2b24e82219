#include "cached_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace trivet {

#if defined(__linux__)
namespace {

constexpr uintptr_t kStride = 64 << 10;  // the kernel maps so much, aligned, around a page that is touched
constexpr uintptr_t kPart = 4 << 20;     // between two looks at `stop`
constexpr uintptr_t kSmallestPage = 4096;

}  // namespace

void map_cached_pages(const MemoryRange* ranges, size_t count, const std::atomic<int32_t>& stop) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t stride = std::max(kStride, page);
  unsigned char is_cached[kPart / kSmallestPage];
  for (size_t i = 0; i < count; ++i) {
    const uintptr_t end = reinterpret_cast<uintptr_t>(ranges[i].data) + ranges[i].size;
    uintptr_t at = reinterpret_cast<uintptr_t>(ranges[i].data) / page * page;
    while (at < end) {
      const uintptr_t part_end = std::min(end, (at / kPart + 1) * kPart);
      if (stop.load(std::memory_order_relaxed) != 0) return;
      if (mincore(reinterpret_cast<void*>(at), part_end - at, is_cached) != 0) return;
      for (uintptr_t touched = at; touched < part_end; touched = (touched / stride + 1) * stride) {
        if (is_cached[(touched - at) / page] & 1) (void)*reinterpret_cast<const volatile uint8_t*>(touched);
      }
      at = part_end;
    }
  }
}
#else
void map_cached_pages(const MemoryRange*, size_t, const std::atomic<int32_t>&) {}
#endif

}  // namespace trivet
