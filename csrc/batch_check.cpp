#include "batch_check.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace thinfer {

namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string in_row(int row, const char* what, int64_t value) {
  return "row " + std::to_string(row) + ": " + what + " " + std::to_string(value);
}

void check_rows(const Batch& batch, const BatchLimits& limits) {
  if (batch.rows < 1 || batch.rows > limits.max_rows) {
    fail("a batch has 1 to " + std::to_string(limits.max_rows) + " rows (the program's max_rows), not " +
         std::to_string(batch.rows));
  }
  if (batch.n_out > batch.rows) fail("out_rows has more entries than the batch has rows");
  for (int i = 0; i < batch.n_out; ++i) {
    const int row = batch.out_rows[i];
    if (row < 0 || row >= batch.rows)
      fail("out_rows[" + std::to_string(i) + "] = " + std::to_string(row) + " is no row");
  }
  for (int row = 0; row < batch.rows; ++row) {
    if (limits.vocab > 0 && (batch.tokens[row] < 0 || batch.tokens[row] >= limits.vocab)) {
      fail(in_row(row, "token", batch.tokens[row]) + " is outside the vocabulary of " + std::to_string(limits.vocab));
    }
    if (batch.positions[row] < 0) fail(in_row(row, "position", batch.positions[row]) + " is negative");
    if (limits.positions > 0 && batch.positions[row] >= limits.positions) {
      fail(in_row(row, "position", batch.positions[row]) + " is past the model's " + std::to_string(limits.positions) +
           " learned positions");
    }
    if (batch.sequence[row] < 0 || batch.sequence[row] >= batch.sequences) {
      fail(in_row(row, "sequence", batch.sequence[row]) + " is outside the block table of " +
           std::to_string(batch.sequences) + " sequences");
    }
  }
}

struct Span {
  int lowest = INT32_MAX;  // block
  int last = -1;           // position
};

void check_cache(const Batch& batch, const BatchLimits& limits) {
  std::vector<Span> spans(static_cast<size_t>(batch.sequences));
  for (int row = 0; row < batch.rows; ++row) {
    const int position = batch.positions[row];
    Span& span = spans[static_cast<size_t>(batch.sequence[row])];
    if (position / kBlock >= batch.max_blocks) {
      fail(in_row(row, "position", position) + " is past the block table's " + std::to_string(batch.max_blocks) +
           " blocks of " + std::to_string(kBlock));
    }
    if (position <= span.last) {
      fail(in_row(row, "position", position) + " does not come after the sequence's row before it, at " +
           std::to_string(span.last));
    }
    const int low = limits.window > 0 && position >= limits.window ? position - limits.window + 1 : 0;
    span.lowest = std::min(span.lowest, low / kBlock);
    span.last = position;
  }
  for (int sequence = 0; sequence < batch.sequences; ++sequence) {
    const Span& span = spans[static_cast<size_t>(sequence)];
    for (int i = span.lowest; span.last >= 0 && i <= span.last / kBlock; ++i) {
      const int block = batch.block_table[static_cast<ptrdiff_t>(sequence) * batch.max_blocks + i];
      if (block < 0 || block >= limits.cache_blocks) {
        fail("block_table[" + std::to_string(sequence) + ", " + std::to_string(i) + "] = " + std::to_string(block) +
             " is none of the cache's " + std::to_string(limits.cache_blocks) + " blocks");
      }
    }
  }
  std::vector<int64_t> slots(static_cast<size_t>(batch.rows));
  for (int row = 0; row < batch.rows; ++row) {
    const int position = batch.positions[row];
    const ptrdiff_t table = static_cast<ptrdiff_t>(batch.sequence[row]) * batch.max_blocks;
    slots[static_cast<size_t>(row)] =
        int64_t{batch.block_table[table + position / kBlock]} * kBlock + position % kBlock;
  }
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  if (twice != slots.end()) {
    fail("two rows write slot " + std::to_string(*twice % kBlock) + " of cache block " +
         std::to_string(*twice / kBlock));
  }
}

}  // namespace

Batch OwnedBatch::view() const {
  const size_t rows = tokens.size();
  if (positions.size() != rows || sequence.size() != rows || sparse.size() != rows) {
    fail("tokens, positions, sequence and sparse must have one entry a row");
  }
  if (rows > INT32_MAX || out_rows.size() > INT32_MAX || sequences < 0 || max_blocks < 0 ||
      block_table.size() != static_cast<size_t>(sequences) * static_cast<size_t>(max_blocks)) {
    fail("the block table's length is not sequences times max_blocks");
  }
  return {.rows = static_cast<int>(rows),
          .tokens = tokens.data(),
          .positions = positions.data(),
          .sequence = sequence.data(),
          .sparse = sparse.data(),
          .n_out = static_cast<int>(out_rows.size()),
          .out_rows = out_rows.data(),
          .block_table = block_table.data(),
          .sequences = sequences,
          .max_blocks = max_blocks,
          .step = 0};
}

void check_batch(const Batch& batch, const BatchLimits& limits) {
  check_rows(batch, limits);
  if (limits.attends) check_cache(batch, limits);
}

}  // namespace thinfer
