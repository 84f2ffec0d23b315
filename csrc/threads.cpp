#include "threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace thinfer {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpinBeforeSleep = std::chrono::microseconds(50);  // between steps
constexpr auto kSpinBeforeYield = std::chrono::microseconds(20);  // inside a step

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins politely and says how long it has been at it, reading the clock only now and then.
class Spinner {
 public:
  void spin() {
    pause();
    if (++turns_ % 32 == 0) {
      const auto now = Clock::now();
      if (turns_ == 32) start_ = now;
      waited_ = now - start_;
      if (waited_ > kSpinBeforeYield) sched_yield();
    }
  }
  bool tired() const { return waited_ > kSpinBeforeSleep; }
  void reset() { *this = Spinner(); }

 private:
  uint32_t turns_ = 0;
  Clock::time_point start_{};
  Clock::duration waited_{};
};

}  // namespace

struct ThreadPool::State {
  // A loop's description. Two take turns: whoever still reads the loop before last fails its compare-and-swap on any
  // cursor, for their generations have moved on, so a stale description is never acted on.
  struct alignas(64) Loop {
    std::atomic<int> items{0};
    std::atomic<int> chunk{0};
    std::atomic<Function> function{nullptr};
    std::atomic<void*> argument{nullptr};
  };

  // Each thread's share of a loop: generation of the loop in the upper half, next item in the lower, so that taking
  // items and checking that they belong to the loop one has read is one atomic operation. A thread takes its own share
  // first, on a cache line of its own, and then what is left of the others'.
  struct alignas(64) Cursor {
    std::atomic<uint64_t> value{0};
  };

  std::unique_ptr<Cursor[]> cursors;
  alignas(64) std::atomic<int> done{0};
  Loop loops[2];
  uint32_t generation = 0;  // of the last loop; the caller's
  alignas(64) std::atomic<bool> in_step{false};
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex sleep;
  std::condition_variable wake;

  std::mutex turn;  // held through a step
  int threads;
  pid_t process = getpid();
  std::vector<std::thread> workers;

  explicit State(int count) : threads(count) { start(); }
  ~State() { finish(); }

  void start() {
    stop.store(false);
    cursors = std::make_unique<Cursor[]>(static_cast<size_t>(threads));
    generation = 0;
    for (int thread = 1; thread < threads; ++thread) {
      workers.emplace_back([this, thread] { work(thread); });
    }
  }

  void finish() {
    {
      const std::lock_guard lock(sleep);
      stop.store(true);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  int share_begin(int items, int share) const { return static_cast<int>(int64_t{items} * share / threads); }

  // Runs what it can get of one share; returns how many items that were.
  int take_share(const Loop& loop, uint32_t of, int share, int thread) {
    std::atomic<uint64_t>& cursor = cursors[static_cast<size_t>(share)].value;
    int taken = 0;
    uint64_t seen = cursor.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen >> 32) == of) {
      const int next = static_cast<int>(static_cast<uint32_t>(seen));
      const int end = share_begin(loop.items.load(std::memory_order_relaxed), share + 1);
      if (next >= end) break;
      const int fixed = loop.chunk.load(std::memory_order_relaxed);
      // Large chunks first, then ever smaller ones: few visits to the cursor and something to take over near the end.
      const int count = std::min(fixed > 0 ? fixed : std::max(1, (end - next) / 2), end - next);
      const Function function = loop.function.load(std::memory_order_relaxed);
      void* const argument = loop.argument.load(std::memory_order_relaxed);
      if (cursor.compare_exchange_weak(seen, seen + static_cast<uint64_t>(count), std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
        function(argument, next, next + count, thread);
        taken += count;
        seen = cursor.load(std::memory_order_acquire);
      }
    }
    return taken;
  }

  void take_items(uint32_t of, int thread) {
    const Loop& loop = loops[of & 1];
    int taken = 0;
    for (int i = 0; i < threads; ++i) taken += take_share(loop, of, (thread + i) % threads, thread);
    if (taken > 0) done.fetch_add(taken, std::memory_order_release);
  }

  void work(int thread) {
    const std::atomic<uint64_t>& own = cursors[static_cast<size_t>(thread)].value;
    auto last = static_cast<uint32_t>(own.load(std::memory_order_acquire) >> 32);
    Spinner spinner;
    while (!stop.load(std::memory_order_relaxed)) {
      const auto now = static_cast<uint32_t>(own.load(std::memory_order_acquire) >> 32);
      if (now != last) {
        take_items(now, thread);
        last = now;
        spinner.reset();
        continue;
      }
      spinner.spin();
      if (spinner.tired() && !in_step.load(std::memory_order_relaxed)) {
        std::unique_lock lock(sleep);
        sleepers.fetch_add(1);
        wake.wait(lock, [this] { return in_step.load() || stop.load(); });
        sleepers.fetch_sub(1);
        spinner.reset();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
  state_ = std::make_unique<State>(threads);
}

ThreadPool::~ThreadPool() {
  // In a forked child the workers do not exist and cannot be joined.
  if (state_->process != getpid()) static_cast<void>(state_.release());
}

int ThreadPool::threads() const { return state_->threads; }

void ThreadPool::resize(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
  begin();
  end();
  const std::lock_guard turn(state_->turn);
  if (threads == state_->threads) return;
  state_->finish();
  state_->threads = threads;
  state_->start();
}

void ThreadPool::begin() {
  if (state_->process != getpid()) {
    const int threads = state_->threads;
    static_cast<void>(state_.release());  // a fork took this pool along without its workers: leave it and start afresh
    state_ = std::make_unique<State>(threads);
  }
  State& state = *state_;
  state.turn.lock();
  state.in_step.store(true);
  if (state.sleepers.load() > 0) {
    {
      const std::lock_guard lock(state.sleep);
    }
    state.wake.notify_all();
  }
}

void ThreadPool::end() {
  state_->in_step.store(false);
  state_->turn.unlock();
}

void ThreadPool::run(int items, int chunk, Function function, void* argument) {
  if (items <= 0) return;
  State& state = *state_;
  if (state.threads == 1 || items == 1 || items <= chunk) {
    function(argument, 0, items, 0);
    return;
  }
  const uint32_t generation = ++state.generation;
  State::Loop& loop = state.loops[generation & 1];
  loop.items.store(items, std::memory_order_relaxed);
  loop.chunk.store(chunk, std::memory_order_relaxed);
  loop.function.store(function, std::memory_order_relaxed);
  loop.argument.store(argument, std::memory_order_relaxed);
  state.done.store(0, std::memory_order_relaxed);
  for (int share = state.threads - 1; share >= 0; --share) {
    const auto begin = static_cast<uint64_t>(state.share_begin(items, share));
    state.cursors[static_cast<size_t>(share)].value.store(static_cast<uint64_t>(generation) << 32 | begin,
                                                          std::memory_order_release);
  }
  state.take_items(generation, 0);
  Spinner spinner;
  while (state.done.load(std::memory_order_acquire) != items) spinner.spin();
}

}  // namespace thinfer
