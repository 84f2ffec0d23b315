// What ops share whose rows are independent.
#pragma once

#include <algorithm>

#include "program.h"

namespace thinfer {

// Work below this many floats is not worth waking another thread for: about a microsecond.
constexpr int kGrain = 8192;

inline float* row_of(const Context& context, int buffer, int width, int row) {
  return context.buffers[buffer] + static_cast<ptrdiff_t>(row) * padded(width);
}

// An op whose rows are independent, cut into items of enough rows.
class RowOp : public Op {
 public:
  explicit RowOp(int width) : rows_per_item_(std::max(1, kGrain / width)) {}
  int items(int, const Batch& batch) const override { return (rows(batch) + rows_per_item_ - 1) / rows_per_item_; }
  void run(int, int begin, int end, int, Context& context) override {
    const int last = std::min(end * rows_per_item_, rows(context.batch));
    for (int row = begin * rows_per_item_; row < last; ++row) run_row(row, context);
  }

 protected:
  virtual void run_row(int row, Context& context) = 0;

 private:
  int rows_per_item_;
};

}  // namespace thinfer
