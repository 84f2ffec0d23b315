// The linear op: y = W x + b over packed matrices that share an input.
#pragma once

#include <memory>
#include <vector>

#include "linear_kernels.h"
#include "pack.h"
#include "program.h"
#include "union_kernels.h"

namespace thinfer {

// Where no weights are read, a row is cut into items of so many inputs or outputs: a single long row keeps all threads busy.
constexpr int kPiece = 2048;
inline int pieces(int width) { return (width + kPiece - 1) / kPiece; }

// Storage that the linear ops of one program share, as they run one after another; those that run beside them share another.
struct LinearStorage {
  std::vector<int8_t> q;
  std::vector<float> scale, bias, masked, partial;
  std::vector<int32_t> sums;
  std::vector<uint8_t> quads, channel;
  std::vector<int8_t> active_q;
};

enum class Activations : uint8_t { int8, f32 };

// Input channels with |x| * channel_scale <= threshold count as 0 in the rows that the batch marks as sparse.
struct Threshold {
  float value = -1.0f;               // below 0: none
  std::vector<float> channel_scale;  // empty: 1

  const float* scales() const { return channel_scale.empty() ? nullptr : channel_scale.data(); }
  bool applies(const Batch& batch, int row) const { return value >= 0.0f && batch.sparse[row] != 0; }
  // As kernels read it, in whole vectors. Throws std::invalid_argument unless there is one scale an input, or none.
  Threshold padded_to(int inputs) &&;
};

// Inputs [from, from + count) of row `row` of a step as kernels read them: those of `x`, the whole row, masked where it is
// sparse, as floats to the same places of `masked`, or where that is null quantised to `q`.
void prepare_inputs(const LinearKernels& kernels, const Threshold& threshold, bool sparse, const float* x, int from, int count,
                    float* masked, const QuantizedRows& q, int row);

class LinearOp : public Op {
 public:
  // Parts are matrices with the same inputs, stacked along the outputs in buffer `out`. bias: empty, or one float an
  // output. One matrix of a float codec makes the op take float32 activations. Throws std::invalid_argument on sizes.
  LinearOp(Isa isa, int in, int out, std::vector<std::shared_ptr<const PackedMatrix>> parts,
           std::vector<float> bias, Activations activations, std::shared_ptr<LinearStorage> storage);

  void set_threshold(Threshold threshold);
  // Storage that is not that of the ops this one runs beside.
  void use_storage(std::shared_ptr<LinearStorage> storage) { storage_ = std::move(storage); }
  int inputs() const { return inputs_; }
  int outputs() const { return outputs_; }

  const char* name() const override { return "linear"; }
  void prepare(const Batch& batch) override;
  int phases() const override { return 4; }
  int items(int phase, const Batch& batch) const override;
  int chunk(int phase, const Batch& batch) const override;
  void run(int phase, int begin, int end, int thread, Context& context) override;
  size_t scratch_bytes(int max_rows) const override;

 private:
  // One part and where its work and outputs lie.
  struct Part {
    std::shared_ptr<const PackedMatrix> matrix;
    int first_output = 0;
    int partial = 0;     // offset of its padded outputs in the staging rows
    bool staged = false; // its padding would run into the next part: computed aside and copied
  };

  bool is_sparse(const Batch& batch, int row) const;
  int part_items(const Part& part, const Batch& batch) const;
  bool staged(const Part& part, const Batch& batch) const;
  bool united(const Batch& batch) const;
  void prepare_piece(int row, int piece, Context& context);
  void run_part(const Part& part, int begin, int end, Context& context);
  void run_gemv(const Part& part, int begin, int end, float* y, Context& context);
  void count_channels(int64_t active, int64_t total, Context& context) const;
  void combine(int row, int piece, Context& context);
  QuantizedRows quantized(const Batch& batch) const;
  ActiveChannels active() const;
  UnionChannels channels() const;

  const LinearKernels& kernels_;
  const UnionKernels& unions_;
  int in_, out_;
  std::vector<Part> parts_;
  std::vector<float> bias_;
  Threshold threshold_;
  std::shared_ptr<LinearStorage> storage_;
  int inputs_ = 0, outputs_ = 0, staging_width_ = 0;
  bool floats_ = false;   // float32 activations
  bool columns_ = false;  // some part skips channels
  bool halves_ = false;   // some part has a scale per 16 inputs
};

}  // namespace thinfer
