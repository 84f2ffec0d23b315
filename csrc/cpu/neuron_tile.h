// Sixteen rows of a matrix in the neurons layout that are read together, and the sixteen after them.
#pragma once

#include "codec.h"
#include "cpu/isa/simd.h"
#include "neuron_kernels.h"

namespace thinfer::THINFER_ISA {

// Rows of one tile; the last one repeats where there are fewer.
struct TileRows {
  const uint8_t* at[kTile];
  THINFER_INLINE_MEMBER TileRows(const Matrix& w, const int32_t* ids, int count) {
    for (int r = 0; r < kTile; ++r) at[r] = w.row_data(ids[r < count ? r : count - 1]);
  }
};

// Where sixteen rows will be read next.
struct Ahead {
  const TileRows& rows;
  size_t offset;
  THINFER_INLINE_MEMBER void prefetch(int r, size_t bytes) const {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(rows.at[r] + offset + line, 0, 3);
  }
};

// Rows lie scattered, so the hardware cannot know where the next ones are: fetched some way ahead, through the end of a row
// into the rows of the next tile.
struct TilePair {
  TileRows rows, next;
  size_t row_bytes;

  THINFER_INLINE_MEMBER Ahead ahead(size_t offset) const {
    return offset < row_bytes ? Ahead{rows, offset} : Ahead{next, offset - row_bytes};
  }
};

// Calls use(pair, first, count) for the tiles of some rows.
template <class Use>
THINFER_INLINE void each_tile(const Matrix& w, const RowIds& list, Use&& use) {
  const int32_t* ids = list.ids;
  const int count = list.count;
  TilePair pair{TileRows(w, ids, count < kTile ? count : kTile), TileRows(w, ids, 1), w.row_bytes()};
  for (int i = 0; i < count; i += kTile) {
    const int here = count - i < kTile ? count - i : kTile, left = count + list.following - i - here;
    pair.next = left > 0 ? TileRows(w, ids + i + here, left < kTile ? left : kTile) : pair.rows;
    use(pair, i, here);
    pair.rows = pair.next;
  }
}

}  // namespace thinfer::THINFER_ISA
