// Page table entries for mapped weights, before a step needs them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trivet {

struct MemoryRange {
  const uint8_t* data;
  size_t size;
};

// Touches what the page cache holds of mapped files, range after range, until `stop` is not 0. It waits for no disk: a
// file that is larger than the memory would only push its own pages out. Does nothing but on Linux, which says that all
// is cached of a file that the process neither owns nor may write to: such a file is read, disk or not.
void map_cached_pages(const MemoryRange* ranges, size_t count, const std::atomic<int32_t>& stop);

}  // namespace trivet
