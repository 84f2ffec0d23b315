#include "program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "kv_cache.h"

namespace thinfer {

// What one thread owns. On its own cache lines, so counting does not disturb the neighbours.
struct alignas(64) Program::PerThread {
  Pages scratch;
  std::vector<Counters> counters;
};

Program::Program(Isa isa, std::shared_ptr<ThreadPool> pool, int max_rows)
    : isa_(isa), pool_(std::move(pool)), max_rows_(max_rows) {
  if (max_rows < 1 || max_rows > (1 << 20)) throw std::invalid_argument("max_rows must be between 1 and 1048576");
}

Program::~Program() = default;

int Program::add_buffer(int width) {
  if (width < 1) throw std::invalid_argument("a buffer needs a width of at least 1");
  storage_.emplace_back(static_cast<size_t>(max_rows_) * static_cast<size_t>(padded(width)) * sizeof(float));
  pointers_.push_back(reinterpret_cast<float*>(storage_.back().data()));
  widths_.push_back(width);
  selected_.push_back(0);
  return buffers() - 1;
}

int Program::add(std::unique_ptr<Op> op, const std::vector<int>& inputs, int output) {
  for (const int buffer : inputs) {
    if (selected_.at(static_cast<size_t>(buffer))) op->selected_ = true;
  }
  selected_.at(static_cast<size_t>(output)) = op->selected_ || op->selects();
  scratch_bytes_ = std::max(scratch_bytes_, op->scratch_bytes(max_rows_));
  ops_.push_back(std::move(op));
  return ops() - 1;
}

void Program::run(int first, int last, const Batch& given) {
  using Clock = std::chrono::steady_clock;
  const Step step(*pool_);
  Batch batch = given;
  batch.step = ++steps_;
  const bool any_sparse = batch.any_sparse();
  while (threads_.size() < static_cast<size_t>(pool_->threads())) threads_.push_back(std::make_unique<PerThread>());
  for (const auto& thread : threads_) {
    if (thread->scratch.size() < scratch_bytes_) thread->scratch = Pages(scratch_bytes_);
    thread->counters.resize(ops_.size());
  }
  for (int index = first; index < last; ++index) {
    const auto at = static_cast<size_t>(index);
    Op& op = *ops_[at];
    if (op.sparse_only_ && !any_sparse) continue;
    const Clock::time_point start = profiling_ ? Clock::now() : Clock::time_point();
    op.prepare(batch);
    for (int phase = 0; phase < op.phases(); ++phase) {
      const int items = op.items(phase, batch);
      pool_->parallel(items, op.chunk(phase, batch), [&](int begin, int end, int thread) {
        PerThread& own = *threads_[static_cast<size_t>(thread)];
        Context context{batch, pointers_.data(), kv_.get(), &own.counters[at], own.scratch.data()};
        op.run(phase, begin, end, thread, context);
      });
    }
    Counters& counters = threads_.front()->counters[at];
    ++counters.calls;
    if (profiling_) {
      const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
      counters.nanoseconds += static_cast<uint64_t>(spent.count());
    }
  }
}

std::vector<Counters> Program::take_counters() {
  std::vector<Counters> sums(ops_.size());
  for (const auto& thread : threads_) {
    for (size_t i = 0; i < thread->counters.size(); ++i) {
      Counters& from = thread->counters[i];
      sums[i].bytes_read += from.bytes_read;
      sums[i].channels_active += from.channels_active;
      sums[i].channels_total += from.channels_total;
      sums[i].needed += from.needed;
      sums[i].found += from.found;
      sums[i].nanoseconds += from.nanoseconds;
      sums[i].calls += from.calls;
      from = Counters();
    }
  }
  return sums;
}

}  // namespace thinfer
