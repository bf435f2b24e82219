#include "weight_chain.h"

#include <algorithm>

#include "../../common/thread_pool.h"

namespace trivet {
namespace {

// Leaves most of a second-level cache of 1 MiB to what runs meanwhile.
constexpr int64_t kOwnBytes = 256 << 10;
constexpr int64_t kFirstThreadBytes = 64 << 10;
// Lines per step: a burst of more is dropped by the core (measured on Zen 4, with a pause instruction between steps).
constexpr int kLines = 8;
constexpr int kLineBytes = 64;

}  // namespace

WeightTiles::WeightTiles(std::span<const WeightMatrix> weights, int64_t k, bool gated) : gated(gated) {
  for (const WeightMatrix& w : weights) {
    if (w.data == nullptr) {  // comes with every call
      count = 0;
      return;
    }
    runs[count++] = {reinterpret_cast<uintptr_t>(w.data), kTileRows * w.format->row_bytes(k),
                     (w.n + kTileRows - 1) / kTileRows};
  }
}

int64_t WeightTiles::num_tasks() const {
  if (gated) return runs[0].tiles;
  int64_t tasks = 0;
  for (int i = 0; i < count; i++) tasks += runs[i].tiles;
  return tasks;
}

bool WeightPrefetcher::step(int thread, int num_threads) {
  if (at_ >= end_ && !next_run(thread, num_threads)) return false;
  for (int i = 0; i < kLines; i++) __builtin_prefetch(reinterpret_cast<const void*>(at_ + kLineBytes * i), 0, 2);
  at_ += kLineBytes * kLines;
  return true;
}

// Moves on to the part of the next run that lies in the share; false if there is none.
bool WeightPrefetcher::next_run(int thread, int num_threads) {
  const int shares = thread == 1 ? 2 : 1;
  const int64_t tasks = tiles_.num_tasks();
  while (visited_ < shares * tiles_.count) {
    const bool own = visited_ < tiles_.count;
    const int run_index = visited_++ % tiles_.count;
    if (run_index == 0) left_ = own ? kOwnBytes : kFirstThreadBytes;
    const auto& run = tiles_.runs[run_index];
    int64_t first_task = 0;  // of the run
    for (int i = 0; !tiles_.gated && i < run_index; i++) first_task += tiles_.runs[i].tiles;
    const int owner = own ? thread : 0;
    const auto tile_at = [&](int share) {
      return std::clamp<int64_t>(ThreadPool::share_begin(tasks, share, num_threads) - first_task, 0, run.tiles);
    };
    const int64_t first = tile_at(owner);
    const int64_t limit = tiles_.gated ? left_ / (tiles_.count - run_index) : left_;
    const int64_t bytes = std::min((tile_at(owner + 1) - first) * run.tile_bytes, limit);
    if (bytes <= 0) continue;
    left_ -= bytes;
    at_ = run.address + static_cast<uintptr_t>(first * run.tile_bytes);
    end_ = at_ + static_cast<uintptr_t>(bytes);
    return true;
  }
  return false;
}

// Defined here alone: inline ones, which every object file initialises, cannot be linked for Windows.
thread_local std::shared_ptr<WeightChain::Node> WeightChain::open_;
thread_local WeightTiles WeightChain::first_;

void WeightChain::begin() { open_.reset(); }

void WeightChain::join(const WeightTiles& tiles, bool last) {
  if (open_) {
    open_->next = tiles;
  } else {
    first_ = tiles;
  }
  open_ = last ? nullptr : node_;
  if (last) node_->next = first_;
}

}  // namespace trivet
