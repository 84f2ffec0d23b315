#include "ops.h"
#include "row_op.h"

namespace thinfer {

namespace {

class Positions final : public RowOp {
 public:
  Positions(const OpKernels& kernels, std::shared_ptr<const RowSource> source, int x, int out, int offset)
      : RowOp(source->width()), kernels_(kernels), source_(std::move(source)), x_(x), out_(out), offset_(offset) {}
  const char* name() const override { return "positions"; }
  size_t scratch_bytes(int) const override { return static_cast<size_t>(padded(source_->width())) * sizeof(float); }

 protected:
  void run_row(int row, Context& context) override {
    const int width = source_->width();
    auto* learned = reinterpret_cast<float*>(context.scratch);
    source_->row(context.batch.positions[row] + offset_, learned);
    kernels_.add(row_of(context, x_, width, row), learned, row_of(context, out_, width, row), width);
  }

 private:
  const OpKernels& kernels_;
  std::shared_ptr<const RowSource> source_;
  int x_;
  int out_;
  int offset_;
};

}  // namespace

std::unique_ptr<Op> make_positions(const OpKernels& kernels, std::shared_ptr<const RowSource> source, int x, int out,
                                   int offset) {
  return std::make_unique<Positions>(kernels, std::move(source), x, out, offset);
}

}  // namespace thinfer
