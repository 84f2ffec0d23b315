// A few activation rows on the columns layout: the channels that any row uses are read once, in the order of memory. One
// table per instruction set; the bits are those of the kernels in linear_kernels.h.
#pragma once

#include "linear_kernels.h"

namespace thinfer {

// More rows than this use nearly every channel between them, and the float sums of all rows would leave the caches.
constexpr int kUnionRows = 16;

// Channels whose quant is not 0 in some row, listed as ActiveChannels lists those of one row.
struct UnionChannels {
  uint8_t* quads = nullptr;    // [groups][2]
  uint8_t* channel = nullptr;  // [groups][32]
  int8_t* q = nullptr;         // [groups][rows][32] the rows' quants of those channels
};

struct UnionKernels {
  // Lists the channels of groups [begin, end). halves: as in find_active.
  void (*find)(const QuantizedRows& x, int begin, int end, bool halves, const UnionChannels& out);
  // Partial sums of one segment and chunk for all rows: y[row * ldy + output of the chunk]. Returns bytes read.
  // scratch: linear_scratch_bytes(x.rows).
  size_t (*gemm)(const Matrix& w, const QuantizedRows& x, const UnionChannels& channels, float* y, int ldy, int segment,
                 int chunk, uint8_t* scratch);
};

const UnionKernels& union_kernels(Isa isa);

}  // namespace thinfer
