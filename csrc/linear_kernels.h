// Kernels of linear layers over packed matrices, one table per instruction set.
#pragma once

#include "codec.h"
#include "dispatch.h"

namespace thinfer {

// Activations of a step as int8 in groups of 32 inputs, group-major so that a kernel walking the groups reads them in
// order. x[row, 32 g + i] = scale[g, row] * q[g, row, i].
struct QuantizedRows {
  int rows = 0;
  int stride = 0;          // rows there is room for; index (g, row) = g * stride + row
  int8_t* q = nullptr;     // [groups][stride][32]
  float* scale = nullptr;  // [groups][stride]
  float* bias = nullptr;   // [groups][stride] scale * sum of q: what multiplies the minimum of a group
  int32_t* sums = nullptr; // [groups][stride][2] sum of q over each half group

  // Without the groups before `group`.
  QuantizedRows from(int group) const {
    const ptrdiff_t at = static_cast<ptrdiff_t>(group) * stride;
    return {rows, stride, q + at * kGroup, scale + at, bias + at, sums + 2 * at};
  }
};

// Input channels of one row whose quant is not 0, in quads: 4 channels and their quants. Codecs with a scale per 16
// inputs need quads that stay inside a half group; a half is padded to whole quads by its last channel with quant 0.
struct ActiveChannels {
  uint8_t* quads = nullptr;    // [groups][2] quads in each half; without halves the first counts all
  uint8_t* channel = nullptr;  // [groups][32] ascending
  int8_t* q = nullptr;         // [groups][32]

  ActiveChannels from(int group) const { return {quads + 2 * group, channel + kGroup * group, q + kGroup * group}; }
};

constexpr int kFetchBlocks = 8;  // blocks of 64 outputs of a channel that begin and end with whole cache lines, all its planes

struct LinearKernels {
  // x [inputs] -> row `row` of `out`. Inputs with |x| * channel_scale <= threshold become 0 first (threshold < 0: none;
  // channel_scale may be null). A group with NaN or infinity gets a NaN scale.
  void (*quantize)(const float* x, int inputs, float threshold, const float* channel_scale, const QuantizedRows& out,
                   int row);
  // The same masking in float32: x -> y.
  void (*mask)(const float* x, int inputs, float threshold, const float* channel_scale, float* y);
  // Lists the non-zero channels of a row; returns how many there are.
  int (*find_active)(const QuantizedRows& x, int row, int inputs, bool halves, const ActiveChannels& out);

  // rows layout, one activation row: outputs [16 tile_begin, 16 tile_end) to y.
  void (*rows_gemv)(const Matrix& w, const QuantizedRows& x, float* y, int tile_begin, int tile_end);
  // rows layout, x.rows activation rows: y[row * ldy + output]. scratch: gemm_scratch_bytes(x.rows).
  void (*rows_gemm)(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int tile_begin, int tile_end,
                    uint8_t* scratch);
  // columns layout, one activation row: partial sums of one segment and of outputs [64 begin, 64 end) of a chunk to the same
  // places of y[0..chunk width). begin is a multiple of kFetchBlocks. Returns bytes read.
  size_t (*columns_gemv)(const Matrix& w, const QuantizedRows& x, const ActiveChannels& active, float* y, int segment,
                         int chunk, int block_begin, int block_end);
  // columns layout, x.rows activation rows: outputs [64 begin, 64 end), inside one chunk.
  void (*columns_gemm)(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int block_begin, int block_end,
                       uint8_t* scratch);
  // Float32 activations (row stride ldx) on any codec and layout: outputs [16 tile_begin, 16 tile_end) of x.rows rows.
  // Columns layout: the range starts and ends on blocks of 64 outputs, inside one chunk. With skip_zeros inputs that
  // are 0 in all rows are passed over. Returns bytes read.
  size_t (*float_linear)(const Matrix& w, const float* x, int rows, int ldx, float* y, int ldy, int tile_begin,
                         int tile_end, bool skip_zeros, uint8_t* scratch);
};

// Scratch of the gemm and float kernels for a step of `rows` rows.
inline size_t linear_scratch_bytes(int rows) {
  return 16384 + static_cast<size_t>(kOutBlock) * sizeof(float) * 2 * static_cast<size_t>(rows);
}

const LinearKernels& linear_kernels(Isa isa);

}  // namespace thinfer
