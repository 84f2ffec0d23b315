// y = W x over the columns layout for a few rows: the channels that any of them uses, group after group.
#include "cpu/columns_record.h"
#include "union_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

// Where the channels of one group of one chunk are.
struct GroupChannels {
  const uint8_t* base;
  ChannelPlaces place;
  const uint8_t* list;
  int count;  // in whole quads

  THINFER_INLINE_MEMBER const uint8_t* at(int i) const { return base + place(list[i]); }
  // Channels that differ: padding repeats the last one of its half.
  THINFER_INLINE_MEMBER int distinct() const {
    int n = 0;
    for (int i = 0; i < count; ++i) n += i == 0 || list[i] != list[i - 1];
    return n;
  }
};

// A channel's whole slice is used: fetched while the group before is multiplied.
THINFER_INLINE void prefetch_group(const GroupChannels& next, int block64, int blocks64) {
  const size_t from = next.place.bytes * static_cast<size_t>(block64) / static_cast<size_t>(blocks64);
  const size_t to = next.place.bytes * static_cast<size_t>(block64 + 1) / static_cast<size_t>(blocks64);
  for (int i = 0; i < next.count; ++i) {
    for (size_t line = from & ~size_t{63}; line < to; line += 64) __builtin_prefetch(next.at(i) + line, 0, 3);
  }
}

// The quads of a block of 64 outputs: 8 vectors of 8 outputs each.
template <Codec codec>
THINFER_INLINE void expand_block(const GroupChannels& channels, const ColumnsRecord<codec>& record, int block64, uint8_t* out) {
  const size_t nibbles = record.nibbles(block64), high = record.high(block64);
  for (int i = 0; i < channels.count; i += 4, out += 256) {
    each_column_vector<kBits<codec>>(channels.at(i), channels.at(i + 1), channels.at(i + 2), channels.at(i + 3), nibbles, high,
                                     [&](int k, u8x32 q) __attribute__((always_inline)) { store_u8x32(out + 32 * k, q); });
  }
}

// Sums of 16 outputs over quads [first, last).
template <Codec codec>
THINFER_INLINE i32x16 dot_tile(const uint8_t* quants, const int8_t* q, int tile, int first, int last) {
  Dot8<kBits<codec>> lo, hi;
  for (int i = first; i < last; ++i) {
    const uint8_t* at = quants + 256 * i + 64 * tile;
    lo.add(load_u8x32(at), q + 4 * i, i - first);
    hi.add(load_u8x32(at + 32), q + 4 * i, i - first);
  }
  return join(lo.total(), hi.total());
}

template <Codec codec>
size_t gemm(const Matrix& w, const QuantizedRows& x, const UnionChannels& channels, float* y, int ldy, int segment, int chunk,
            uint8_t* scratch) {
  constexpr int kGroups = groups_per_block(codec);
  const int width = w.chunk_width(chunk), blocks64 = width / kOutBlock;
  ColumnsRecord<codec> record{w.chunk_data(chunk), static_cast<size_t>(width)};
  record.p += static_cast<size_t>(w.segment_begin(segment)) * record.bytes();
  for (int r = 0; r < x.rows; ++r) {
    for (int o = 0; o < width; o += 16) store(y + static_cast<ptrdiff_t>(r) * ldy + o, zero());
  }
  const int begin = w.segment_begin(segment) * kGroups, end = w.segment_begin(segment + 1) * kGroups;
  const auto listed = [&](int group, const uint8_t* base) {
    return GroupChannels{base, record.places(), channels.channel + kGroup * group,
                         4 * (channels.quads[2 * group] + channels.quads[2 * group + 1])};
  };
  size_t bytes = 0;
  bool block_read = false;
  for (int group = begin; group < end; ++group) {
    const int g = group % kGroups;
    if (g == 0) block_read = false;
    const GroupChannels here = listed(group, record.channels(g));
    if (here.count > 0) {
      block_read = true;
      GroupChannels next{nullptr, {}, nullptr, 0};
      if (group + 1 < end) {
        const ColumnsRecord<codec> after{record.p + record.bytes(), record.width};
        next = listed(group + 1, g + 1 < kGroups ? record.channels(g + 1) : after.channels(0));
      }
      const int first = channels.quads[2 * group], last = here.count / 4;
      for (int b = 0; b < blocks64; ++b) {
        prefetch_group(next, b, blocks64);
        expand_block<codec>(here, record, b, scratch);
        for (int t = 0; t < 4; ++t) {
          const int out = kOutBlock * b + kTile * t;
          const GroupScales s = record.scales(g, static_cast<size_t>(out));
          for (int r = 0; r < x.rows; ++r) {
            const size_t at = static_cast<size_t>(group) * static_cast<size_t>(x.stride) + static_cast<size_t>(r);
            const int8_t* q = channels.q + (static_cast<size_t>(group) * static_cast<size_t>(x.rows) + static_cast<size_t>(r)) * kGroup;
            float* to = y + static_cast<ptrdiff_t>(r) * ldy + out;
            f32x16 acc = load(to);
            if constexpr (kHalves<codec>) {
              acc = end_half<codec>(acc, dot_tile<codec>(scratch, q, t, 0, first), s.d, x.scale[at], x.sums[2 * at]);
              acc = end_half<codec>(acc, dot_tile<codec>(scratch, q, t, first, last), s.d2, x.scale[at], x.sums[2 * at + 1]);
            } else {
              acc = end_group<codec>(acc, dot_tile<codec>(scratch, q, t, 0, last), s, x.scale[at], x.bias[at], x.sums + 2 * at);
            }
            store(to, acc);
          }
        }
      }
      bytes += here.place.bytes * static_cast<size_t>(here.distinct()) + record.width * static_cast<size_t>(group_scale_bytes(codec));
    }
    if (g + 1 == kGroups) {
      if (block_read) bytes += record.width * static_cast<size_t>(block_scale_bytes(codec));
      record.p += record.bytes();
    }
  }
  return bytes;
}

}  // namespace

void find_union(const QuantizedRows& x, int begin, int end, bool halves, const UnionChannels& out) {
  for (int g = begin; g < end; ++g) {
    const size_t at = static_cast<size_t>(g) * static_cast<size_t>(x.stride);
    uint8_t* channel = out.channel + kGroup * g;
    uint32_t used = 0;
    for (int r = 0; r < x.rows; ++r) {
      const float scale = x.scale[at + static_cast<size_t>(r)];
      // A NaN scale must reach every output, so such a group counts as read in full.
      used |= scale == scale ? nonzero_bits(x.q + (at + static_cast<size_t>(r)) * kGroup) : ~uint32_t{0};
    }
    int filled = 0;
    bool real[kGroup] = {};
    out.quads[2 * g + 1] = 0;
    for (int first = 0; first < kGroup; first += halves ? 16 : 32) {
      const int start = filled;
      for (uint32_t rest = halves ? used >> first & 0xffff : used; rest != 0; rest &= rest - 1) {
        channel[filled] = static_cast<uint8_t>(first + __builtin_ctz(rest));
        real[filled++] = true;
      }
      for (; filled & 3; ++filled) channel[filled] = channel[filled - 1];
      out.quads[2 * g + (first ? 1 : 0)] = static_cast<uint8_t>((filled - start) / 4);
    }
    for (int r = 0; r < x.rows; ++r) {
      const int8_t* from = x.q + (at + static_cast<size_t>(r)) * kGroup;
      int8_t* to = out.q + (static_cast<size_t>(g) * static_cast<size_t>(x.rows) + static_cast<size_t>(r)) * kGroup;
      for (int i = 0; i < filled; ++i) to[i] = real[i] ? from[channel[i]] : static_cast<int8_t>(0);
    }
  }
}

size_t union_gemm(const Matrix& w, const QuantizedRows& x, const UnionChannels& channels, float* y, int ldy, int segment,
                  int chunk, uint8_t* scratch) {
  size_t bytes = 0;
  THINFER_FOR_CODEC(w.codec, bytes = gemm<codec>(w, x, channels, y, ldy, segment, chunk, scratch));
  return bytes;
}

}  // namespace thinfer::THINFER_ISA
