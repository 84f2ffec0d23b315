// What the files that know Python share. Nothing else in csrc includes this.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "batch_check.h"
#include "kv_cache.h"
#include "ops.h"
#include "program.h"

namespace thinfer {
struct LinearStorage;
struct NeuronStorage;
}

namespace thinfer::python {

namespace nb = nanobind;

template <typename T, int dimensions>
using In = nb::ndarray<const T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
template <typename T, int dimensions>
std::vector<T> copied(const nb::ndarray<const T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

using FloatArray = nb::ndarray<nb::numpy, float>;

// The cache and the lock that keeps it from growing under a step.
struct SharedCache {
  KvCache cache;
  std::mutex mutex;
  SharedCache(int layers, int kv_heads, int head_dim, bool half) : cache(layers, kv_heads, head_dim, half) {}
};

// A program and what is known of it for checking calls.
class CheckedProgram {
 public:
  CheckedProgram(const std::optional<std::string>& isa, std::shared_ptr<ThreadPool> pool, int max_rows,
                 std::shared_ptr<SharedCache> cache);

  Program& program() { return program_; }
  const OpKernels& kernels() const { return kernels_; }
  SharedCache* cache() { return cache_.get(); }

  int add_buffer(int width);
  void set_selected(int buffer, bool selected);
  void set_profiling(bool on);
  std::vector<Counters> take_counters();

  // Throws std::invalid_argument unless the id is a buffer's; returns its width.
  int width(int buffer) const;
  // ... and that the buffer is `width` wide.
  void expect_width(int buffer, int width, const char* role) const;
  // Adds under the program's lock.
  int add(std::unique_ptr<Op> op, const std::vector<int>& inputs, int output);
  int add_embed(std::shared_ptr<const RowSource> source, int out);
  int add_positions(std::shared_ptr<const RowSource> source, int x, int out, int offset);
  int add_attention(int x, int out, Heads heads, int layer, float scale, int window, std::vector<float> slopes,
                    std::shared_ptr<NeuronLists> lists);
  void set_sparse_only(int op);
  std::shared_ptr<RopeTable> rope_table(std::vector<float> inv_freq, float attention_factor);

  // What the linear ops share; null until the first one.
  std::shared_ptr<LinearStorage>& linear_storage() { return linear_storage_; }
  std::shared_ptr<NeuronStorage>& neuron_storage() { return neuron_storage_; }
  // Of linear ops that run beside others; chains run one after another.
  std::shared_ptr<LinearStorage>& beside_storage() { return beside_storage_; }
  // Changes an op while no step runs.
  template <class Change>
  void exclusive(Change&& change) {
    const std::lock_guard lock(mutex_);
    change();
  }

  // Checks the batch, then runs it without the GIL.
  void run(int first, int last, const OwnedBatch& batch);

 private:
  std::shared_ptr<SharedCache> cache_;
  Program program_;
  const OpKernels& kernels_;
  std::vector<std::shared_ptr<RopeTable>> ropes_;
  std::shared_ptr<LinearStorage> linear_storage_;
  std::shared_ptr<NeuronStorage> neuron_storage_;
  std::shared_ptr<LinearStorage> beside_storage_;
  int vocab_ = 0;
  int positions_ = 0;
  bool attends_ = false;
  int window_ = -1;  // -1: no attention op yet
  mutable std::mutex mutex_;
};

// Keys and values of one layer of a block as float32 [kBlock, kv_heads, head_dim]; indices are checked, the lock taken.
void read_block(SharedCache& shared, int layer, int block, float* keys, float* values);
void write_block(SharedCache& shared, int layer, int block, const float* keys, const float* values);
// Whether the named KV type, "f16" or "f32", is f16.
bool parse_kv_type(const std::string& type);

// Throws std::invalid_argument for a name that is no activation's.
Activation parse_activation(const std::string& name);

void bind_program(nb::module_& module);
// Program.op_*.
void bind_program_ops(nb::class_<CheckedProgram>& program);
// The ops as functions of arrays.
void bind_ops(nb::module_& module);
// Packed weights, and Program.op_linear.
void bind_linear(nb::module_& module, nb::class_<CheckedProgram>& program);
// Softmax: draws from distributions over the vocabulary.
void bind_sampling(nb::module_& module);
// Lists of neurons, Program.op_neurons and op_pick_neurons.
void bind_neurons(nb::module_& module, nb::class_<CheckedProgram>& program);

}  // namespace thinfer::python
