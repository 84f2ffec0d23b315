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

void Program::set_beside(int first, int last, int until) {
  const auto behind = chain_from(first);
  const bool free = (behind == chains_.begin() || (behind - 1)->last <= first) &&
                    (behind == chains_.end() || last <= behind->first);
  if (first < 0 || first >= last || last > until || until >= ops() || !free) {
    throw std::invalid_argument("a chain is some ops that belong to no other, in front of the op that waits for them");
  }
  chains_.insert(behind, {first, last, until});
}

std::vector<Program::Chain>::const_iterator Program::chain_from(int first) const {
  return std::lower_bound(chains_.begin(), chains_.end(), first, [](const Chain& c, int op) { return c.first < op; });
}

// One step: its ops in order, and the chains that were reached and are not done, one after another.
class Program::Running {
 public:
  Running(Program& program, const Batch& batch) : program_(program), batch_(batch), any_sparse_(batch.any_sparse()) {}

  bool skips(int index) const { return program_.op(index).sparse_only_ && !any_sparse_; }

  void run_op(int index) {
    const Clock::time_point start = now();
    Op& op = program_.op(index);
    op.prepare(batch_);
    for (int phase = 0; phase < op.phases(); ++phase) {
      const int items = op.items(phase, batch_);
      if (items == 0) continue;
      // A loop of one item needs no barrier, and the idle threads' time is less than what one costs. Where an op says how many
      // items a thread takes at once, that need not do for the others.
      const bool join = beside_.items > 0 && items > 1 && op.chunk(phase, batch_) == 0;
      loop({index, phase, items}, join ? beside_ : Phase{});
      if (join) advance();
    }
    program_.add_call(index);
    program_.add_time(index, now() - start);
  }

  void begin(const Chain& chain) {
    waiting_.push_back(chain);
    if (beside_.items == 0) enter(chain.first);
  }

  // Ends the chains that are done when this op begins.
  void end_chains(int index) {
    while (std::any_of(waiting_.begin(), waiting_.end(), [&](const Chain& chain) { return chain.until <= index; })) {
      const Clock::time_point start = now();
      const int op = beside_.op;
      loop(beside_, {});
      advance();
      program_.add_time(op, now() - start);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Phase {
    int op = 0, phase = 0, items = 0;
  };

  Clock::time_point now() const { return program_.profiling_ ? Clock::now() : Clock::time_point(); }

  // Both phases in one loop, `first` before `second`.
  void loop(const Phase& first, const Phase& second) {
    const int chunk = second.items > 0 ? 0 : program_.op(first.op).chunk(first.phase, batch_);
    program_.pool_->parallel(first.items + second.items, chunk, [&](int begin, int end, int thread) {
      if (begin < first.items) run_items(first, begin, std::min(end, first.items), thread);
      if (end > first.items) run_items(second, std::max(begin - first.items, 0), end - first.items, thread);
    });
  }

  void run_items(const Phase& phase, int begin, int end, int thread) {
    PerThread& own = *program_.threads_[static_cast<size_t>(thread)];
    Context context{batch_, program_.pointers_.data(), program_.kv_.get(), &own.counters[static_cast<size_t>(phase.op)],
                    own.scratch.data()};
    program_.op(phase.op).run(phase.phase, begin, end, thread, context);
  }

  // The chain's first phase from this op on that has items, or the next chain's.
  void enter(int index) {
    for (; index < waiting_.front().last; ++index) {
      if (skips(index)) continue;
      program_.op(index).prepare(batch_);
      program_.add_call(index);
      if (enter_phase(index, 0)) return;
    }
    waiting_.erase(waiting_.begin());
    beside_ = {};
    if (!waiting_.empty()) enter(waiting_.front().first);
  }
  bool enter_phase(int index, int phase) {
    const Op& op = program_.op(index);
    for (; phase < op.phases(); ++phase) {
      beside_ = {index, phase, op.items(phase, batch_)};
      if (beside_.items > 0) return true;
    }
    return false;
  }
  void advance() {
    const Phase done = beside_;
    if (!enter_phase(done.op, done.phase + 1)) enter(done.op + 1);
  }

  Program& program_;
  const Batch& batch_;
  const bool any_sparse_;
  std::vector<Chain> waiting_;  // the first of them is being run
  Phase beside_;                // its next phase; no items: nothing waits
};

void Program::run(int first, int last, const Batch& given) {
  const Step step(*pool_);
  Batch batch = given;
  batch.step = ++steps_;
  while (threads_.size() < static_cast<size_t>(pool_->threads())) threads_.push_back(std::make_unique<PerThread>());
  for (const auto& thread : threads_) {
    if (thread->scratch.size() < scratch_bytes_) thread->scratch = Pages(scratch_bytes_);
    thread->counters.resize(ops_.size());
  }
  Running running(*this, batch);
  auto chain = chain_from(first);
  for (int index = first; index < last; ++index) {
    const bool reached = chain != chains_.end() && chain->first == index;
    if (reached && chain->until < last) {
      running.begin(*chain);
      index = chain->last - 1;
    } else {
      // A chain whose `until` lies past this run is run in order, after those that it shares storage with.
      running.end_chains(reached ? last : index);
      if (!running.skips(index)) running.run_op(index);
    }
    if (reached) ++chain;
  }
}

void Program::add_call(int index) { ++threads_.front()->counters[static_cast<size_t>(index)].calls; }

void Program::add_time(int index, std::chrono::nanoseconds spent) {
  threads_.front()->counters[static_cast<size_t>(index)].nanoseconds += static_cast<uint64_t>(spent.count());
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
