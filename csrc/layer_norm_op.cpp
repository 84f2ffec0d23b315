#include "ops.h"
#include "row_op.h"

namespace thinfer {

namespace {

class LayerNorm final : public RowOp {
 public:
  LayerNorm(const OpKernels& kernels, int x, int out, std::vector<float> weight, std::vector<float> bias, float eps)
      : RowOp(static_cast<int>(weight.size())),
        kernels_(kernels),
        x_(x),
        out_(out),
        weight_(std::move(weight)),
        bias_(std::move(bias)),
        eps_(eps) {}
  const char* name() const override { return "layer_norm"; }

 protected:
  void run_row(int row, Context& context) override {
    const int width = static_cast<int>(weight_.size());
    kernels_.layer_norm(row_of(context, x_, width, row), weight_.data(), bias_.data(),
                        row_of(context, out_, width, row), width, eps_);
  }

 private:
  const OpKernels& kernels_;
  int x_;
  int out_;
  std::vector<float> weight_;
  std::vector<float> bias_;
  float eps_;
};

}  // namespace

std::unique_ptr<Op> make_layer_norm(const OpKernels& kernels, int x, int out, std::vector<float> weight,
                                    std::vector<float> bias, float eps) {
  return std::make_unique<LayerNorm>(kernels, x, out, std::move(weight), std::move(bias), eps);
}

}  // namespace thinfer
