// Running work items on threads. PyTorch's products run on its OpenMP team, whose threads spin for a while after a region;
// a second team would fight them for the cores. So where PyTorch's runtime offers GOMP_parallel (libgomp and libomp both
// do), items run on that same team; otherwise on a small team of our own.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"
#include "types.h"

namespace kvarn {
namespace {

struct Region {
  int n;
  int next;
  void (*task)(int, void*);
  void* context;
};

void work(void* data) {
  auto* region = static_cast<Region*>(data);
  for (;;) {
    int i = __atomic_fetch_add(&region->next, 1, __ATOMIC_RELAXED);
    if (i >= region->n) return;
    region->task(i, region->context);
  }
}

class OwnTeam {  // one region at a time; the caller works too
 public:
  ~OwnTeam() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }
  void run(Region* region, int n_threads) {
    std::lock_guard one(callers_);
    while (int(threads_.size()) < n_threads - 1) {
      int index = int(threads_.size());
      threads_.emplace_back([this, index, seen = round_] { loop(index, seen); });
    }
    {
      std::lock_guard lock(mutex_);
      region_ = region, wanted_ = n_threads - 1, busy_ = n_threads - 1, round_++;
    }
    wake_.notify_all();
    work(region);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void loop(int index, uint64_t seen) {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      if (index >= wanted_) continue;
      Region* region = region_;
      lock.unlock();
      work(region);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }
  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Region* region_ = nullptr;
  int wanted_ = 0, busy_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
};

// A team that stays together over many regions. The caller publishes a region, works, takes it back and waits for whoever
// is still inside it: all items are taken by then.
struct Session {
  std::atomic<Region*> region{nullptr};
  std::atomic<uint64_t> round{0};
  std::atomic<int> inside{0};
  std::atomic<bool> over{false};
  void (*body)(void*);
  void* context;
};

thread_local Session* session = nullptr;  // of the thread that publishes
constexpr int kSpins = 4096;

void pause(int spins) {
#if defined(__x86_64__)
  if (spins < kSpins) return __builtin_ia32_pause();
#else
  if (spins < kSpins) return;
#endif
  std::this_thread::yield();
}

void run_region(Session& s, Region* region) {
  s.round.fetch_add(1);
  s.region.store(region);
  work(region);
  s.region.store(nullptr);
  for (int spins = 0; s.inside.load() > 0; spins++) pause(spins);
}

void follow(Session& s) {
  uint64_t seen = 0;
  for (int spins = 0; !s.over.load(std::memory_order_relaxed); spins++) {
    if (s.round.load(std::memory_order_relaxed) == seen) {
      pause(spins);
      continue;
    }
    s.inside.fetch_add(1);
    const uint64_t round = s.round.load();
    Region* region = s.region.load();
    if (region != nullptr) {
      seen = round, spins = 0;
      work(region);
    }
    s.inside.fetch_sub(1);
    if (region == nullptr) pause(spins);  // not out yet, or over already
  }
}

void join(void* data) {
  auto& s = *static_cast<Session*>(data);
  if (session != &s) return follow(s);
  s.body(s.context);
  s.over.store(true);
}

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel shared_team = nullptr;

}  // namespace

void use_team(void* gomp_parallel) { shared_team = reinterpret_cast<GompParallel>(gomp_parallel); }

bool uses_shared_team() { return shared_team != nullptr; }

void parallel_for(int n, int n_threads, void (*task)(int, void*), void* context) {
  Region region{n, 0, task, context};
  if (n <= 1 || n_threads <= 1) return work(&region);
  if (session != nullptr) return run_region(*session, &region);
  // Always the whole team: libgomp ends and restarts threads when the size of its team changes.
  if (shared_team != nullptr) return shared_team(work, &region, unsigned(n_threads), 0);
  if (n_threads > n) n_threads = n;
  static OwnTeam team;
  team.run(&region, n_threads);
}

void together(int n_threads, void (*body)(void*), void* context) {
  if (n_threads <= 1 || shared_team == nullptr || session != nullptr) return body(context);
  Session s;
  s.body = body, s.context = context;
  session = &s;
  shared_team(join, &s, unsigned(n_threads), 0);
  session = nullptr;
}

}  // namespace kvarn
