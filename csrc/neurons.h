// FFN neurons that do not fire: out = act(gate x) * (up x), computed for some neurons only.
//
// Which are active follows from a list that somebody gave, or from act(gate x) not being 0, or from both. Of
// `up` in the neurons layout only the rows that belong to active neurons are read. A row of a batch keeps its own set; the weights of the union are read once.
#pragma once

#include <memory>
#include <vector>

#include "linear.h"
#include "neuron_kernels.h"
#include "neuron_lists.h"
#include "ops.h"

namespace thinfer {

// Storage that the neurons ops of one program share, as they run one after another.
struct NeuronStorage {
  std::vector<int8_t> q;         // NeuronInput
  std::vector<float> scale, bias;
  std::vector<int32_t> sums;
  std::vector<float> gate;       // [rows][padded neurons], where the op computes it
  std::vector<float> values;     // of the rows of a matrix: [rows][padded count]
  std::vector<uint64_t> wanted;  // [rows][words] bit of a neuron: in the row's list; unless a single row's is all that is computed
  std::vector<uint64_t> active;  // [rows][words] and its activation is not 0
  std::vector<uint64_t> fired;   // [rows][words] its activation is not 0, listed or not; in checked steps
  std::vector<int32_t> ids;      // of the union of `active`, or of `fired` in checked steps
  std::vector<int32_t> all;      // 0, 1, ... for all neurons
  std::vector<int32_t> listed;   // of the union of lists
};

// What an op computes from. Matrices are in the neurons layout, or in rows where most neurons are active: all of them are read
// then, and what is not active is 0 all the same.
struct NeuronParts {
  int x = -1;
  int gate_buffer = -1;                      // gate x, computed before; or
  std::shared_ptr<const PackedMatrix> gate;  // computed here: in the neurons layout for those listed, if there are lists
  std::shared_ptr<const PackedMatrix> up;    // null: out = act(gate x)
  std::vector<float> gate_bias, up_bias;     // empty, or one float a neuron
  std::shared_ptr<NeuronLists> lists;        // null: none is ever given
};

class NeuronsOp : public Op {
 public:
  // Throws std::invalid_argument on sizes and layouts.
  NeuronsOp(Isa isa, NeuronParts parts, int out, Act act, Activations activations,
            std::shared_ptr<LinearStorage> linear, std::shared_ptr<NeuronStorage> storage);

  // As for the linear op of the same site: channels of x that count as 0.
  void set_threshold(Threshold threshold) { threshold_ = std::move(threshold).padded_to(inputs_); }
  // In steps whose number is `turn` modulo `every` (0: never) every neuron is computed, and of those of sparse rows whose
  // output is not 0 it is counted how many were listed. What was not listed stays 0 in the output. Throws
  // std::invalid_argument where the op computes no gate for lists.
  void check_lists(uint64_t every, uint64_t turn);
  int inputs() const { return inputs_; }
  int neurons() const { return neurons_; }

  const char* name() const override { return "neurons"; }
  void prepare(const Batch& batch) override;
  int phases() const override { return 5; }
  int items(int phase, const Batch& batch) const override;
  void run(int phase, int begin, int end, int thread, Context& context) override;
  size_t scratch_bytes(int max_rows) const override;

 private:
  int words() const { return (neurons_ + 63) / 64; }
  bool listed() const { return parts_.lists && parts_.lists->given; }
  uint64_t* active(int row) const { return storage_->active.data() + static_cast<ptrdiff_t>(row) * words(); }
  uint64_t* fired(int row) const { return storage_->fired.data() + static_cast<ptrdiff_t>(row) * words(); }
  // Whether gates of neurons outside the lists are known. Elsewhere they are 0, of which every activation makes 0.
  bool beyond_lists() const { return listed() && (checked_ || !parts_.gate || in_rows(parts_.gate)); }
  // Whether a matrix is read whole, whatever is active.
  static bool in_rows(const std::shared_ptr<const PackedMatrix>& matrix) { return matrix && matrix->matrix().layout == Layout::rows; }
  // The neurons for which up is computed.
  RowIds up_ids() const {
    if (in_rows(parts_.up)) return {storage_->all.data(), neurons_};
    return {storage_->ids.data(), static_cast<int>(storage_->ids.size())};
  }
  bool wants(int row, int neuron) const;
  bool counts(int row, const Batch& batch) const;
  float* gate_row(int row, Context& context) const;
  void check_range(int rows) const;
  void list_wanted(int rows);
  void choose_gates(int rows);
  std::vector<uint64_t> any_row(const std::vector<uint64_t>& bits, int rows) const;
  void prepare_piece(int row, int piece, Context& context);
  void arrange(int begin, int end);
  void compute(const PackedMatrix& matrix, const RowIds& all, int begin, int end, float* y, Context& context);
  void run_gate(int begin, int end, Context& context);
  void activate(int row, int piece, Context& context);
  void collect(Context& context);
  void run_up(int begin, int end, Context& context);
  QuantizedRows quantized(int rows) const;

  const LinearKernels& linear_;
  const NeuronKernels& kernels_;
  const OpKernels& ops_;
  NeuronParts parts_;
  int out_;
  Act act_;
  Threshold threshold_;
  std::shared_ptr<LinearStorage> shared_;
  std::shared_ptr<NeuronStorage> storage_;
  int inputs_ = 0, neurons_ = 0;
  bool floats_ = false;
  uint64_t check_every_ = 0, check_turn_ = 0;
  bool checked_ = false;  // this step, as the next two
  const int32_t* gate_ids_ = nullptr;
  int gate_count_ = 0;
};

// The end of a predictor: fills `lists` with the neurons (or heads) whose score [rows, neurons] is above the threshold (NaN
// is), in rows that the batch marks as sparse; the others get all. Nothing is listed when no row is sparse.
std::unique_ptr<Op> make_pick_neurons(const NeuronKernels& kernels, int scores, int neurons, float threshold,
                                      std::shared_ptr<NeuronLists> lists);

}  // namespace thinfer
