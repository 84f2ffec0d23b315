// Kernels over the neurons layout: any output rows, one table per instruction set. They give the bits of the kernels in
// linear_kernels.h, which multiply all rows.
#pragma once

#include "linear_kernels.h"

namespace thinfer {

// One activation row in the order of the neurons layout.
struct NeuronInput {
  const int8_t* q = nullptr;      // [records][8][32]: byte 4 * g + i of vector v is input 4 * v + i of group g of the record
  const float* scale = nullptr;   // [groups], and so the others; readable to a multiple of kSuper groups
  const float* bias = nullptr;
  const int32_t* sums = nullptr;  // [3][sums_stride] sum of q over groups, their first and second halves
  int sums_stride = 0;
};

// Rows ids[0..count) of a matrix. `following` more ids lie behind them: rows that this thread will most likely read in its
// next call, so that the end of one fetches the beginning of the other.
struct RowIds {
  const int32_t* ids = nullptr;
  int count = 0, following = 0;
};

// scratch: linear_scratch_bytes(rows).
struct NeuronKernels {
  // y[i] = row ids[i] of w times x for i < count.
  void (*gemv)(const Matrix& w, const NeuronInput& x, const RowIds& rows, float* y, uint8_t* scratch);
  // y[row * ldy + i] = row ids[i] of w times x.row for i < count.
  void (*gemm)(const Matrix& w, const QuantizedRows& x, const RowIds& rows, float* y, int ldy, uint8_t* scratch);
  // The same with float32 activations (n rows with stride ldx), any codec.
  void (*float_gemm)(const Matrix& w, const float* x, int n, int ldx, const RowIds& rows, float* y, int ldy, uint8_t* scratch);
  // Sets bit j of `bits` unless x[j] <= threshold, or with `magnitude` |x[j]| (so where it is NaN), for j < n; clears
  // the others up to a multiple of 16. threshold >= 0.
  void (*find_above)(const float* x, int n, float threshold, bool magnitude, uint16_t* bits);
};

const NeuronKernels& neuron_kernels(Isa isa);

}  // namespace thinfer
