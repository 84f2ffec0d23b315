// y = W x over the columns layout, integer activations: channels whose activation is 0 are not read.
#include "cpu/columns_record.h"
#include "linear_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

// Sums of 64 outputs over `quads` quads of channels.
template <int bits>
struct ColumnDots {
  Dot8<bits> dot[8];
  template <Codec codec>
  THINFER_INLINE_MEMBER void add(const uint8_t* channels, size_t size, const uint8_t* list, const int8_t* q, int quads,
                                 size_t nibbles, size_t high) {
    for (int i = 0; i < quads; ++i) {
      const uint8_t* c = list + 4 * i;
      each_column_vector<bits>(channels + size * c[0], channels + size * c[1], channels + size * c[2],
                               channels + size * c[3], nibbles, high,
                               [&](int k, u8x32 w) __attribute__((always_inline)) { dot[k].add(w, q + 4 * i, i); });
    }
  }
  THINFER_INLINE_MEMBER i32x16 total(int tile) { return join(dot[2 * tile].total(), dot[2 * tile + 1].total()); }
};

template <Codec codec>
size_t gemv(const Matrix& w, const QuantizedRows& x, const ActiveChannels& active, float* y, int segment, int chunk) {
  constexpr int kGroups = groups_per_block(codec);
  constexpr int bits = kBits<codec>;
  const int width = w.chunk_width(chunk);
  const int blocks64 = width / kOutBlock;
  ColumnsRecord<codec> record{w.chunk_data(chunk), static_cast<size_t>(width)};
  const size_t size = record.channel();
  record.p += static_cast<size_t>(w.segment_begin(segment)) * record.bytes();
  for (int i = 0; i < width; i += 16) store(y + i, zero());
  size_t bytes = 0;
  const int last = w.segment_begin(segment + 1) * kGroups;
  for (int block = w.segment_begin(segment); block < w.segment_begin(segment + 1); ++block) {
    bool block_read = false;
    for (int g = 0; g < kGroups; ++g) {
      const int group = block * kGroups + g;
      const int first_quads = active.quads[2 * group];
      const int quads = first_quads + active.quads[2 * group + 1];
      if (quads == 0) continue;
      block_read = true;
      const size_t at = static_cast<size_t>(group) * static_cast<size_t>(x.stride);
      const uint8_t* channels = record.channels(g);
      const uint8_t* list = active.channel + kGroup * group;
      const int8_t* q = active.q + kGroup * group;
      // The next group's active channels, a cache line at a time, while this one is computed.
      const uint8_t* next = nullptr;
      const uint8_t* next_list = list + kGroup;
      int next_count = 0;
      if (group + 1 < last) {
        next_count = 4 * (active.quads[2 * group + 2] + active.quads[2 * group + 3]);
        next = g + 1 < kGroups ? record.channels(g + 1)
                               : ColumnsRecord<codec>{record.p + record.bytes(), record.width}.channels(0);
      }
      for (int b = 0; b < blocks64; ++b) {
        if ((b & 1) == 0 || bits == 8) {
          const size_t line = ColumnsRecord<codec>::nibbles(b);
          for (int i = 0; i < next_count; ++i) __builtin_prefetch(next + size * next_list[i] + line, 0, 3);
        }
        if (bits == 5 || bits == 6) {
          const size_t high = record.high(b);
          if ((high & 63) < static_cast<size_t>(bits == 6 ? 16 : 8)) {
            for (int i = 0; i < next_count; ++i) __builtin_prefetch(next + size * next_list[i] + high, 0, 3);
          }
        }
        const size_t nibbles = ColumnsRecord<codec>::nibbles(b), high = record.high(b);
        float* out = y + kOutBlock * b;
        if constexpr (kHalves<codec>) {
          ColumnDots<bits> first, second;
          first.template add<codec>(channels, size, list, q, first_quads, nibbles, high);
          second.template add<codec>(channels, size, list + 4 * first_quads, q + 4 * first_quads, quads - first_quads,
                                     nibbles, high);
#pragma GCC unroll 4
          for (int t = 0; t < 4; ++t) {
            const GroupScales s = record.scales(g, static_cast<size_t>(kOutBlock * b + kTile * t));
            f32x16 acc = load(out + kTile * t);
            acc = end_half<codec>(acc, first.total(t), s.d, x.scale[at], x.sums[2 * at]);
            acc = end_half<codec>(acc, second.total(t), s.d2, x.scale[at], x.sums[2 * at + 1]);
            store(out + kTile * t, acc);
          }
        } else {
          ColumnDots<bits> dots;
          dots.template add<codec>(channels, size, list, q, quads, nibbles, high);
#pragma GCC unroll 4
          for (int t = 0; t < 4; ++t) {
            const GroupScales s = record.scales(g, static_cast<size_t>(kOutBlock * b + kTile * t));
            const f32x16 acc = load(out + kTile * t);
            store(out + kTile * t,
                  end_group<codec>(acc, dots.total(t), s, x.scale[at], x.bias[at], x.sums + 2 * at));
          }
        }
      }
      int read = 0;  // padding repeats a channel: no bytes
      for (int i = 0; i < 4 * quads; ++i) read += i == 0 || list[i] != list[i - 1];
      bytes += size * static_cast<size_t>(read) + record.width * group_scale_bytes(codec);
    }
    if (block_read) bytes += record.width * block_scale_bytes(codec);
    record.p += record.bytes();
  }
  return bytes;
}

template <Codec codec>
void gemm(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int block_begin, int block_end, uint8_t* scratch) {
  constexpr int kGroups = groups_per_block(codec);
  for (int b = block_begin; b < block_end; ++b) {
    const int chunk = b * kOutBlock / w.chunk;
    const int in_chunk = b - chunk * (w.chunk / kOutBlock);
    for (int row = 0; row < x.rows; row += kGemmRows) {
      const int rows = x.rows - row < kGemmRows ? x.rows - row : kGemmRows;
      ColumnsRecord<codec> record{w.chunk_data(chunk), static_cast<size_t>(w.chunk_width(chunk))};
      uint8_t* sums_at = scratch + kExpandedBytes;
      const size_t sums_bytes = static_cast<size_t>(rows) * kTile * 2 * sizeof(float);
      for (int segment = 0; segment < w.segments; ++segment) {
        for (int t = 0; t < 4; ++t) TileSums(sums_at + sums_bytes * static_cast<size_t>(t), rows).begin_segment();
        for (int block = w.segment_begin(segment); block < w.segment_begin(segment + 1); ++block) {
          for (int g = 0; g < kGroups; ++g) {
            record.expand(g, in_chunk, scratch);
            for (int t = 0; t < 4; ++t) {
              const GroupScales s = record.scales(g, static_cast<size_t>(kOutBlock * in_chunk + kTile * t));
              TileSums sums(sums_at + sums_bytes * static_cast<size_t>(t), rows);
              gemm_group<codec>(scratch + 512 * t, s, x, block * kGroups + g, row, rows, sums.partial);
            }
          }
          record.p += record.bytes();
        }
        for (int t = 0; t < 4; ++t) TileSums(sums_at + sums_bytes * static_cast<size_t>(t), rows).end_segment(segment);
      }
      for (int t = 0; t < 4; ++t) {
        TileSums(sums_at + sums_bytes * static_cast<size_t>(t), rows)
            .store_to(y + static_cast<size_t>(row) * static_cast<size_t>(ldy) + kOutBlock * b + kTile * t, ldy);
      }
    }
  }
}

}  // namespace

size_t columns_gemv(const Matrix& w, const QuantizedRows& x, const ActiveChannels& active, float* y, int segment,
                    int chunk) {
  size_t bytes = 0;
  THINFER_FOR_CODEC(w.codec, bytes = gemv<codec>(w, x, active, y, segment, chunk));
  return bytes;
}
void columns_gemm(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int block_begin, int block_end,
                  uint8_t* scratch) {
  THINFER_FOR_CODEC(w.codec, gemm<codec>(w, x, y, ldy, block_begin, block_end, scratch));
}

}  // namespace thinfer::THINFER_ISA
