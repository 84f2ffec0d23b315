// The inner step with float32 activations: one group of inputs of some outputs against rows, and its weights as float.
#pragma once

#include "cpu/gemm_group.h"

namespace thinfer::THINFER_ISA {

THINFER_INLINE f32x16 load_weights(const float* p) { return load(p); }
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};
THINFER_INLINE f32x16 load_weights(const Half* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
THINFER_INLINE f32x16 load_weights(const BFloat* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }

// A step over one group of inputs: which of its channels count, and where its activations are.
struct Inputs {
  const float* x;  // first channel of the group, first row
  int ldx;
  const uint8_t* channel;
  int count;
  size_t ahead = 0;  // bytes from the weights that are multiplied to those that are fetched; 0: nothing is fetched
};

// kRows x kVectors sums in registers while the group's channels pass.
template <int kRows, int kVectors, class Weight>
THINFER_INLINE void add_rows(const Weight* w, size_t stride, const Inputs& in, int row, float* y, int ldy) {
  f32x16 acc[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = load(y + static_cast<ptrdiff_t>(row + r) * ldy + 16 * v);
  }
  for (int i = 0; i < in.count; ++i) {
    const size_t channel = in.channel[i];
    if (in.ahead > 0 && row == 0) {
      const char* next = reinterpret_cast<const char*>(w + channel * stride) + in.ahead;
      for (size_t line = 0; line < 16 * kVectors * sizeof(Weight); line += 64) __builtin_prefetch(next + line, 0, 3);
    }
    f32x16 weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = load_weights(w + channel * stride + 16 * v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const f32x16 x = set1(in.x[static_cast<ptrdiff_t>(row + r) * in.ldx + static_cast<ptrdiff_t>(channel)]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(weights[v], x, acc[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(y + static_cast<ptrdiff_t>(row + r) * ldy + 16 * v, acc[r][v]);
  }
}

template <int kVectors, class Weight>
THINFER_INLINE void add_group(const Weight* w, size_t stride, const Inputs& in, int rows, float* y, int ldy) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) add_rows<4, kVectors>(w, stride, in, row, y, ldy);
  for (; row < rows; ++row) add_rows<1, kVectors>(w, stride, in, row, y, ldy);
}

template <Codec codec>
THINFER_INLINE void dequantize_tile(const uint8_t* quads, const GroupScales& s, float* panel, int outputs) {
  // (q - offset) * d + m, each operation rounded, as the file's own definition is computed.
  float d[16], d2[16], m[16];
  store(d, s.d);
  store(d2, s.d2);
  store(m, s.m);
  for (int i = 0; i < kGroup; ++i) {
    for (int o = 0; o < 16; ++o) {
      const int q = quads[64 * (i / 4) + 4 * o + (i % 4)] - traits(codec).offset;
      const float scaled = static_cast<float>(q) * (kHalves<codec> && i >= 16 ? d2[o] : d[o]);
      panel[i * outputs + o] = !kHasMin<codec>                         ? scaled
                               : traits(codec).scale == ScaleKind::k ? scaled - m[o]
                                                                     : scaled + m[o];
    }
  }
}

}  // namespace thinfer::THINFER_ISA
