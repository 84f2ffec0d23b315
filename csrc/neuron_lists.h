// Neurons of an FFN, or heads of an attention, that the rows of a batch are computed for.
#pragma once

#include <cstdint>
#include <vector>

namespace thinfer {

// Asked for before the op that computes them: by a caller, or by an op that runs earlier in the program.
struct NeuronLists {
  bool given = false;
  std::vector<int32_t> ids;      // for each row of the batch ascending from 0 or above
  std::vector<int32_t> offsets;  // row r has ids[offsets[r], offsets[r + 1])
  int rows() const { return static_cast<int>(offsets.size()) - 1; }
};

}  // namespace thinfer
