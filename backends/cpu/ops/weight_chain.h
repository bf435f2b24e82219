// Which weights a step reads next, so that threads that wait can fetch them into their caches.
//
// A token streams all weights through every cache, so each product begins with misses, while the threads without work
// between two products (norms, attention, onnxruntime's own part) could keep the memory busy. All of this is a hint:
// nothing here is ever dereferenced, and no result depends on it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "matmul_kernels.h"

namespace trivet {

struct WeightMatrix {
  const WeightFormat* format;
  const uint8_t* data;  // [n, row_bytes]
  int64_t n;
};

// Where the tiles of a product lie.
struct WeightTiles {
  struct Run {  // of neighbouring tiles
    uintptr_t address;
    int64_t tile_bytes;
    int64_t tiles;
  };
  Run runs[kMaxWeights] = {};
  int count = 0;  // 0: unknown
  bool gated = false;

  WeightTiles() = default;
  WeightTiles(std::span<const WeightMatrix> weights, int64_t k, bool gated);
  int64_t num_tasks() const;  // a gated product's tasks are a tile of each run
};

// The idle work of a thread between two products (see ThreadPool::parallel_shares): fetches the beginning of its share
// of the next one. Thread 1 then does so for thread 0, which is busy in between.
class WeightPrefetcher {
 public:
  explicit WeightPrefetcher(const WeightTiles& next) : tiles_(next) {}
  bool step(int thread, int num_threads);

 private:
  bool next_run(int thread, int num_threads);

  WeightTiles tiles_;
  int visited_ = 0;   // runs, of the thread's own share and then of thread 0's
  int64_t left_ = 0;  // bytes that may still be fetched of the share
  uintptr_t at_ = 0;
  uintptr_t end_ = 0;
};

// The products of a model in the order in which a step runs them; that is the order in which onnxruntime makes their
// kernels, on one thread.
class WeightChain {
 public:
  // A model's first op calls it: products of this thread that were made before belong to another session, which may
  // have failed to load.
  static void begin();
  // Appends this product. `last` closes the chain: a step's first product follows it.
  void join(const WeightTiles& tiles, bool last);
  const WeightTiles& next() const { return node_->next; }

 private:
  struct Node {
    WeightTiles next;
  };
  static thread_local std::shared_ptr<Node> open_;  // the last product of a chain that goes on
  static thread_local WeightTiles first_;           // the first product of that chain
  std::shared_ptr<Node> node_ = std::make_shared<Node>();
};

}  // namespace trivet
