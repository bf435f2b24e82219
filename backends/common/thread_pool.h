// Fork-join thread pool of the op libraries: one region at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

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

  // Calls f(int64_t task, int thread_idx) for every task in [0, n) and returns when all are done; tasks are begun in
  // order. The first exception of a task is thrown here; tasks not yet begun are then dropped.
  template <class F>
  void parallel_for(int64_t n, F&& f) {
    run(n, 1, call_of<F>(), const_cast<void*>(static_cast<const void*>(&f)), nullptr);
  }

  // Of n tasks in num_shares runs of neighbours: where run i begins. Here and everywhere n is below 2^32.
  static int64_t share_begin(int64_t n, int i, int num_shares) { return n * i / num_shares; }

  // The same as parallel_for, but every thread begins with a share of its own, a run of neighbouring tasks, and takes
  // it in order; a thread that is done takes tasks from the end of another's share. For tasks that each stream a part
  // of memory.
  //
  // `idle` is for workers that wait for a region afterwards: each calls step(thread, num_threads) of a copy of its own
  // until that returns false; regions without idle work only interrupt it, one with some replaces it. A copy outlives
  // the caller, so it may own nothing and dereference nothing.
  template <class F, class Idle>
  void parallel_shares(int64_t n, F&& f, const Idle& idle) {
    static_assert(std::is_trivially_copyable_v<Idle> && sizeof(Idle) <= kIdleBytes);
    const IdleTask task{
        [](void* copy, int thread, int num_threads) { return static_cast<Idle*>(copy)->step(thread, num_threads); },
        &idle, sizeof(Idle)};
    run(n, num_threads_, call_of<F>(), const_cast<void*>(static_cast<const void*>(&f)), &task);
  }

  template <class F>
  void parallel_shares(int64_t n, F&& f) {
    run(n, num_threads_, call_of<F>(), const_cast<void*>(static_cast<const void*>(&f)), nullptr);
  }

 private:
  using Call = void (*)(void* arg, int64_t task, int thread);
  struct State;
  struct IdleTask {
    bool (*step)(void* copy, int thread, int num_threads);
    const void* original;
    size_t size;
  };
  static constexpr size_t kIdleBytes = 128;

  template <class F>
  static Call call_of() {
    return [](void* arg, int64_t task, int thread) { (*static_cast<std::remove_reference_t<F>*>(arg))(task, thread); };
  }

  void run(int64_t n, int num_shares, Call call, void* arg, const IdleTask* idle);

  int num_threads_;
  std::unique_ptr<State> state_;
};

// Physical cores this process may use: affinity mask without SMT siblings, bounded by the cgroup CPU quota; at least 1.
int default_num_threads();

}  // namespace trivet
