// Running work items on threads. PyTorch's products run on its OpenMP team, whose threads spin for a while after a region;
// a second team would fight them for the cores. So where PyTorch's runtime offers GOMP_parallel (libgomp and libomp both
// do), items run on that same team; otherwise on a small team of our own.
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

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel shared_team = nullptr;

}  // namespace

void use_team(void* gomp_parallel) { shared_team = reinterpret_cast<GompParallel>(gomp_parallel); }

bool uses_shared_team() { return shared_team != nullptr; }

void parallel_for(int n, int n_threads, void (*task)(int, void*), void* context) {
  Region region{n, 0, task, context};
  if (n <= 1 || n_threads <= 1) return work(&region);
  // Always the whole team: libgomp ends and restarts threads when the size of its team changes.
  if (shared_team != nullptr) return shared_team(work, &region, unsigned(n_threads), 0);
  if (n_threads > n) n_threads = n;
  static OwnTeam team;
  team.run(&region, n_threads);
}

}  // namespace kvarn
