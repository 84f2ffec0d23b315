// Packing of stored tensors into the layouts of codec.h.
#pragma once

#include <memory>
#include <vector>

#include "codec.h"
#include "gguf_blocks.h"
#include "memory.h"
#include "row_source.h"
#include "threads.h"

namespace thinfer {

// Rows of one stored tensor: `rows` of them, taken in the order of row_index when there is one.
struct StoredRows {
  const uint8_t* data = nullptr;
  StoredType type = StoredType::F32;
  int rows = 0;
  size_t row_bytes = 0;
  const int32_t* row_index = nullptr;

  const uint8_t* row(int r) const { return data + static_cast<size_t>(row_index ? row_index[r] : r) * row_bytes; }
};

// One packed matrix: the stored rows of one or more tensors of one type, stacked along the outputs.
class PackedMatrix : public RowSource {
 public:
  // chunk: outputs per contiguous channel slice in the columns layout (a multiple of 64). Float codecs have no
  // rows layout. Throws std::invalid_argument when the parts do not fit together or the input size does not fit the codec.
  PackedMatrix(const std::vector<StoredRows>& parts, int inputs, Codec codec, Layout layout, int chunk, int segments,
               ThreadPool& pool, std::shared_ptr<Arena> arena);

  // The same weights at other addresses: for benchmarks that must not find them in a cache.
  std::shared_ptr<PackedMatrix> copy() const;

  // Drops the weights from the processor's caches where it can: for measurements that must read memory.
  void evict() const;

  const Matrix& matrix() const { return matrix_; }
  size_t bytes() const { return bytes_; }
  int rows() const override { return matrix_.outputs; }
  int width() const override { return matrix_.inputs; }
  void row(int index, float* out) const override;

 private:
  PackedMatrix(const Matrix& matrix, size_t bytes, std::shared_ptr<Arena> arena);
  uint8_t* allocate();

  Matrix matrix_;
  size_t bytes_ = 0;
  std::shared_ptr<Arena> arena_;
};

// Rows decoded straight from the stored tensor, for an embedding that nothing else reads: no packed copy.
class StoredRowSource : public RowSource {
 public:
  StoredRowSource(const StoredRows& source, int inputs) : source_(source), inputs_(inputs) {}
  int rows() const override { return source_.rows; }
  int width() const override { return inputs_; }
  void row(int index, float* out) const override;

 private:
  StoredRows source_;
  int inputs_;
};

}  // namespace thinfer
