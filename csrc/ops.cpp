#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "row_op.h"

namespace thinfer {

namespace {

class Embed final : public RowOp {
 public:
  Embed(std::shared_ptr<const RowSource> source, int out)
      : RowOp(source->width()), source_(std::move(source)), out_(out) {}
  const char* name() const override { return "embed"; }

 protected:
  void run_row(int row, Context& context) override {
    source_->row(context.batch.tokens[row], row_of(context, out_, source_->width(), row));
  }

 private:
  std::shared_ptr<const RowSource> source_;
  int out_;
};

class RmsNorm final : public RowOp {
 public:
  RmsNorm(const OpKernels& kernels, int x, int out, std::vector<float> weight, float eps)
      : RowOp(static_cast<int>(weight.size())),
        kernels_(kernels),
        x_(x),
        out_(out),
        weight_(std::move(weight)),
        eps_(eps) {}
  const char* name() const override { return "rms_norm"; }

 protected:
  void run_row(int row, Context& context) override {
    const int width = static_cast<int>(weight_.size());
    kernels_.rms_norm(row_of(context, x_, width, row), weight_.data(), row_of(context, out_, width, row), width, eps_);
  }

 private:
  const OpKernels& kernels_;
  int x_;
  int out_;
  std::vector<float> weight_;
  float eps_;
};

class HeadNorm final : public RowOp {
 public:
  HeadNorm(const OpKernels& kernels, int x, int out, Heads heads, std::vector<float> q_norm, std::vector<float> k_norm,
           float eps)
      : RowOp(heads.width()),
        kernels_(kernels),
        x_(x),
        out_(out),
        heads_(heads),
        q_norm_(std::move(q_norm)),
        k_norm_(std::move(k_norm)),
        eps_(eps) {}
  const char* name() const override { return "head_norm"; }

 protected:
  void run_row(int row, Context& context) override {
    const float* x = row_of(context, x_, heads_.width(), row);
    float* out = row_of(context, out_, heads_.width(), row);
    const int rotated = heads_.heads + heads_.kv_heads;
    for (int head = 0; head < rotated; ++head) {
      const float* weight = head < heads_.heads ? q_norm_.data() : k_norm_.data();
      const int at = head * heads_.head_dim;
      kernels_.rms_norm(x + at, weight, out + at, heads_.head_dim, eps_);
    }
    if (x != out) {
      const int at = rotated * heads_.head_dim;
      std::memcpy(out + at, x + at, static_cast<size_t>(heads_.kv_heads * heads_.head_dim) * sizeof(float));
    }
  }

 private:
  const OpKernels& kernels_;
  int x_;
  int out_;
  Heads heads_;
  std::vector<float> q_norm_;
  std::vector<float> k_norm_;
  float eps_;
};

class Rope final : public RowOp {
 public:
  Rope(const OpKernels& kernels, int x, int out, Heads heads, std::shared_ptr<RopeTable> table)
      : RowOp(heads.width()), kernels_(kernels), x_(x), out_(out), heads_(heads), table_(std::move(table)) {}
  const char* name() const override { return "rope"; }
  void prepare(const Batch& batch) override { table_->fill(batch); }

 protected:
  void run_row(int row, Context& context) override {
    const float* x = row_of(context, x_, heads_.width(), row);
    float* out = row_of(context, out_, heads_.width(), row);
    const int rotated = heads_.heads + heads_.kv_heads;
    kernels_.rope(x, table_->cosine(row), table_->sine(row), out, rotated, heads_.head_dim, table_->half());
    if (x != out) {
      const int at = rotated * heads_.head_dim;
      std::memcpy(out + at, x + at, static_cast<size_t>(heads_.kv_heads * heads_.head_dim) * sizeof(float));
    }
  }

 private:
  const OpKernels& kernels_;
  int x_;
  int out_;
  Heads heads_;
  std::shared_ptr<RopeTable> table_;
};

class Activate final : public Op {
 public:
  Activate(const OpKernels& kernels, int x, int out, int neurons, Act act, std::vector<int> ids, int width)
      : kernels_(kernels),
        x_(x),
        out_(out),
        neurons_(neurons),
        act_(act),
        cut_(std::nextafter(act.threshold, INFINITY)),
        ids_(std::move(ids)),
        width_(ids_.empty() ? neurons : width) {}
  const char* name() const override { return act_.gated ? "gated_act" : "act"; }

  // Items are pieces of rows, for a single wide row is worth sharing: an activation costs tens of cycles a vector.
  int items(int, const Batch& batch) const override { return rows(batch) * pieces(); }
  int chunk(int, const Batch&) const override { return std::max(1, kPiece / neurons_); }

  void run(int, int begin, int end, int, Context& context) override {
    for (int item = begin; item < end; ++item) {
      const int row = item / pieces();
      const int from = item % pieces() * kPiece;
      const int count = std::min(kPiece, neurons_ - from);
      const float* x = row_of(context, x_, act_.gated ? 2 * neurons_ : neurons_, row) + from;
      float* out = row_of(context, out_, width_, row);
      if (ids_.empty()) {
        compute(x, out + from, count);
      } else {
        scatter(x, out, from, count, reinterpret_cast<float*>(context.scratch));
      }
    }
  }
  size_t scratch_bytes(int) const override { return ids_.empty() ? 0 : kPiece * sizeof(float); }

 private:
  static constexpr int kPiece = 2048;
  int pieces() const { return (neurons_ + kPiece - 1) / kPiece; }

  void compute(const float* x, float* out, int count) const {
    if (act_.gated) {
      kernels_.gated_act(x, x + neurons_, out, count, act_.activation, cut_);
    } else {
      kernels_.act(x, out, count, act_.activation, cut_);
    }
  }

  // Ids ascend, so the piece owns the columns from its first id (the first piece: from 0) to the next piece's.
  void scatter(const float* x, float* out, int from, int count, float* values) {
    compute(x, values, count);
    const auto first = static_cast<size_t>(from);
    const int begin = from == 0 ? 0 : ids_[first];
    const int end = from + count == neurons_ ? width_ : ids_[first + static_cast<size_t>(count)];
    std::fill(out + begin, out + end, 0.0f);
    for (int j = 0; j < count; ++j) out[ids_[first + static_cast<size_t>(j)]] = values[j];
  }

  const OpKernels& kernels_;
  int x_;
  int out_;
  int neurons_;
  Act act_;
  float cut_;  // the least value above the threshold
  std::vector<int> ids_;
  int width_;
};

class Add final : public RowOp {
 public:
  Add(const OpKernels& kernels, int a, int b, int out, int width)
      : RowOp(width), kernels_(kernels), a_(a), b_(b), out_(out), width_(width) {}
  const char* name() const override { return "add"; }

 protected:
  void run_row(int row, Context& context) override {
    kernels_.add(row_of(context, a_, width_, row), row_of(context, b_, width_, row), row_of(context, out_, width_, row),
                 width_);
  }

 private:
  const OpKernels& kernels_;
  int a_;
  int b_;
  int out_;
  int width_;
};

class Select final : public Op {
 public:
  Select(int x, int out, int width) : x_(x), out_(out), width_(width) {}
  const char* name() const override { return "select"; }
  bool selects() const override { return true; }
  // One item: rows may move down within one buffer, in order.
  int items(int, const Batch& batch) const override { return batch.n_out > 0 ? 1 : 0; }
  void run(int, int, int, int, Context& context) override {
    for (int i = 0; i < context.batch.n_out; ++i) {
      const float* from = row_of(context, x_, width_, selected() ? i : context.batch.out_rows[i]);
      float* to = row_of(context, out_, width_, i);
      if (from != to) std::memcpy(to, from, static_cast<size_t>(width_) * sizeof(float));
    }
  }

 private:
  int x_;
  int out_;
  int width_;
};

}  // namespace

RopeTable::RopeTable(std::vector<float> inv_freq, float attention_factor)
    : inv_freq_(std::move(inv_freq)), factor_(attention_factor) {}

bool RopeTable::equals(const std::vector<float>& inv_freq, float attention_factor) const {
  return inv_freq_ == inv_freq && factor_ == attention_factor;
}

void RopeTable::fill(const Batch& batch) {
  if (step_ == batch.step) return;
  step_ = batch.step;
  const size_t half = inv_freq_.size();
  table_.resize(static_cast<size_t>(batch.rows) * 2 * half);
  for (int row = 0; row < batch.rows; ++row) {
    float* cosine = table_.data() + static_cast<size_t>(2 * row) * half;
    for (size_t i = 0; i < half; ++i) {
      // The angle is rounded to float32, as models were trained; its cosine is exact to a rounding.
      const float angle = static_cast<float>(batch.positions[row]) * inv_freq_[i];
      cosine[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * factor_;
      cosine[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * factor_;
    }
  }
}

std::unique_ptr<Op> make_embed(std::shared_ptr<const RowSource> source, int out) {
  return std::make_unique<Embed>(std::move(source), out);
}

std::unique_ptr<Op> make_rms_norm(const OpKernels& kernels, int x, int out, std::vector<float> weight, float eps) {
  return std::make_unique<RmsNorm>(kernels, x, out, std::move(weight), eps);
}

std::unique_ptr<Op> make_head_norm(const OpKernels& kernels, int x, int out, Heads heads, std::vector<float> q_norm,
                                   std::vector<float> k_norm, float eps) {
  return std::make_unique<HeadNorm>(kernels, x, out, heads, std::move(q_norm), std::move(k_norm), eps);
}

std::unique_ptr<Op> make_rope(const OpKernels& kernels, int x, int out, Heads heads, std::shared_ptr<RopeTable> table) {
  return std::make_unique<Rope>(kernels, x, out, heads, std::move(table));
}

std::unique_ptr<Op> make_act(const OpKernels& kernels, int x, int out, int neurons, Act act, std::vector<int> ids,
                             int width) {
  return std::make_unique<Activate>(kernels, x, out, neurons, act, std::move(ids), width);
}

std::unique_ptr<Op> make_add(const OpKernels& kernels, int a, int b, int out, int width) {
  return std::make_unique<Add>(kernels, a, b, out, width);
}

std::unique_ptr<Op> make_select(int x, int out, int width) { return std::make_unique<Select>(x, out, width); }

}  // namespace thinfer
