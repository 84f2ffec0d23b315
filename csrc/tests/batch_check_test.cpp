#include "batch_check.h"

#include <stdexcept>

#include "check.h"

namespace {

thinfer::OwnedBatch good() {
  return {.tokens = {0, 9, 3},
          .positions = {63, 64, 5},
          .sequence = {0, 0, 1},
          .sparse = {0, 1, 0},
          .out_rows = {1, 2},
          .block_table = {2, 0, 1, -1},
          .sequences = 2,
          .max_blocks = 2};
}

}  // namespace

void test_batch_check() {
  using namespace thinfer;
  const BatchLimits limits{.max_rows = 3, .vocab = 10, .attends = true, .cache_blocks = 3, .window = 0};
  check_batch(good().view(), limits);
  const auto refuses = [&](auto&& change) {
    OwnedBatch batch = good();
    change(batch);
    CHECK_THROWS(std::invalid_argument, check_batch(batch.view(), limits));
  };
  refuses([](OwnedBatch& b) { b.tokens[1] = 10; });
  refuses([](OwnedBatch& b) { b.tokens[1] = -1; });
  refuses([](OwnedBatch& b) { b.positions[2] = -1; });
  refuses([](OwnedBatch& b) { b.positions[1] = 128; });
  refuses([](OwnedBatch& b) { b.positions[1] = INT32_MAX; });
  refuses([](OwnedBatch& b) { b.positions[1] = 63; });
  refuses([](OwnedBatch& b) { b.sequence[0] = 2; });
  refuses([](OwnedBatch& b) { b.sequence[0] = -1; });
  refuses([](OwnedBatch& b) { b.out_rows[0] = 3; });
  refuses([](OwnedBatch& b) { b.out_rows = {0, 0, 0, 0}; });
  refuses([](OwnedBatch& b) { b.block_table[0] = 3; });
  refuses([](OwnedBatch& b) { b.block_table[1] = -1; });
  refuses([](OwnedBatch& b) { b.sparse.pop_back(); });
  refuses([](OwnedBatch& b) { b.max_blocks = 3; });
  refuses([](OwnedBatch& b) {
    b.block_table[2] = 2;  // both sequences write block 2 ...
    b.positions[2] = 63;   // ... at the same slot
  });
  refuses([](OwnedBatch& b) { b = OwnedBatch(); });
  // Blocks that no window reaches need not be there.
  OwnedBatch late = good();
  late.positions = {127, 64, 5};
  late.sequence = {0, 1, 1};
  late.positions = {127, 4, 5};
  late.block_table = {-1, 0, 1, -1};
  BatchLimits windowed = limits;
  windowed.window = 64;
  check_batch(late.view(), windowed);
  windowed.positions = 128;
  check_batch(late.view(), windowed);
  windowed.positions = 127;
  CHECK_THROWS(std::invalid_argument, check_batch(late.view(), windowed));
  CHECK_THROWS(std::invalid_argument, check_batch(late.view(), limits));
}
