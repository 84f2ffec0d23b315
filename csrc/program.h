// A program: the ops of a graph in order, over numbered float32 buffers, run in one call per step.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "memory.h"
#include "threads.h"

namespace thinfer {

class KvCache;

// The rows of one step. Row r is token tokens[r] at absolute position positions[r] of the sequence whose cache blocks
// are block_table[sequence[r] * max_blocks ...]. sparse[r] is 1 where activation thresholds apply. Logits are wanted
// for rows out_rows[0..n_out).
struct Batch {
  int rows = 0;
  const int32_t* tokens = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* sequence = nullptr;
  const uint8_t* sparse = nullptr;
  int n_out = 0;
  const int32_t* out_rows = nullptr;
  const int32_t* block_table = nullptr;
  int sequences = 0;
  int max_blocks = 0;
  uint64_t step = 0;  // set by Program::run: another one for each call

  bool any_sparse() const { return sparse != nullptr && std::find(sparse, sparse + rows, uint8_t{1}) != sparse + rows; }
};

// What one op did on one thread since the counters were last taken.
struct Counters {
  uint64_t bytes_read = 0;       // of weights or cached keys and values
  uint64_t channels_active = 0;  // input channels used, summed over rows
  uint64_t channels_total = 0;   // input channels there were, summed over rows
  uint64_t needed = 0;           // neurons that fired in the rows where a predictor was checked
  uint64_t found = 0;            // of them named by the predictor
  uint64_t nanoseconds = 0;      // filled while profiling; that of a loop shared by two ops counts for the one in turn
  uint64_t calls = 0;
};

struct Context {
  const Batch& batch;
  float* const* buffers;  // by buffer id; row stride is padded(width) floats
  KvCache* kv;
  Counters* counters;  // this op's, of this thread
  uint8_t* scratch;    // scratch_bytes() of this thread, aligned to 64 bytes, contents undefined
};

// Buffer rows start on 64-byte boundaries. The padding may be read and written by any op and holds no meaning.
inline int padded(int width) { return (width + 15) & ~15; }

// One node of the graph. A phase is a loop over items that may run in any order on any thread; each item writes its
// outputs wholly, in an order of operations that depends on neither the other rows nor the cut into items. Phases run
// one after another; a phase may share its loop with one of an op that runs beside (Program::set_beside). Otherwise a phase of
// one item or one chunk runs on the calling thread without a barrier.
class Op {
 public:
  virtual ~Op() = default;
  virtual const char* name() const = 0;
  // Called on one thread before the phases of each step: may size the op's own storage (not per-thread scratch).
  virtual void prepare(const Batch&) {}
  virtual int phases() const { return 1; }
  virtual int items(int phase, const Batch& batch) const = 0;
  // Items per chunk that a thread takes; 0 leaves it to the pool.
  virtual int chunk(int /*phase*/, const Batch& /*batch*/) const { return 0; }
  virtual void run(int phase, int begin, int end, int thread, Context& context) = 0;
  virtual size_t scratch_bytes(int /*max_rows*/) const { return 0; }
  // Whether the output holds only the rows of batch.out_rows whatever the input holds.
  virtual bool selects() const { return false; }

  // Rows this op works on: all of the batch, or after a select op only those whose logits are wanted.
  int rows(const Batch& batch) const { return selected_ ? batch.n_out : batch.rows; }
  bool selected() const { return selected_; }

 private:
  friend class Program;
  bool selected_ = false;
  bool sparse_only_ = false;
};

class Program {
 public:
  // Buffers have room for max_rows rows; resident memory grows with the rows used.
  Program(Isa isa, std::shared_ptr<ThreadPool> pool, int max_rows);
  ~Program();

  Isa isa() const { return isa_; }
  ThreadPool& pool() { return *pool_; }
  int max_rows() const { return max_rows_; }

  int add_buffer(int width);
  int buffers() const { return static_cast<int>(widths_.size()); }
  int width(int buffer) const { return widths_[static_cast<size_t>(buffer)]; }
  float* buffer(int id) { return pointers_[static_cast<size_t>(id)]; }

  void set_kv(std::shared_ptr<KvCache> kv) { kv_ = std::move(kv); }
  KvCache* kv() { return kv_.get(); }

  // Appends an op that reads `inputs` and writes `output` (buffer ids) and returns its index. It works on the selected
  // rows when an input holds selected rows.
  int add(std::unique_ptr<Op> op, const std::vector<int>& inputs, int output);
  // For a buffer written outside this program: says whether it holds only the rows of batch.out_rows.
  void set_selected(int buffer, bool selected) { selected_[static_cast<size_t>(buffer)] = selected; }
  bool selected(int buffer) const { return selected_[static_cast<size_t>(buffer)] != 0; }
  // The op runs only in steps that have a sparse row.
  void set_sparse_only(int index) { op(index).sparse_only_ = true; }
  // Ops [first, last) run beside those that follow them, a phase of theirs in one loop with a phase of the others, and are
  // done when op `until` begins: they need no barriers of their own, and threads that the others leave idle work for them.
  // Until then nothing may change what they read or use what they write, storage included. Throws std::invalid_argument
  // unless first < last <= until < ops() and no other chain has one of them.
  void set_beside(int first, int last, int until);
  int ops() const { return static_cast<int>(ops_.size()); }
  Op& op(int index) { return *ops_[static_cast<size_t>(index)]; }

  // Runs ops [first, last). The batch must be valid (bindings check it): rows <= max_rows, indices in range.
  void run(int first, int last, const Batch& batch);

  void set_profiling(bool on) { profiling_ = on; }
  // Per-op counters summed over threads; taking them resets them.
  std::vector<Counters> take_counters();

 private:
  struct PerThread;
  struct Chain {
    int first, last, until;
  };
  class Running;
  std::vector<Chain>::const_iterator chain_from(int first) const;  // the first that begins there or later
  void add_call(int op);
  void add_time(int op, std::chrono::nanoseconds spent);

  Isa isa_;
  std::shared_ptr<ThreadPool> pool_;
  int max_rows_;
  std::shared_ptr<KvCache> kv_;
  std::vector<int> widths_;
  std::vector<uint8_t> selected_;
  std::vector<Pages> storage_;
  std::vector<float*> pointers_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Chain> chains_;
  std::vector<std::unique_ptr<PerThread>> threads_;
  size_t scratch_bytes_ = 0;
  uint64_t steps_ = 0;
  bool profiling_ = false;
};

}  // namespace thinfer
