// The thread pool and the weight chain, as a program: what tests/kernels/test_threads.py compiles and runs.
//
// Prints the first thing that is wrong and exits with status 1.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../backends/common/thread_pool.h"
#include "../../backends/cpu/ops/weight_chain.h"

namespace trivet {
namespace {

void expect(bool good, const std::string& what) {
  if (good) return;
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

struct NoIdleWork {
  bool step(int, int) { return false; }
};

template <class Region>
void check_every_task_runs_once(int threads, int64_t n, const char* kind, const Region& region) {
  const std::string where = std::string(kind) + " of " + std::to_string(n) + " on " + std::to_string(threads);
  std::vector<std::atomic<int>> runs(static_cast<size_t>(n));
  std::atomic<bool> bad_thread{false};
  region(n, [&](int64_t task, int thread) {
    runs[static_cast<size_t>(task)].fetch_add(1);
    if (thread < 0 || thread >= threads) bad_thread.store(true);
  });
  for (const auto& count : runs) expect(count.load() == 1, where + ": a task ran " + std::to_string(count.load()));
  expect(!bad_thread.load(), where + ": no such thread");
}

void check_regions(ThreadPool& pool) {
  const int threads = pool.num_threads();
  for (int64_t n : {0, 1, 2, 7, 64, 1000}) {
    check_every_task_runs_once(threads, n, "parallel_for", [&](int64_t m, auto f) { pool.parallel_for(m, f); });
    check_every_task_runs_once(threads, n, "parallel_shares",
                               [&](int64_t m, auto f) { pool.parallel_shares(m, f, NoIdleWork()); });
  }
}

// A region ends with its last task, whoever runs it.
void check_slow_tasks(ThreadPool& pool) {
  for (int i = 0; i < 10; i++) {
    std::atomic<int> done{0};
    pool.parallel_for(5, [&](int64_t task, int) {
      std::this_thread::sleep_for(std::chrono::milliseconds(task == 4 ? 4 : 1));
      done.fetch_add(1);
    });
    expect(done.load() == 5, "a region returned before its last task");
  }
}

void check_exception(ThreadPool& pool) {
  for (int64_t bad : {0, 13, 99}) {
    bool caught = false;
    try {
      pool.parallel_for(100, [&](int64_t task, int) {
        if (task == bad) throw std::runtime_error("task " + std::to_string(task));
      });
    } catch (const std::runtime_error& error) {
      caught = error.what() == "task " + std::to_string(bad);
    }
    expect(caught, "the exception of task " + std::to_string(bad) + " did not arrive");
  }
  check_regions(pool);  // as good as new
}

void check_nested(ThreadPool& pool) {
  std::atomic<int> runs{0};
  pool.parallel_for(16, [&](int64_t, int) { pool.parallel_for(16, [&](int64_t, int) { runs.fetch_add(1); }); });
  expect(runs.load() == 256, "nested regions ran " + std::to_string(runs.load()) + " tasks of 256");
}

void check_callers_at_once(ThreadPool& pool) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; i++) {
    callers.emplace_back([&] {
      for (int j = 0; j < 10; j++) check_regions(pool);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

std::atomic<int> idle_steps{0};
std::atomic<bool> idle_on_bad_thread{false};

struct CountsSteps {
  int left = 3;
  bool step(int thread, int num_threads) {
    if (thread < 1 || thread >= num_threads) idle_on_bad_thread.store(true);
    idle_steps.fetch_add(1);
    return --left > 0;
  }
};

// A worker does the idle work of a region that it has seen, a copy of its own and no more than that.
void check_idle_work() {
  int regions = 0;
  {
    ThreadPool pool(2);
    for (; regions < 10000 && idle_steps.load() == 0; regions++) {
      pool.parallel_shares(64, [](int64_t, int) { std::this_thread::yield(); }, CountsSteps());
      std::this_thread::yield();
    }
  }  // its worker has ended
  expect(idle_steps.load() >= 1, "no worker did any idle work");
  expect(idle_steps.load() <= 3 * regions, "idle work: " + std::to_string(idle_steps.load()) + " steps");
  expect(!idle_on_bad_thread.load(), "idle work on a thread that has none");
}

// Workers sleep while nothing happens, and come back.
void check_sleepers(ThreadPool& pool) {
  for (int i = 0; i < 5; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    check_regions(pool);
  }
}

WeightTiles tiles_at(const WeightFormat& format, const uint8_t* data) {
  const WeightMatrix weight{&format, data, 32};
  return {{&weight, 1}, 32, false};
}

void check_chain() {
  const WeightFormat format{kFormatSpecs[static_cast<int>(Format::kQ4_0)], 8, nullptr};
  uint8_t memory[3] = {};
  const auto address = [](const WeightChain& chain) { return chain.next().runs[0].address; };
  const auto at = [&](int i) { return reinterpret_cast<uintptr_t>(memory + i); };
  WeightChain failed;  // of a session whose load ended in an error after this product
  failed.join(tiles_at(format, memory), false);
  WeightChain::begin();
  WeightChain first, last;
  first.join(tiles_at(format, memory + 1), false);
  last.join(tiles_at(format, memory + 2), true);
  expect(failed.next().count == 0, "a chain goes on in another session");
  expect(address(first) == at(2) && address(last) == at(1), "a chain does not lead from product to product and back");
}

}  // namespace
}  // namespace trivet

int main() {
  using namespace trivet;
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    check_regions(pool);
    check_slow_tasks(pool);
    check_exception(pool);
    check_nested(pool);
    check_callers_at_once(pool);
    check_sleepers(pool);
  }
  check_idle_work();
  check_chain();
}
