// y = W x over the rows layout, integer activations.
#include "cpu/gemm_group.h"
#include "linear_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

template <Codec codec>
struct RowsRecord {
  static constexpr int kGroups = groups_per_block(codec);
  static constexpr size_t kQuants = static_cast<size_t>(rows_group_bytes(codec));
  static constexpr size_t kScales = static_cast<size_t>(kTile) * group_scale_bytes(codec);
  static constexpr size_t kBytes = static_cast<size_t>(rows_record_bytes(codec));
  const uint8_t* p;

  THINFER_INLINE_MEMBER const uint8_t* quants(int g) const { return p + kQuants * static_cast<size_t>(g); }
  THINFER_INLINE_MEMBER GroupScales scales(int g) const {
    const uint8_t* base = p + kQuants * kGroups;
    return load_scales<codec>(base + kScales * static_cast<size_t>(g), base + kScales * kGroups, kTile);
  }
};

// One stream per thread is too little for the hardware prefetcher on virtual machines: run ahead of it.
template <Codec codec>
THINFER_INLINE void prefetch_record(const uint8_t* p) {
  constexpr size_t kAhead = 4096;
#pragma GCC unroll 64
  for (size_t i = 0; i < RowsRecord<codec>::kBytes; i += 64) __builtin_prefetch(p + kAhead + i, 0, 3);
}

template <Codec codec>
void gemv(const Matrix& w, const QuantizedRows& x, float* y, int tile_begin, int tile_end) {
  constexpr int kGroups = RowsRecord<codec>::kGroups;
  const size_t stride = static_cast<size_t>(x.stride);
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    RowsRecord<codec> record{w.tile_data(tile)};
    f32x16 total = zero();
    for (int segment = 0; segment < w.segments; ++segment) {
      f32x16 acc = zero();
      for (int block = w.segment_begin(segment); block < w.segment_begin(segment + 1); ++block) {
        prefetch_record<codec>(record.p);
        for (int g = 0; g < kGroups; ++g) {
          const size_t at = static_cast<size_t>(block * kGroups + g) * stride;
          const int8_t* q = x.q + at * kGroup;
          const GroupScales s = record.scales(g);
          if constexpr (kHalves<codec>) {
            Dot<kBits<codec>> first, second;
            each_quad<kBits<codec>>(record.quants(g), [&](int v, u8x64 weights) __attribute__((always_inline)) {
              if (v < 4) {
                first.add(weights, q + 4 * v, v);
              } else {
                second.add(weights, q + 4 * v, v);
              }
            });
            acc = end_half<codec>(acc, first.total(), s.d, x.scale[at], x.sums[2 * at]);
            acc = end_half<codec>(acc, second.total(), s.d2, x.scale[at], x.sums[2 * at + 1]);
          } else {
            Dot<kBits<codec>> dot;
            each_quad<kBits<codec>>(record.quants(g), [&](int v, u8x64 weights) __attribute__((always_inline)) {
              dot.add(weights, q + 4 * v, v);
            });
            acc = end_group<codec>(acc, dot.total(), s, x.scale[at], x.bias[at], x.sums + 2 * at);
          }
        }
        record.p += RowsRecord<codec>::kBytes;
      }
      total = segment == 0 ? acc : add(total, acc);
    }
    store(y + tile * kTile, total);
  }
}

template <Codec codec>
void gemm(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int tile_begin, int tile_end, uint8_t* scratch) {
  constexpr int kGroups = RowsRecord<codec>::kGroups;
  uint8_t* weights = scratch;
  for (int row = 0; row < x.rows; row += kGemmRows) {
    const int rows = x.rows - row < kGemmRows ? x.rows - row : kGemmRows;
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      TileSums sums(scratch + kExpandedBytes, rows);
      RowsRecord<codec> record{w.tile_data(tile)};
      for (int segment = 0; segment < w.segments; ++segment) {
        sums.begin_segment();
        for (int block = w.segment_begin(segment); block < w.segment_begin(segment + 1); ++block) {
          for (int g = 0; g < kGroups; ++g) {
            each_quad<kBits<codec>>(record.quants(g), [&](int v, u8x64 quants) __attribute__((always_inline)) {
              store_u8(weights + 64 * v, quants);
            });
            gemm_group<codec>(weights, record.scales(g), x, block * kGroups + g, row, rows, sums.partial);
          }
          record.p += RowsRecord<codec>::kBytes;
        }
        sums.end_segment(segment);
      }
      sums.store_to(y + static_cast<size_t>(row) * static_cast<size_t>(ldy) + tile * kTile, ldy);
    }
  }
}

}  // namespace

void rows_gemv(const Matrix& w, const QuantizedRows& x, float* y, int tile_begin, int tile_end) {
  THINFER_FOR_CODEC(w.codec, gemv<codec>(w, x, y, tile_begin, tile_end));
}
void rows_gemm(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int tile_begin, int tile_end,
               uint8_t* scratch) {
  THINFER_FOR_CODEC(w.codec, gemm<codec>(w, x, y, ldy, tile_begin, tile_end, scratch));
}

}  // namespace thinfer::THINFER_ISA
