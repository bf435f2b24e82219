#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace trivet {
namespace {

using Clock = std::chrono::steady_clock;

// A decode step has a region every few microseconds, so a worker spins that long before it sleeps; with fewer cores
// than threads a spinner only steals the core from the thread that it waits for.
constexpr auto kSpin = std::chrono::microseconds(80);
constexpr auto kSpinOversubscribed = std::chrono::microseconds(2);

void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // waits for the pipeline, tens of cycles; `yield` does nothing on most cores
#else
  std::this_thread::yield();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
#else
  word.wait(expected);
#endif
}

void futex_wake(std::atomic<uint32_t>& word, [[maybe_unused]] int count) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#else
  word.notify_all();
#endif
}

std::vector<int> affinity_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  // The kernel's mask may be wider than cpu_set_t: grow until it fits.
  for (int bits = 1024; bits <= (1 << 20); bits *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(bits));
    const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(bits));
    const bool ok = sched_getaffinity(0, size, set) == 0;
    for (int cpu = 0; ok && cpu < bits; cpu++) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), size, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (ok) break;
  }
#endif
  if (cpus.empty()) {
    for (unsigned cpu = 0; cpu < std::max(1u, std::thread::hardware_concurrency()); cpu++) {
      cpus.push_back(static_cast<int>(cpu));
    }
  }
  return cpus;
}

int physical_cores(const std::vector<int>& cpus) {
  std::set<std::pair<int, int>> cores;
  for (int cpu : cpus) {
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::ifstream package_file(dir + "physical_package_id");
    std::ifstream core_file(dir + "core_id");
    int package = 0;
    int core = 0;
    if (!(package_file >> package) || !(core_file >> core)) return static_cast<int>(cpus.size());
    cores.emplace(package, core);
  }
  return static_cast<int>(cores.size());
}

double read_quota_v2(const std::string& dir) {
  std::ifstream file(dir + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return INFINITY;
  return std::strtod(quota.c_str(), nullptr) / period;
}

double read_quota_v1(const std::string& dir) {
  std::ifstream quota_file(dir + "/cpu.cfs_quota_us");
  std::ifstream period_file(dir + "/cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return INFINITY;
  return quota / period;
}

// Smallest CPU quota of this process's cgroup and its ancestors, in cores. Inside a container the path of
// /proc/self/cgroup may not exist under the mount; its root is then the container's own group.
double cgroup_quota() {
  double cores = INFINITY;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controllers;
    while (true) {
      const std::string dir = path == "/" ? root : root + path;
      cores = std::fmin(cores, v2 ? read_quota_v2(dir) : read_quota_v1(dir));
      if (path.size() <= 1) break;
      path.erase(path.rfind('/'));
      if (path.empty()) path.push_back('/');
    }
  }
  return cores;
}

}  // namespace

int default_num_threads() {
  const int cores = physical_cores(affinity_cpus());
  const double quota = cgroup_quota();
  return std::max(1, quota < cores ? static_cast<int>(quota) : cores);
}

namespace {

// A run of tasks that nobody has begun.
class Share {
 public:
  void set(int64_t first, int64_t end) { range_.store(pack(first, end), std::memory_order_relaxed); }

  // The next task, or -1.
  int64_t take_first() {
    uint64_t range = range_.load(std::memory_order_relaxed);
    while (first_of(range) < end_of(range)) {
      if (range_.compare_exchange_weak(range, pack(first_of(range) + 1, end_of(range)), std::memory_order_relaxed)) {
        return first_of(range);
      }
    }
    return -1;
  }

  int64_t take_last() {
    uint64_t range = range_.load(std::memory_order_relaxed);
    while (first_of(range) < end_of(range)) {
      if (range_.compare_exchange_weak(range, pack(first_of(range), end_of(range) - 1), std::memory_order_relaxed)) {
        return end_of(range) - 1;
      }
    }
    return -1;
  }

 private:
  static uint64_t pack(int64_t first, int64_t end) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end);
  }
  static int64_t first_of(uint64_t range) { return static_cast<int64_t>(range >> 32); }
  static int64_t end_of(uint64_t range) { return static_cast<int64_t>(range & 0xFFFFFFFFu); }

  std::atomic<uint64_t> range_{0};
};

}  // namespace

struct ThreadPool::State {
  struct Region {
    Call call;
    void* arg;
    int num_shares;
    bool has_idle;
  };

  // Whether a worker may enter the region: the caller opens it and, when all tasks have been begun, closes it again or,
  // if the worker is inside, waits until that has left and closed it.
  enum Entry { kClosed, kOpen, kInside, kStop };

  // What the caller and one worker tell each other, on a cache line of its own: one line that all workers watch, or
  // write to, goes round the cores at the begin and end of every region.
  struct alignas(64) Worker {
    std::atomic<Entry> entry{kClosed};
    Share share;
    Region region{};  // written only while the entry is closed
  };

  std::vector<Worker> workers;  // by thread; of thread 0, the caller, only the share is used
  bool oversubscribed = false;
  int max_wakes = 0;  // sleepers that a region wakes: more than there are cores would only queue up behind each other
  std::vector<std::thread> threads;
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<uint32_t> wakes{0};  // the futex word
  alignas(64) std::atomic<bool> busy{false};
  // Of a region that has idle work; written only while no worker is inside.
  alignas(64) IdleTask idle{};
  alignas(64) std::byte idle_copy[kIdleBytes];
  alignas(64) std::atomic<bool> failed{false};
  std::exception_ptr error;  // of the task that set `failed`

  // The thread's own share first, then what others have left at the end of theirs. -1: all tasks have been begun.
  int64_t take_task(int num_shares, int thread) {
    const int own = thread % num_shares;
    int64_t task = workers[own].share.take_first();
    for (int i = 1; task < 0 && i < num_shares; i++) task = workers[(own + i) % num_shares].share.take_last();
    return task;
  }

  void take_tasks(const Region& region, int thread) {
    try {
      for (int64_t task; (task = take_task(region.num_shares, thread)) >= 0;) region.call(region.arg, task, thread);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      for (int i = 0; i < region.num_shares; i++) workers[i].share.set(0, 0);
    }
  }

  // What a waiting worker does meanwhile.
  struct Idling {
    bool (*step)(void* copy, int thread, int num_threads) = nullptr;
    alignas(16) std::byte copy[kIdleBytes];
  };

  // Returns the entry once it is not closed.
  Entry wait_for_region(const Worker& worker, int thread, Idling& idling) {
    const auto limit = oversubscribed ? kSpinOversubscribed : kSpin;
    auto start = Clock::now();
    while (true) {
      for (int i = 0; i < 32; i++) {
        const Entry entry = worker.entry.load(std::memory_order_acquire);
        if (entry != kClosed) return entry;
        if (idling.step != nullptr && !idling.step(idling.copy, thread, static_cast<int>(workers.size()))) {
          idling.step = nullptr;
        }
        cpu_relax();
      }
      if (Clock::now() - start < limit) continue;
      // Announce first, then look again: either the open entry is seen here, or the caller sees the sleeper.
      sleepers.fetch_add(1);
      const uint32_t seen = wakes.load();
      if (worker.entry.load(std::memory_order_acquire) == kClosed) futex_wait(wakes, seen);
      sleepers.fetch_sub(1);
      start = Clock::now();  // of a region that is over already, the next ones follow soon
    }
  }

  void work(int thread) {
    Worker& worker = workers[thread];
    Idling idling;
    while (true) {
      Entry entry = wait_for_region(worker, thread, idling);
      if (entry == kStop) return;
      if (!worker.entry.compare_exchange_strong(entry, kInside, std::memory_order_acquire)) continue;
      const bool has_idle = worker.region.has_idle;
      if (has_idle) {  // read when all tasks have been begun
        __builtin_prefetch(&idle);
        for (size_t at = 0; at < kIdleBytes; at += 64) __builtin_prefetch(idle_copy + at);
      }
      take_tasks(worker.region, thread);
      if (has_idle) {
        idling.step = idle.step;
        std::memcpy(idling.copy, idle_copy, idle.size);
      }
      worker.entry.store(kClosed, std::memory_order_release);
    }
  }

  void open(const Region& region, int64_t n) {
    for (int i = 0; i < region.num_shares; i++) {  // all, before any worker may take from another's
      workers[i].share.set(share_begin(n, i, region.num_shares), share_begin(n, i + 1, region.num_shares));
    }
    for (size_t i = 1; i < workers.size(); i++) {
      workers[i].region = region;
      workers[i].entry.store(kOpen, std::memory_order_release);
    }
    // A read-modify-write, so that it is ordered after the stores; its counterpart is in wait_for_region().
    if (sleepers.fetch_add(0) > 0) wake(max_wakes);
  }

  void wake(int count) {
    wakes.fetch_add(1);
    futex_wake(wakes, count);
  }

  void close() {
    int spins = 0;
    for (size_t i = 1; i < workers.size(); i++) {
      std::atomic<Entry>& entry = workers[i].entry;
      Entry now = entry.load(std::memory_order_acquire);
      if (now == kOpen && entry.compare_exchange_strong(now, kClosed, std::memory_order_acquire)) continue;
      for (; now != kClosed; now = entry.load(std::memory_order_acquire)) {
        if (oversubscribed || ++spins > 4096) {
          std::this_thread::yield();
        } else {
          cpu_relax();
        }
      }
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), state_(std::make_unique<State>()) {
  const int cpus = static_cast<int>(affinity_cpus().size());
  state_->oversubscribed = num_threads > cpus;
  state_->workers = std::vector<State::Worker>(static_cast<size_t>(num_threads));
  state_->max_wakes = std::max(1, std::min(num_threads, cpus) - 1);
  for (int thread = 1; thread < num_threads; thread++) {
    state_->threads.emplace_back([state = state_.get(), thread] { state->work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  for (State::Worker& worker : state_->workers) worker.entry.store(State::kStop);
  state_->wake(INT_MAX);
  for (std::thread& thread : state_->threads) thread.join();
}

ThreadPool& ThreadPool::shared(int num_threads) {
  static std::mutex mutex;
  // Never destroyed: at process exit a worker may still be inside.
  static auto& pools = *new std::map<int, std::unique_ptr<ThreadPool>>();
  const std::lock_guard lock(mutex);
  auto& pool = pools[num_threads];
  if (!pool) pool = std::make_unique<ThreadPool>(num_threads);
  return *pool;
}

void ThreadPool::run(int64_t n, int num_shares, Call call, void* arg, const IdleTask* idle) {
  State& s = *state_;
  if (n <= 1 || num_threads_ == 1 || s.busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t task = 0; task < n; task++) call(arg, task, 0);
    return;
  }
  if (idle != nullptr) {
    s.idle = *idle;
    std::memcpy(s.idle_copy, idle->original, idle->size);
  }
  const State::Region region{call, arg, num_shares, idle != nullptr};
  s.open(region, n);
  s.take_tasks(region, 0);
  s.close();
  std::exception_ptr error;
  if (s.failed.load()) {
    s.failed.store(false);
    error = std::exchange(s.error, nullptr);
  }
  s.busy.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

}  // namespace trivet
