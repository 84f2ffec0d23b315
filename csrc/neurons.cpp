#include "neurons.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace thinfer {
namespace {

constexpr int kWord = 64;

template <class T>
void grow(std::vector<T>& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

int tiles(int count) { return (count + kTile - 1) / kTile; }

uint64_t count_bits(const uint64_t* bits, int words) {
  uint64_t count = 0;
  for (int w = 0; w < words; ++w) count += static_cast<uint64_t>(__builtin_popcountll(bits[w]));
  return count;
}

// Appends the ascending ids of the bits set.
void append_bits(const uint64_t* bits, int words, std::vector<int32_t>& ids) {
  const size_t before = ids.size();
  ids.resize(before + count_bits(bits, words));
  int32_t* to = ids.data() + before;
  for (int w = 0; w < words; ++w) {
    for (uint64_t rest = bits[w]; rest != 0; rest &= rest - 1) *to++ = w * kWord + __builtin_ctzll(rest);
  }
}

}  // namespace

NeuronsOp::NeuronsOp(Isa isa, NeuronParts parts, int out, Act act, Activations activations,
                     std::shared_ptr<LinearStorage> linear, std::shared_ptr<NeuronStorage> storage)
    : linear_(linear_kernels(isa)),
      kernels_(neuron_kernels(isa)),
      ops_(op_kernels(isa)),
      parts_(std::move(parts)),
      out_(out),
      act_(act),
      shared_(std::move(linear)),
      storage_(std::move(storage)) {
  if (!parts_.gate && !parts_.up) throw std::invalid_argument("a neurons op needs a matrix");
  if ((parts_.gate != nullptr) == (parts_.gate_buffer >= 0)) {
    throw std::invalid_argument("the gate is either a buffer or a matrix");
  }
  const Matrix& first = (parts_.gate ? parts_.gate : parts_.up)->matrix();
  inputs_ = first.inputs;
  neurons_ = first.outputs;
  floats_ = activations == Activations::f32;
  for (const auto* matrix : {parts_.gate.get(), parts_.up.get()}) {
    if (!matrix) continue;
    const Matrix& w = matrix->matrix();
    if (w.layout == Layout::columns) throw std::invalid_argument("matrices of a neurons op must be in the neurons layout or in rows");
    if (w.inputs != inputs_ || w.outputs != neurons_) throw std::invalid_argument("gate and up must have the same shape");
    floats_ = floats_ || is_float(w.codec);
  }
  for (int id = static_cast<int>(storage_->all.size()); id < neurons_; ++id) storage_->all.push_back(id);
  for (const auto* bias : {&parts_.gate_bias, &parts_.up_bias}) {
    if (!bias->empty() && static_cast<int>(bias->size()) != neurons_) throw std::invalid_argument("bias needs one float a neuron");
  }
}

void NeuronsOp::check_lists(uint64_t every, uint64_t turn) {
  if (!parts_.gate || !parts_.lists) throw std::invalid_argument("only a neurons op with lists and a gate of its own can check them");
  check_every_ = every;
  check_turn_ = turn;
}

QuantizedRows NeuronsOp::quantized(int rows) const {
  LinearStorage& s = *shared_;
  return {rows, rows, s.q.data(), s.scale.data(), s.bias.data(), s.sums.data()};
}

bool NeuronsOp::wants(int row, int neuron) const {
  return (storage_->wanted[static_cast<size_t>(row * words() + neuron / kWord)] >> (neuron % kWord) & 1) != 0;
}

// Whether what fires in the row is counted in a checked step: in the others a predictor lists everything.
bool NeuronsOp::counts(int row, const Batch& batch) const {
  return checked_ && batch.sparse[selected() ? batch.out_rows[row] : row] != 0;
}

float* NeuronsOp::gate_row(int row, Context& context) const {
  float* rows = parts_.gate ? storage_->gate.data() : context.buffers[parts_.gate_buffer];
  return rows + static_cast<ptrdiff_t>(row) * padded(neurons_);
}

// Lists ascend from 0 or above: their makers see to that.
void NeuronsOp::check_range(int rows) const {
  const NeuronLists& lists = *parts_.lists;
  if (lists.rows() != rows) {
    throw std::invalid_argument("neurons are listed for " + std::to_string(lists.rows()) + " rows, the batch has " + std::to_string(rows));
  }
  for (size_t row = 0; row + 1 < lists.offsets.size(); ++row) {
    const int32_t end = lists.offsets[row + 1];
    if (end == lists.offsets[row]) continue;
    const int32_t last = lists.ids[static_cast<size_t>(end - 1)];
    if (last >= neurons_) throw std::invalid_argument("neuron " + std::to_string(last) + " of " + std::to_string(neurons_));
  }
}

// Each row's list as bits.
void NeuronsOp::list_wanted(int rows) {
  const NeuronLists& lists = *parts_.lists;
  std::vector<uint64_t>& bits = storage_->wanted;
  bits.assign(static_cast<size_t>(rows * words()), 0);
  for (int row = 0; row < rows; ++row) {
    uint64_t* own = bits.data() + static_cast<ptrdiff_t>(row) * words();
    const int32_t *id = lists.ids.data() + lists.offsets[static_cast<size_t>(row)], *end = lists.ids.data() + lists.offsets[static_cast<size_t>(row) + 1];
    while (id != end) {
      const int32_t word = *id / kWord;
      uint64_t found = 0;
      for (; id != end && *id / kWord == word; ++id) found |= uint64_t{1} << (*id % kWord);
      own[word] = found;
    }
  }
}

// The neurons whose gates are computed: all of them, or those in any row's list.
void NeuronsOp::choose_gates(int rows) {
  NeuronStorage& s = *storage_;
  if (!listed() || checked_ || in_rows(parts_.gate)) {
    gate_ids_ = s.all.data();
    gate_count_ = neurons_;
    return;
  }
  if (rows != 1) {
    s.listed.clear();
    append_bits(any_row(s.wanted, rows).data(), words(), s.listed);
  }
  const std::vector<int32_t>& ids = rows == 1 ? parts_.lists->ids : s.listed;
  gate_ids_ = ids.data();
  gate_count_ = static_cast<int>(ids.size());
}

// The union of the rows' bits.
std::vector<uint64_t> NeuronsOp::any_row(const std::vector<uint64_t>& bits, int rows) const {
  std::vector<uint64_t> any(static_cast<size_t>(words()), 0);
  for (int row = 0; row < rows; ++row) {
    const uint64_t* own = bits.data() + static_cast<ptrdiff_t>(row) * words();
    for (int w = 0; w < words(); ++w) any[static_cast<size_t>(w)] |= own[w];
  }
  return any;
}

void NeuronsOp::prepare(const Batch& batch) {
  const int n = rows(batch);
  const size_t rows = static_cast<size_t>(n), groups = static_cast<size_t>((inputs_ + kGroup - 1) / kGroup);
  NeuronStorage& s = *storage_;
  if (floats_) {
    if (threshold_.value >= 0.0f) grow(shared_->masked, rows * static_cast<size_t>(padded(inputs_)));
  } else {
    grow(shared_->q, rows * groups * kGroup);
    grow(shared_->scale, rows * groups);
    grow(shared_->bias, rows * groups);
    grow(shared_->sums, 2 * rows * groups);
    const size_t whole = (groups + kSuper - 1) / kSuper * kSuper;
    grow(s.q, whole * kGroup);
    grow(s.scale, whole);
    grow(s.bias, whole);
    grow(s.sums, 3 * whole);
  }
  checked_ = listed() && check_every_ > 0 && batch.step % check_every_ == check_turn_ && batch.any_sparse();
  if (checked_) grow(s.fired, rows * static_cast<size_t>(words()));
  if (listed()) check_range(n);
  if (listed() && (n != 1 || beyond_lists())) list_wanted(n);
  if (parts_.gate) {
    if (in_rows(parts_.gate)) {
      grow(s.gate, rows * static_cast<size_t>(padded(neurons_)));
    } else {
      s.gate.assign(rows * static_cast<size_t>(padded(neurons_)), 0.0f);
    }
    grow(s.values, rows * static_cast<size_t>(padded(neurons_)));
    choose_gates(n);
  }
  grow(s.active, rows * static_cast<size_t>(words()));
  if (parts_.up) grow(s.values, rows * static_cast<size_t>(padded(neurons_)));
}

int NeuronsOp::items(int phase, const Batch& batch) const {
  const int n = rows(batch);
  if (n == 0) return 0;
  switch (phase) {
    case 0: return floats_ && threshold_.value < 0.0f ? 0 : n * pieces(inputs_);
    case 1: return parts_.gate ? tiles(gate_count_) : 0;
    case 2: return n * pieces(neurons_);
    case 3: return 1;
    default: return parts_.up ? tiles(up_ids().count) : 0;
  }
}

size_t NeuronsOp::scratch_bytes(int max_rows) const {
  return std::max(linear_scratch_bytes(max_rows), kPiece * sizeof(float));
}

void NeuronsOp::run(int phase, int begin, int end, int, Context& context) {
  switch (phase) {
    case 0:
      for (int item = begin; item < end; ++item) prepare_piece(item / pieces(inputs_), item % pieces(inputs_), context);
      break;
    case 1: run_gate(begin, end, context); break;
    case 2:
      for (int item = begin; item < end; ++item) activate(item / pieces(neurons_), item % pieces(neurons_), context);
      break;
    case 3: collect(context); break;
    default: run_up(begin, end, context);
  }
}

// A piece of a row of x, ready for the kernels.
void NeuronsOp::prepare_piece(int row, int piece, Context& context) {
  const int from = piece * kPiece, count = std::min(kPiece, inputs_ - from);
  const ptrdiff_t at = static_cast<ptrdiff_t>(row) * padded(inputs_);
  const bool sparse = threshold_.applies(context.batch, selected() ? context.batch.out_rows[row] : row);
  const int n = rows(context.batch);
  float* masked = floats_ ? shared_->masked.data() + at : nullptr;
  prepare_inputs(linear_, threshold_, sparse, context.buffers[parts_.x] + at, from, count, masked, quantized(n), row);
  const bool arranged = (parts_.gate && !in_rows(parts_.gate)) || (parts_.up && !in_rows(parts_.up));
  if (!floats_ && n == 1 && arranged) arrange(from / kGroup, (from + count) / kGroup);
}

// Groups [begin, end) of the single row of a step in the order of the neurons layout; groups past the last one are 0.
void NeuronsOp::arrange(int begin, int end) {
  NeuronStorage& s = *storage_;
  const QuantizedRows x = quantized(1);
  const int groups = inputs_ / kGroup, whole = (groups + kSuper - 1) / kSuper * kSuper;
  for (int g = begin; g < (end == groups ? whole : end); ++g) {
    int8_t* to = s.q.data() + static_cast<ptrdiff_t>(g / kSuper) * kSuper * kGroup + 4 * (g % kSuper);
    const size_t at = static_cast<size_t>(g);
    const bool real = g < groups;
    for (int v = 0; v < 8; ++v) {
      uint32_t quad = 0;
      if (real) std::memcpy(&quad, x.q + kGroup * g + 4 * v, sizeof quad);
      std::memcpy(to + 32 * v, &quad, sizeof quad);
    }
    s.scale[at] = real ? x.scale[g] : 0.0f;
    s.bias[at] = real ? x.bias[g] : 0.0f;
    const int32_t first = real ? x.sums[2 * g] : 0, second = real ? x.sums[2 * g + 1] : 0;
    s.sums[at] = first + second;
    s.sums[at + static_cast<size_t>(whole)] = first;
    s.sums[at + 2 * static_cast<size_t>(whole)] = second;
  }
}

// y[row][i] = row ids[i] of the matrix times x, for ids [begin, end) of all. In rows these are all neurons, in order.
void NeuronsOp::compute(const PackedMatrix& matrix, const RowIds& all, int begin, int end, float* y, Context& context) {
  const Matrix& w = matrix.matrix();
  const int n = rows(context.batch), ldy = padded(neurons_);
  const float* x = threshold_.value >= 0.0f ? shared_->masked.data() : context.buffers[parts_.x];
  if (w.layout == Layout::rows) {
    const int first = begin / kTile, last = tiles(end);
    if (floats_) {
      linear_.float_linear(w, x, n, padded(inputs_), y, ldy, first, last, false, context.scratch);
    } else if (n == 1) {
      linear_.rows_gemv(w, quantized(n), y, first, last);
    } else {
      linear_.rows_gemm(w, quantized(n), y, ldy, first, last, context.scratch);
    }
    context.counters->bytes_read += w.tile_bytes() * static_cast<size_t>(last - first);
    return;
  }
  const RowIds some{all.ids + begin, end - begin, all.count - end};
  if (floats_) {
    kernels_.float_gemm(w, x, n, padded(inputs_), some, y + begin, ldy, context.scratch);
  } else if (n == 1) {
    const NeuronStorage& s = *storage_;
    const int whole = (inputs_ / kGroup + kSuper - 1) / kSuper * kSuper;
    const NeuronInput input{s.q.data(), s.scale.data(), s.bias.data(), s.sums.data(), whole};
    kernels_.gemv(w, input, some, y + begin, context.scratch);
  } else {
    kernels_.gemm(w, quantized(n), some, y + begin, ldy, context.scratch);
  }
  context.counters->bytes_read += w.row_bytes() * static_cast<size_t>(end - begin);
}

void NeuronsOp::run_gate(int begin, int end, Context& context) {
  const int first = begin * kTile, last = std::min(end * kTile, gate_count_), n = rows(context.batch);
  const bool whole = in_rows(parts_.gate);
  compute(*parts_.gate, {gate_ids_, gate_count_}, first, last, whole ? storage_->gate.data() : storage_->values.data(), context);
  const bool all = !listed() || checked_ || n == 1;  // what was computed is the row's own, or kept for the check
  for (int row = 0; row < n; ++row) {
    float* gate = gate_row(row, context);
    if (whole) {
      for (int i = first; i < last && !parts_.gate_bias.empty(); ++i) gate[i] += parts_.gate_bias[static_cast<size_t>(i)];
      continue;
    }
    const float* values = storage_->values.data() + static_cast<ptrdiff_t>(row) * padded(neurons_);
    for (int i = first; i < last; ++i) {
      const int id = gate_ids_[i];
      if (!all && !wants(row, id)) continue;
      gate[id] = values[i] + (parts_.gate_bias.empty() ? 0.0f : parts_.gate_bias[static_cast<size_t>(id)]);
    }
  }
}

// The piece's part of a row: which neurons are active, and zeros in the output (or all of it where there is no up).
void NeuronsOp::activate(int row, int piece, Context& context) {
  const int from = piece * kPiece, count = std::min(kPiece, neurons_ - from);
  const float* gate = gate_row(row, context) + from;
  float* out = context.buffers[out_] + static_cast<ptrdiff_t>(row) * padded(neurons_) + from;
  float* activated = parts_.up ? reinterpret_cast<float*>(context.scratch) : out;
  // Of dReLU the gate alone decides here; up is cut when it is known.
  const Activation own = act_.activation == Activation::drelu ? Activation::relu : act_.activation;
  ops_.act(gate, activated, count, own, act_.threshold);
  uint64_t* bits = active(row) + from / kWord;
  uint16_t found[kPiece / 16] = {};
  kernels_.find_above(activated, count, 0.0f, true, found);
  const int words = (count + kWord - 1) / kWord;
  std::memcpy(bits, found, static_cast<size_t>(words) * sizeof(uint64_t));
  if (beyond_lists()) {
    if (checked_) std::memcpy(fired(row) + from / kWord, bits, static_cast<size_t>(words) * sizeof(uint64_t));
    // A neuron that is not listed is 0 whatever the activation makes of its gate.
    const uint64_t* wanted = storage_->wanted.data() + static_cast<ptrdiff_t>(row) * this->words() + from / kWord;
    for (int w = 0; w < words; ++w) bits[w] &= wanted[w];
    if (!parts_.up && counts(row, context.batch)) {
      context.counters->needed += count_bits(fired(row) + from / kWord, words);
      context.counters->found += count_bits(bits, words);
    }
    for (int w = 0; w < words && !parts_.up; ++w) {
      for (uint64_t rest = ~wanted[w]; rest != 0; rest &= rest - 1) {
        const int j = w * kWord + __builtin_ctzll(rest);
        if (j < count) out[j] = 0.0f;
      }
    }
  }
  if (parts_.up) std::memset(out, 0, static_cast<size_t>(count) * sizeof(float));
}

// The union of the rows' sets, and what they count.
void NeuronsOp::collect(Context& context) {
  const int n = rows(context.batch);
  const auto own = static_cast<int64_t>(count_bits(storage_->active.data(), n * words()));
  int64_t gates = 0;
  if (parts_.gate) gates = listed() ? parts_.lists->offsets.back() : static_cast<int64_t>(neurons_) * n;
  // Counted as the input channels that as many weights would make in a dense matrix. What is computed for a check alone is
  // left out, as no token is made of it; bytes_read holds it.
  const int64_t computed = gates + (parts_.up ? own : 0), matrices = (parts_.gate ? 1 : 0) + (parts_.up ? 1 : 0);
  context.counters->channels_active += static_cast<uint64_t>(computed * inputs_ / neurons_);
  context.counters->channels_total += static_cast<uint64_t>(matrices * n) * static_cast<uint64_t>(inputs_);
  storage_->ids.clear();
  if (parts_.up && !in_rows(parts_.up)) {
    append_bits(any_row(checked_ ? storage_->fired : storage_->active, n).data(), words(), storage_->ids);
  }
}

void NeuronsOp::run_up(int begin, int end, Context& context) {
  const RowIds up = up_ids();
  const int32_t* ids = up.ids;
  const int first = begin * kTile, last = std::min(end * kTile, up.count);
  compute(*parts_.up, up, first, last, storage_->values.data(), context);
  for (int row = 0; row < rows(context.batch); ++row) {
    const float* gate = gate_row(row, context);
    const float* values = storage_->values.data() + static_cast<ptrdiff_t>(row) * padded(neurons_);
    const uint64_t* bits = active(row);
    const bool counted = counts(row, context.batch);
    float* out = context.buffers[out_] + static_cast<ptrdiff_t>(row) * padded(neurons_);
    for (int i = first; i < last; i += kTile) {
      const int count = std::min(kTile, last - i);
      float gates[kTile], ups[kTile], products[kTile];
      for (int j = 0; j < count; ++j) {
        const auto id = static_cast<size_t>(ids[i + j]);
        gates[j] = gate[id];
        ups[j] = values[i + j] + (parts_.up_bias.empty() ? 0.0f : parts_.up_bias[id]);
      }
      ops_.gated_act(gates, ups, products, count, act_.activation, act_.threshold);
      for (int j = 0; j < count; ++j) {
        const int id = ids[i + j];
        const bool own = (bits[id / kWord] >> (id % kWord) & 1) != 0;
        if (own) out[id] = products[j];
        // What the other rows' neurons would give is computed along, fired or not.
        if (counted && products[j] != 0.0f && (fired(row)[id / kWord] >> (id % kWord) & 1) != 0) {
          ++context.counters->needed;
          context.counters->found += own;
        }
      }
    }
  }
}

namespace {

class PickNeurons final : public Op {
 public:
  PickNeurons(const NeuronKernels& kernels, int scores, int neurons, float threshold, std::shared_ptr<NeuronLists> lists)
      : kernels_(kernels), scores_(scores), neurons_(neurons), threshold_(threshold), lists_(std::move(lists)) {}
  const char* name() const override { return "pick_neurons"; }
  // Room for the longest lists: phases may run on any thread, where nothing may throw.
  void prepare(const Batch& batch) override {
    const auto n = static_cast<size_t>(rows(batch)), words = static_cast<size_t>((neurons_ + kWord - 1) / kWord);
    lists_->ids.reserve(n * static_cast<size_t>(neurons_));
    lists_->offsets.reserve(n + 1);
    grow(bits_, words);
    grow(found_, 4 * words);
  }
  int items(int, const Batch&) const override { return 1; }
  void run(int, int, int, int, Context& context) override {
    const int words = (neurons_ + kWord - 1) / kWord;
    const Batch& batch = context.batch;
    lists_->given = batch.any_sparse();
    if (!lists_->given) return;
    std::fill(bits_.begin(), bits_.end(), 0);
    std::fill(found_.begin(), found_.end(), uint16_t{0});
    lists_->ids.clear();
    lists_->offsets.assign(1, 0);
    for (int row = 0; row < rows(batch); ++row) {
      if (batch.sparse[selected() ? batch.out_rows[row] : row] != 0) {
        const float* score = context.buffers[scores_] + static_cast<ptrdiff_t>(row) * padded(neurons_);
        kernels_.find_above(score, neurons_, threshold_, false, found_.data());
        std::memcpy(bits_.data(), found_.data(), bits_.size() * sizeof(uint64_t));
        append_bits(bits_.data(), words, lists_->ids);
      } else {
        for (int j = 0; j < neurons_; ++j) lists_->ids.push_back(j);
      }
      lists_->offsets.push_back(static_cast<int32_t>(lists_->ids.size()));
    }
  }

 private:
  const NeuronKernels& kernels_;
  int scores_;
  int neurons_;
  float threshold_;
  std::shared_ptr<NeuronLists> lists_;
  std::vector<uint64_t> bits_;
  std::vector<uint16_t> found_;
};

}  // namespace

std::unique_ptr<Op> make_pick_neurons(const NeuronKernels& kernels, int scores, int neurons, float threshold,
                                      std::shared_ptr<NeuronLists> lists) {
  return std::make_unique<PickNeurons>(kernels, scores, neurons, threshold, std::move(lists));
}

}  // namespace thinfer
