// The one persistent thread pool: the caller and threads-1 workers.
#pragma once

#include <memory>
#include <type_traits>

namespace thinfer {

// One step is begin(), any number of parallel(), end(). Workers spin through a step and fall asleep soon after it, so
// an idle process burns no CPU. Each thread has a share of contiguous items, the same for the same loop, that it takes
// in chunks; whoever is done takes over what is left elsewhere, so a thread that lost its CPU delays only the chunk it
// holds. Bodies must not throw. Calls from several threads take turns.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  // Changes the number of threads (1 to 1024); waits for a running step.
  void resize(int threads);

  void begin();
  void end();
  // Runs body(begin, end, thread) over [0, items) in chunks of `chunk` items (0: half of what is left of a share) and
  // returns when all are done. What fits one chunk runs on the calling thread, without a barrier. Only between begin()
  // and end().
  template <class Body>
  void parallel(int items, int chunk, Body&& body) {
    using Type = std::remove_reference_t<Body>;
    run(
        items, chunk,
        [](void* self, int first, int last, int thread) { (*static_cast<Type*>(self))(first, last, thread); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Function = void (*)(void* argument, int begin, int end, int thread);
  void run(int items, int chunk, Function function, void* argument);
  struct State;
  std::unique_ptr<State> state_;
};

// A step that ends with its scope.
class Step {
 public:
  explicit Step(ThreadPool& pool) : pool_(pool) { pool_.begin(); }
  ~Step() { pool_.end(); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

 private:
  ThreadPool& pool_;
};

// A step over one loop: for loading and packing.
template <class Body>
void parallel_for(ThreadPool& pool, int items, int chunk, Body&& body) {
  const Step step(pool);
  pool.parallel(items, chunk, body);
}

}  // namespace thinfer
