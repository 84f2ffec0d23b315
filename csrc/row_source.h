// Rows of a matrix as float32, whatever the matrix's codec: what the embedding op reads.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

namespace thinfer {

struct RowSource {
  virtual ~RowSource() = default;
  virtual int rows() const = 0;
  virtual int width() const = 0;
  // Writes width() floats. Called from several threads at once.
  virtual void row(int index, float* out) const = 0;
};

// A matrix kept as float32.
class Float32Rows final : public RowSource {
 public:
  Float32Rows(std::vector<float> values, int rows, int width)
      : values_(std::move(values)), rows_(rows), width_(width) {}
  int rows() const override { return rows_; }
  int width() const override { return width_; }
  void row(int index, float* out) const override {
    const auto width = static_cast<size_t>(width_);
    std::memcpy(out, values_.data() + static_cast<size_t>(index) * width, width * sizeof(float));
  }

 private:
  std::vector<float> values_;
  int rows_;
  int width_;
};

}  // namespace thinfer
