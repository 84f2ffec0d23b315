#include "threads.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using thinfer::Step;
using thinfer::ThreadPool;

// Every item of every loop is done exactly once, whatever the sizes.
void cover(ThreadPool& pool, int loops) {
  std::vector<std::atomic<int>> done(1000);
  const Step step(pool);
  for (int loop = 0; loop < loops; ++loop) {
    const int items = (loop * 37) % 1000;
    for (auto& d : done) d.store(0, std::memory_order_relaxed);
    pool.parallel(items, loop % 5, [&](int begin, int end, int thread) {
      CHECK(thread >= 0 && thread < pool.threads());
      for (int i = begin; i < end; ++i) done[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
    });
    for (int i = 0; i < 1000; ++i) CHECK(done[static_cast<size_t>(i)].load() == (i < items ? 1 : 0));
  }
}

void take_turns(ThreadPool& pool) {
  std::vector<std::thread> callers;
  std::atomic<long> total{0};
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        thinfer::parallel_for(pool, 100, 0, [&](int begin, int end, int) { total += end - begin; });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(total.load() == 3 * 50 * 100);
}

}  // namespace

void test_threads() {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    cover(pool, 200);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for the workers to fall asleep
    cover(pool, 20);
    take_turns(pool);
  }
  ThreadPool pool(2);
  for (const int threads : {3, 1, 4, 4, 2}) {
    pool.resize(threads);
    CHECK(pool.threads() == threads);
    cover(pool, 20);
  }
  CHECK_THROWS(std::invalid_argument, ThreadPool(0));
  CHECK_THROWS(std::invalid_argument, pool.resize(5000));
}
