// The inner step of the integer GEMMs: one group of 32 inputs of 16 outputs, unpacked once, against many rows.
#pragma once

#include "cpu/group.h"
#include "linear_kernels.h"

// Runs `call` with `codec` a constant, for the integer codecs.
#define THINFER_CODEC_CASE(name, call)    \
  case Codec::name: {                     \
    constexpr Codec codec = Codec::name;  \
    call;                                 \
    break;                                \
  }
#define THINFER_FOR_CODEC(value, call) \
  switch (value) {                     \
    THINFER_CODEC_CASE(u4_d, call)     \
    THINFER_CODEC_CASE(u4_dm, call)    \
    THINFER_CODEC_CASE(u5_d, call)     \
    THINFER_CODEC_CASE(u5_dm, call)    \
    THINFER_CODEC_CASE(i8_d, call)     \
    THINFER_CODEC_CASE(u4_k, call)     \
    THINFER_CODEC_CASE(u5_k, call)     \
    THINFER_CODEC_CASE(u6_k, call)     \
    default: break;                    \
  }

namespace thinfer::THINFER_ISA {

constexpr int kGemmRows = 128;         // rows a tile's float sums are kept in the first-level cache for
constexpr int kExpandedBytes = 4 * 512;  // four tiles of 32 x 16 unpacked quants

// Float sums of 16 outputs for up to kGemmRows rows: of the running segment and of those before.
struct TileSums {
  float* partial;
  float* total;
  int rows;

  THINFER_INLINE_MEMBER TileSums(uint8_t* scratch, int n)
      : partial(reinterpret_cast<float*>(scratch)), total(partial + n * kTile), rows(n) {}
  THINFER_INLINE_MEMBER void begin_segment() {
    for (int r = 0; r < rows; ++r) store(partial + r * kTile, zero());
  }
  THINFER_INLINE_MEMBER void end_segment(int segment) {
    for (int r = 0; r < rows; ++r) {
      const f32x16 part = load(partial + r * kTile);
      store(total + r * kTile, segment == 0 ? part : add(load(total + r * kTile), part));
    }
  }
  THINFER_INLINE_MEMBER void store_to(float* y, int ldy) const {
    for (int r = 0; r < rows; ++r) store(y + static_cast<size_t>(r) * static_cast<size_t>(ldy), load(total + r * kTile));
  }
};

// acc[r] += the group's part for rows [row, row + rows) of x. weights: 8 vectors of 64 quants.
template <Codec codec>
THINFER_INLINE void gemm_group(const uint8_t* weights, const GroupScales& s, const QuantizedRows& x, int group, int row,
                               int rows, float* acc) {
  const size_t base = static_cast<size_t>(group) * static_cast<size_t>(x.stride) + static_cast<size_t>(row);
  const int8_t* q = x.q + base * kGroup;
  const float* scale = x.scale + base;
  const float* bias = x.bias + base;
  const int32_t* sums = x.sums + 2 * base;
  u8x64 w[8];
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) w[v] = load_u8(weights + 64 * v);
  for (int r = 0; r < rows; ++r, q += kGroup) {
    f32x16 sum = load(acc + r * kTile);
    if constexpr (kHalves<codec>) {
      Dot<kBits<codec>> first, second;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        first.add(w[v], q + 4 * v, v);
        second.add(w[v + 4], q + 16 + 4 * v, v);
      }
      sum = end_half<codec>(sum, first.total(), s.d, scale[r], sums[2 * r]);
      sum = end_half<codec>(sum, second.total(), s.d2, scale[r], sums[2 * r + 1]);
    } else {
      Dot<kBits<codec>> dot;
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) dot.add(w[v], q + 4 * v, v);
      sum = end_group<codec>(sum, dot.total(), s, scale[r], bias[r], sums + 2 * r);
    }
    store(acc + r * kTile, sum);
  }
}

}  // namespace thinfer::THINFER_ISA
