// Weights of every stored type with random quants, and programs of one op run on plain rows, for the tests of ops.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "batch_check.h"
#include "pack.h"
#include "program.h"

namespace thinfer::testing {

struct Type {
  const char* name;
  int block_bytes;
  int f16_fields[2];  // offsets of float16 numbers in a block, -1: none
};
inline constexpr Type kTypes[] = {{"Q8_0", 34, {0, -1}}, {"Q4_0", 18, {0, -1}},    {"Q4_1", 20, {0, 2}},
                                  {"Q5_0", 22, {0, -1}}, {"Q5_1", 24, {0, 2}},     {"Q4_K", 144, {0, 2}},
                                  {"Q5_K", 176, {0, 2}}, {"Q6_K", 210, {208, -1}}, {"F16", 2, {0, -1}},
                                  {"BF16", 2, {0, -1}},  {"F32", 4, {0, 2}}};

struct Random {
  uint32_t state;
  uint32_t next() {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
  }
};

// Stored rows of random quants with small finite scales.
inline std::vector<uint8_t> stored(const Type& type, size_t bytes, Random& random) {
  std::vector<uint8_t> data(bytes);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.next());
  for (size_t block = 0; block < bytes; block += static_cast<size_t>(type.block_bytes)) {
    for (const int field : type.f16_fields) {
      if (field < 0) continue;
      // 0x2000 to 0x27ff are small numbers as float16 and as the halves of wider floats.
      data[block + static_cast<size_t>(field) + 1] = static_cast<uint8_t>(0x20 + random.next() % 8);
    }
  }
  return data;
}

// A matrix of them.
inline std::shared_ptr<const PackedMatrix> random_matrix(const Type& type, int outputs, int inputs, Layout layout, int chunk, int segments,
                                                         Random& random, ThreadPool& pool) {
  const StoredType stored_type = parse_stored_type(type.name);
  const size_t row_bytes = stored_row_bytes(stored_type, inputs);
  const std::vector<uint8_t> data = stored(type, row_bytes * static_cast<size_t>(outputs), random);
  const StoredRows rows{data.data(), stored_type, outputs, row_bytes, nullptr};
  return std::make_shared<const PackedMatrix>(std::vector<StoredRows>{rows}, inputs, codec_of(stored_type), layout, chunk, segments,
                                              pool, std::make_shared<Arena>());
}

// Runs the one op of a program, from buffer x to buffer y, on sparse rows of one sequence: outputs [rows, outputs]. The values
// of a row follow from its number; the first row's is `first`.
inline std::vector<float> run_rows(Program& program, int x, int inputs, int y, int outputs, int first, int rows) {
  OwnedBatch batch;
  for (int row = 0; row < rows; ++row) {
    Random random{static_cast<uint32_t>(first + row + 1)};
    float* values = program.buffer(x) + row * padded(inputs);
    for (int i = 0; i < inputs; ++i) values[i] = static_cast<float>(random.next() % 2001) * 0.001f - 1.0f;
    batch.tokens.push_back(0);
    batch.positions.push_back(row);
    batch.sequence.push_back(0);
    batch.sparse.push_back(1);
  }
  batch.block_table = {0};
  batch.sequences = 1;
  batch.max_blocks = 1;
  program.run(0, 1, batch.view());
  std::vector<float> result;
  for (int row = 0; row < rows; ++row) {
    const float* from = program.buffer(y) + row * padded(outputs);
    result.insert(result.end(), from, from + outputs);
  }
  return result;
}

}  // namespace thinfer::testing
