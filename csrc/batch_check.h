// Checks a batch before any kernel follows its indices.
#pragma once

#include <vector>

#include "program.h"

namespace thinfer {

// A batch that owns its arrays, so that nobody changes them once they are checked.
struct OwnedBatch {
  std::vector<int32_t> tokens, positions, sequence;
  std::vector<uint8_t> sparse;
  std::vector<int32_t> out_rows;
  std::vector<int32_t> block_table;  // [sequences, max_blocks]
  int sequences = 0;
  int max_blocks = 0;

  // Throws std::invalid_argument unless the lengths agree. Valid while this is neither changed nor destroyed.
  Batch view() const;
};

struct BatchLimits {
  int max_rows = 0;
  int vocab = 0;         // tokens lie in [0, vocab); 0: the program reads no tokens
  int positions = 0;     // positions lie in [0, positions); 0: the program has no table of them
  bool attends = false;  // whether keys and values are read and written
  int cache_blocks = 0;  // blocks the KV cache has
  int window = 0;        // positions any layer looks back, itself included; 0: all
};

// Throws std::invalid_argument that names the row and the value at fault. When the program attends, rows of one
// sequence must ascend in position and no two rows may share a cache slot.
void check_batch(const Batch& batch, const BatchLimits& limits);

}  // namespace thinfer
