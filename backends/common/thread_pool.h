// Fork-join thread pool of the op libraries: one region at a time, tasks handed out in order.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace trivet {

// The calling thread is thread 0 and always takes part, so a region never waits for a thread that sleeps or has not
// been given a core. Regions of one pool do not overlap: a caller that finds the pool busy (another session's region,
// or a nested call) runs its tasks itself. Results must therefore not depend on `thread_idx` or on the number of
// threads.
class ThreadPool {
 public:
  // Pools are shared by the whole process, one per thread count, and live as long as the process.
  static ThreadPool& shared(int num_threads);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls f(int64_t task, int thread_idx) for every task in [0, n) and returns when all are done. The first
  // exception of a task is thrown here; tasks not yet begun are then dropped.
  template <class F>
  void parallel_for(int64_t n, F&& f) {
    run(
        n, [](void* arg, int64_t task, int thread) { (*static_cast<F*>(arg))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  using Call = void (*)(void* arg, int64_t task, int thread);
  struct State;

  void run(int64_t n, Call call, void* arg);

  int num_threads_;
  std::unique_ptr<State> state_;
};

// Physical cores this process may use: affinity mask without SMT siblings, bounded by the cgroup CPU quota; at least 1.
int default_num_threads();

}  // namespace trivet
