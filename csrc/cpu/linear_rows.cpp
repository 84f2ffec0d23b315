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

// Tiles that are multiplied side by side: a core that reads a single stream waits for memory more than one that reads four.
constexpr int kStreams = 4;

constexpr size_t kAhead = 4096;  // bytes from what is multiplied to what is fetched

// Fetches a group's share of the record at `record`.
template <Codec codec>
THINFER_INLINE void prefetch_share(const uint8_t* record, int g) {
  constexpr size_t kShare = RowsRecord<codec>::kBytes / RowsRecord<codec>::kGroups;
  const size_t begin = kShare * static_cast<size_t>(g), end = begin + kShare;
  for (size_t i = (begin + 63) / 64 * 64; i < end; i += 64) __builtin_prefetch(record + i, 0, 3);
}

// acc += the part of group g of a block.
template <Codec codec>
THINFER_INLINE f32x16 add_group(f32x16 acc, RowsRecord<codec> record, const QuantizedRows& x, int block, int g) {
  const size_t at = static_cast<size_t>(block * RowsRecord<codec>::kGroups + g) * static_cast<size_t>(x.stride);
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
    return end_half<codec>(acc, second.total(), s.d2, x.scale[at], x.sums[2 * at + 1]);
  } else {
    Dot<kBits<codec>> dot;
    each_quad<kBits<codec>>(record.quants(g), [&](int v, u8x64 weights) __attribute__((always_inline)) {
      dot.add(weights, q + 4 * v, v);
    });
    return end_group<codec>(acc, dot.total(), s, x.scale[at], x.bias[at], x.sums + 2 * at);
  }
}

template <Codec codec, int streams>
THINFER_INLINE void gemv_tiles(const Matrix& w, const QuantizedRows& x, float* y, int tile) {
  constexpr size_t kBytes = RowsRecord<codec>::kBytes;
  const size_t tile_bytes = kBytes * static_cast<size_t>(w.blocks());
  f32x16 total[streams], acc[streams];
  const uint8_t* p[streams];
  for (int t = 0; t < streams; ++t) p[t] = w.tile_data(tile + t);
  for (int segment = 0; segment < w.segments; ++segment) {
    for (int t = 0; t < streams; ++t) acc[t] = zero();
    for (int block = w.segment_begin(segment); block < w.segment_begin(segment + 1); ++block) {
      // Past the end of its tile a stream goes on with the tile after those of the other streams.
      const bool ends = kBytes * static_cast<size_t>(block) + kAhead >= tile_bytes;
      const size_t ahead = kAhead + (ends ? (streams - 1) * tile_bytes : 0);
      for (int g = 0; g < RowsRecord<codec>::kGroups; ++g) {
#pragma GCC unroll 4
        for (int t = 0; t < streams; ++t) {
          prefetch_share<codec>(p[t] + ahead, g);
          acc[t] = add_group<codec>(acc[t], RowsRecord<codec>{p[t]}, x, block, g);
        }
      }
      for (int t = 0; t < streams; ++t) p[t] += kBytes;
    }
    for (int t = 0; t < streams; ++t) total[t] = segment == 0 ? acc[t] : add(total[t], acc[t]);
  }
  for (int t = 0; t < streams; ++t) store(y + (tile + t) * kTile, total[t]);
}

template <Codec codec>
void gemv(const Matrix& w, const QuantizedRows& x, float* y, int tile_begin, int tile_end) {
  int tile = tile_begin;
  for (; tile + kStreams <= tile_end; tile += kStreams) gemv_tiles<codec, kStreams>(w, x, y, tile);
  for (; tile < tile_end; ++tile) gemv_tiles<codec, 1>(w, x, y, tile);
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
            prefetch_share<codec>(record.p + kAhead, g);
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
