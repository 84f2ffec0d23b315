// Rows of a matrix as float32, whatever the matrix's codec: what the embedding op reads.
#pragma once

namespace thinfer {

struct RowSource {
  virtual ~RowSource() = default;
  virtual int rows() const = 0;
  virtual int width() const = 0;
  // Writes width() floats. Called from several threads at once.
  virtual void row(int index, float* out) const = 0;
};

}  // namespace thinfer
