// y = W x over the columns layout, integer activations: channels whose activation is 0 are not read.
#include "cpu/columns_record.h"
#include "linear_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

// Where the channels of one group that are read lie, found once for all blocks of outputs.
struct Channels {
  const uint8_t* at[kGroup];
  const uint8_t* scales;  // of the group
  int count = 0;          // in whole quads
  int distinct = 0;       // padding repeats a channel

  THINFER_INLINE_MEMBER void list(const uint8_t* first, size_t size, const uint8_t* channel, int n) {
    count = n;
    distinct = 0;
    for (int i = 0; i < n; i += 4) {
      for (int j = i; j < i + 4; ++j) {
        at[j] = first + size * channel[j];
        distinct += j == i || channel[j] != channel[j - 1];
      }
    }
  }
};

// The quads of one group that are multiplied.
struct Quads {
  const uint8_t* const* channel;
  const int8_t* q;
  int count;

  THINFER_INLINE_MEMBER Quads from(int first) const { return {channel + 4 * first, q + 4 * first, count - first}; }
  THINFER_INLINE_MEMBER Quads until(int last) const { return {channel, q, last}; }
};

// Blocks of outputs from those that are multiplied to those whose cache lines are fetched, past the end of a group in the
// next one. Without fetching a core waits for memory, as the channels that are read follow no pattern; a whole group ahead
// the first-level cache would lose a part of them before they are used, and to get them back takes the buffers that memory
// needs.
constexpr int kAheadBlocks = 16;

// A group's channels and the block of outputs at which they will be read.
struct Place {
  const Channels& channels;
  int block64;
};

// Of a group's channels, those that are read next, `kAheadBlocks` after the block that is multiplied.
struct Sweep {
  const Channels &here, &next;
  int begin, end;  // blocks

  THINFER_INLINE_MEMBER Place after(int block64) const {
    // In whole fetches, so that each line is fetched once.
    const int blocks = (end - begin + kFetchBlocks - 1) / kFetchBlocks * kFetchBlocks;
    const int ahead = block64 + (blocks > kAheadBlocks ? kAheadBlocks : blocks);
    return ahead < begin + blocks ? Place{here, ahead} : Place{next, ahead - blocks};
  }
};

// Cache lines that are fetched while a step (one block of outputs, or two) is computed. Two neighbouring lines of a channel
// are fetched together, which measured 5 to 15 % better than one by one, and better than four or whole channels. A step
// fetches its share of the channels, one with each quad: all at once, a core would have nothing in flight while it computes.
struct Upcoming {
  const uint8_t* const* channel;
  const uint8_t* const* end;
  size_t line, second;

  template <Codec codec, int blocks>
  static THINFER_INLINE_MEMBER Upcoming of_step(const Place& next, const ColumnsRecord<codec>& record) {
    constexpr int kPair = kBits<codec> == 8 ? 2 : 4;  // blocks that two lines of a channel hold
    static_assert(kFetchBlocks % kPair == 0);
    constexpr unsigned kSteps = kPair / blocks;
    const unsigned step = static_cast<unsigned>(next.block64) % kPair / blocks, count = static_cast<unsigned>(next.channels.count);
    const size_t line = record.nibbles(next.block64 & -kPair);
    const size_t second = line + 64 < record.channel() ? line + 64 : line;
    return {next.channels.at + count * step / kSteps, next.channels.at + count * (step + 1) / kSteps, line, second};
  }
  THINFER_INLINE_MEMBER void fetch_one() {
    if (channel == end) return;
    __builtin_prefetch(*channel + line, 0, 3);
    __builtin_prefetch(*channel + second, 0, 3);
    ++channel;
  }
  THINFER_INLINE_MEMBER void fetch_rest() {
    while (channel != end) fetch_one();
  }
};

// Sums of one block of 64 outputs.
template <Codec codec>
struct BlockDots {
  static constexpr int kBlocks = 1;
  static constexpr bool kWithoutOffset = false;
  Dot8<kBits<codec>> dot[8];
  THINFER_INLINE_MEMBER explicit BlockDots(int32_t) {}
  THINFER_INLINE_MEMBER void add(const Quads& quads, const ColumnsRecord<codec>& record, int block64, Upcoming& upcoming) {
    const size_t nibbles = record.nibbles(block64), high = record.high(block64);
    for (int i = 0; i < quads.count; ++i) {
      upcoming.fetch_one();
      each_column_vector<kBits<codec>>(
          quads.channel[4 * i], quads.channel[4 * i + 1], quads.channel[4 * i + 2], quads.channel[4 * i + 3], nibbles, high,
          [&](int k, u8x32 w) __attribute__((always_inline)) { dot[k].add(w, quads.q + 4 * i, i); });
    }
  }
  template <int block>
  THINFER_INLINE_MEMBER i32x16 total(int tile) {
    return join(dot[2 * tile].total(), dot[2 * tile + 1].total());
  }
};

#if defined(THINFER_ISA_AVX512)
// Sums of two blocks side by side.
template <Codec codec>
struct PairDots {
  static constexpr int kBlocks = 2;
  static constexpr bool kWithoutOffset = kBits<codec> == 4;
  DotPair dot[8];
  // Sums of 4 bits begin at what their offset adds up to, which they need not lose later; `sum` is that of the inputs.
  THINFER_INLINE_MEMBER explicit PairDots(int32_t sum) {
    if constexpr (kWithoutOffset) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        dot[k] = DotPair(-17 * kOffset<codec> * sum);
        dot[k + 4] = DotPair(-16 * kOffset<codec> * sum);
      }
    }
  }
  THINFER_INLINE_MEMBER void add(const Quads& quads, const ColumnsRecord<codec>& record, int block64, Upcoming& upcoming) {
    constexpr int bits = kBits<codec>;
    const size_t nibbles = record.nibbles(block64), high = record.high(block64);
    constexpr size_t kHigh = bits == 6 ? 16 : 8;
    for (int i = 0; i < quads.count; ++i) {
      upcoming.fetch_one();
      const uint8_t *a = quads.channel[4 * i], *b = quads.channel[4 * i + 1], *c = quads.channel[4 * i + 2],
                    *d = quads.channel[4 * i + 3];
      u8x64 w[4], h0 = {}, h1 = {};
      interleave4(a + nibbles, b + nibbles, c + nibbles, d + nibbles, w);
      if constexpr (bits == 4) {
        // Whole bytes and bytes without their low half: separated at the end, exactly, as VNNI sums in int32.
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          dot[k].add(w[k], quads.q + 4 * i);
          dot[k + 4].add(without_low_nibbles(w[k]), quads.q + 4 * i);
        }
        continue;
      }
      const auto above = [&](size_t at) __attribute__((always_inline)) {
        return join_u8(interleave4_short(a + at, b + at, c + at, d + at),
                       interleave4_short(a + at + kHigh, b + at + kHigh, c + at + kHigh, d + at + kHigh));
      };
      if constexpr (bits > 4) h0 = above(high);
      if constexpr (bits > 5) h1 = above(high + 8);
      each_nibble_vector<bits>(w, h0, h1, [&](int k, u8x64 v) __attribute__((always_inline)) { dot[k].add(v, quads.q + 4 * i); });
    }
    if constexpr (bits == 4) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) separate_nibbles(dot[k], dot[k + 4]);
    }
  }
  template <int block>
  THINFER_INLINE_MEMBER i32x16 total(int tile) const {
    return join_pairs<block>(dot[2 * tile], dot[2 * tile + 1]);
  }
};
#endif

// What a group's float step needs.
struct GroupInput {
  float scale, bias;
  int32_t sums[2];
};

// y of block + `index` of the sums += the group's part.
template <Codec codec, int index, class Dots>
THINFER_INLINE void end_block(Dots& first, Dots& second, const ColumnsRecord<codec>& record, int g, int block64,
                              const GroupInput& in, float* y) {
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const int out = kOutBlock * (block64 + index) + kTile * t;
    const GroupScales s = record.scales(g, static_cast<size_t>(out));
    f32x16 acc = load(y + out);
    if constexpr (kHalves<codec>) {
      acc = end_half<codec>(acc, first.template total<index>(t), s.d, in.scale, in.sums[0]);
      acc = end_half<codec>(acc, second.template total<index>(t), s.d2, in.scale, in.sums[1]);
    } else {
      acc = end_group<codec>(acc, first.template total<index>(t), s, in.scale, in.bias, in.sums);
    }
    store(y + out, acc);
  }
}

// Fetches what else is read next at `blocks` blocks of outputs: scales, and the bits above the nibbles.
template <Codec codec, int blocks>
THINFER_INLINE void fetch_scales_and_high(const Place& next, const ColumnsRecord<codec>& record) {
  constexpr int bits = kBits<codec>;
  constexpr size_t kPlane = traits(codec).block == 32 ? 2 : 1;
  constexpr size_t kPlanes = static_cast<size_t>(group_scale_bytes(codec)) / kPlane;
  const auto& [channels, block64] = next;
  if (channels.count == 0) return;
  const uint8_t* scales = channels.scales + kPlane * kOutBlock * static_cast<size_t>(block64);
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    for (size_t line = 0; line < kPlane * blocks; ++line) __builtin_prefetch(scales + plane * kPlane * record.width + 64 * line, 0, 3);
  }
  if constexpr (bits == 5 || bits == 6) {
    constexpr int kLine = bits == 6 ? 4 : 8;  // blocks whose bits above the nibbles are one line
    static_assert(kFetchBlocks % kLine == 0);
    if (block64 % kLine == 0) {
      for (int i = 0; i < channels.count; ++i) __builtin_prefetch(channels.at[i] + record.high(block64), 0, 3);
    }
  }
}

template <Codec codec, class Dots>
THINFER_INLINE void add_blocks(const Quads& quads, int first_quads, const Sweep& sweep, const ColumnsRecord<codec>& record, int g,
                               int block64, const GroupInput& in, float* y) {
  const Place next = sweep.after(block64);
  fetch_scales_and_high<codec, Dots::kBlocks>(next, record);
  Upcoming upcoming = Upcoming::of_step<codec, Dots::kBlocks>(next, record);
  Dots first(in.sums[0] + in.sums[1]), second(0);
  GroupInput rest = in;
  if constexpr (Dots::kWithoutOffset) rest.sums[0] = rest.sums[1] = 0;
  if constexpr (kHalves<codec>) {
    first.add(quads.until(first_quads), record, block64, upcoming);
    second.add(quads.from(first_quads), record, block64, upcoming);
  } else {
    first.add(quads, record, block64, upcoming);
  }
  upcoming.fetch_rest();
  end_block<codec, 0>(first, second, record, g, block64, rest, y);
  if constexpr (Dots::kBlocks == 2) end_block<codec, 1>(first, second, record, g, block64, rest, y);
}

template <Codec codec>
size_t gemv(const Matrix& w, const QuantizedRows& x, const ActiveChannels& active, float* y, int segment, int chunk,
            int block_begin, int block_end) {
  constexpr int kGroups = groups_per_block(codec);
  const int width = w.chunk_width(chunk), outputs = kOutBlock * (block_end - block_begin);
  ColumnsRecord<codec> record{w.chunk_data(chunk), static_cast<size_t>(width)};
  const size_t size = record.channel();
  record.p += static_cast<size_t>(w.segment_begin(segment)) * record.bytes();
  for (int i = 0; i < outputs; i += 16) store(y + kOutBlock * block_begin + i, zero());
  size_t bytes = 0;
  const int last = w.segment_begin(segment + 1) * kGroups;
  const auto list = [&](int group, const ColumnsRecord<codec>& of, int g, Channels& out) __attribute__((always_inline)) {
    out.scales = of.group(g);
    const int count = 4 * (active.quads[2 * group] + active.quads[2 * group + 1]);
    out.list(of.channels(g), size, active.channel + kGroup * group, count);
  };
  Channels lists[2];
  list(w.segment_begin(segment) * kGroups, record, 0, lists[w.segment_begin(segment) * kGroups % 2]);
  for (int block = w.segment_begin(segment); block < w.segment_begin(segment + 1); ++block) {
    bool block_read = false;
    const ColumnsRecord<codec> after{record.p + record.bytes(), record.width};
    for (int g = 0; g < kGroups; ++g) {
      const int group = block * kGroups + g;
      const Channels& here = lists[group % 2];
      Channels& next = lists[(group + 1) % 2];
      next.count = 0;
      if (group + 1 < last) list(group + 1, g + 1 < kGroups ? record : after, g + 1 < kGroups ? g + 1 : 0, next);
      if (here.count == 0) continue;
      block_read = true;
      const size_t at = static_cast<size_t>(group) * static_cast<size_t>(x.stride);
      const int first_quads = active.quads[2 * group];
      const Quads quads{here.at, active.q + kGroup * group, here.count / 4};
      const GroupInput in{x.scale[at], x.bias[at], {x.sums[2 * at], x.sums[2 * at + 1]}};
      const Sweep sweep{here, next, block_begin, block_end};
      int b = block_begin;
#if defined(THINFER_ISA_AVX512)
      if constexpr (kBits<codec> != 8) {
        for (; b + 2 <= block_end; b += 2) add_blocks<codec, PairDots<codec>>(quads, first_quads, sweep, record, g, b, in, y);
      }
#endif
      for (; b < block_end; ++b) add_blocks<codec, BlockDots<codec>>(quads, first_quads, sweep, record, g, b, in, y);
      bytes += static_cast<size_t>(channel_bytes(codec, outputs) * here.distinct + outputs * group_scale_bytes(codec));
    }
    if (block_read) bytes += static_cast<size_t>(outputs * block_scale_bytes(codec));
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
                    int chunk, int block_begin, int block_end) {
  size_t bytes = 0;
  THINFER_FOR_CODEC(w.codec, bytes = gemv<codec>(w, x, active, y, segment, chunk, block_begin, block_end));
  return bytes;
}
void columns_gemm(const Matrix& w, const QuantizedRows& x, float* y, int ldy, int block_begin, int block_end,
                  uint8_t* scratch) {
  THINFER_FOR_CODEC(w.codec, gemm<codec>(w, x, y, ldy, block_begin, block_end, scratch));
}

}  // namespace thinfer::THINFER_ISA
