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

  THINFER_INLINE_MEMBER void list(const uint8_t* first, const ChannelPlaces& place, const uint8_t* channel, int n) {
    count = n;
    distinct = 0;
    for (int i = 0; i < n; i += 4) {
      for (int j = i; j < i + 4; ++j) {
        at[j] = first + place(channel[j]);
        distinct += j == i || channel[j] != channel[j - 1];  // a quad is never padding alone
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
// next one. Without fetching a core waits for memory, as the channels that are read follow no pattern; a whole group ahead,
// lines leave the first-level cache before they are used, and fetching them again takes line fill buffers from memory.
// Neighbouring lines of a channel are fetched together where that measured better: on an Intel Xeon with AVX-512 two are 5 to
// 15 % faster than one by one, and than four or whole channels; on an AMD Zen 3 with AVX2, whose cache is smaller, single ones
// are by 8 %. Other processors were not measured.
#if defined(THINFER_ISA_AVX512)
constexpr int kAheadBlocks = 16, kLines = 2;
// Blocks of a step. One that is left over at the end stands for two.
template <Codec codec>
constexpr int kStep = kBits<codec> == 8 ? 1 : 2;
#else
constexpr int kAheadBlocks = 8, kLines = 1;
template <Codec codec>
constexpr int kStep = 1;
#endif

// A group's channels and the block of outputs at which they will be read; `last`: the step that ends the group.
struct Place {
  const Channels& channels;
  int block64;
  bool last;
};

// The order in which a group's blocks of outputs are passed, and the next group's after it.
struct Sweep {
  const Channels &here, &next;
  int begin, end, step, blocks, ahead;

  THINFER_INLINE_MEMBER Sweep(const Channels& group, const Channels& after, int first, int last, int of_step)
      : here(group),
        next(after),
        begin(first),
        end(last),
        step(of_step),
        blocks((end - begin + step - 1) / step * step),
        ahead(blocks < kAheadBlocks ? blocks : kAheadBlocks) {}
  // What is read `ahead` blocks after this step: each block is met once.
  THINFER_INLINE_MEMBER Place after(int block64) const {
    const int at = block64 + ahead, met = at < begin + blocks ? at : at - blocks;
    return {at < begin + blocks ? here : next, met, met + step >= end};
  }
};

// Cache lines that are fetched while a step (one block of outputs, or two) is computed. A step fetches its share of the
// channels, one with each quad: all at once, a core would have nothing in flight while it computes.
struct Upcoming {
  const uint8_t* const* channel;
  const uint8_t* const* end;
  size_t line, second;

  template <Codec codec>
  static THINFER_INLINE_MEMBER Upcoming of_step(const Place& next, const ColumnsRecord<codec>& record) {
    constexpr int kHeld = kLines * (kBits<codec> == 8 ? 1 : 2);  // blocks that the lines hold
    static_assert(kFetchBlocks % kHeld == 0 && kHeld % kStep<codec> == 0);
    constexpr unsigned kSteps = kHeld / kStep<codec>;
    const unsigned step = static_cast<unsigned>(next.block64) % kHeld / kStep<codec>, count = static_cast<unsigned>(next.channels.count);
    const size_t line = record.nibbles(next.block64 & -kHeld);
    const size_t second = line + 64 < record.places().bytes ? line + 64 : line;
    const unsigned end = next.last ? count : count * (step + 1) / kSteps;  // a group may end inside what the lines hold
    return {next.channels.at + count * step / kSteps, next.channels.at + end, line, second};
  }
  THINFER_INLINE_MEMBER void fetch_one() {
    if (channel == end) return;
    __builtin_prefetch(*channel + line, 0, 3);
    if constexpr (kLines == 2) __builtin_prefetch(*channel + second, 0, 3);
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

// Fetches what else the next step reads: scales, and the bits above the nibbles.
template <Codec codec>
THINFER_INLINE void fetch_scales_and_high(const Place& next, const ColumnsRecord<codec>& record) {
  constexpr int bits = kBits<codec>;
  constexpr size_t kPlane = traits(codec).block == 32 ? 2 : 1;
  constexpr size_t kPlanes = static_cast<size_t>(group_scale_bytes(codec)) / kPlane;
  const Channels& channels = next.channels;
  const int block64 = next.block64;
  if (channels.count == 0) return;
  const uint8_t* scales = channels.scales + kPlane * kOutBlock * static_cast<size_t>(block64);
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    for (size_t line = 0; line < kPlane * kStep<codec>; ++line) __builtin_prefetch(scales + plane * kPlane * record.width + 64 * line, 0, 3);
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
  fetch_scales_and_high<codec>(next, record);
  Upcoming upcoming = Upcoming::of_step<codec>(next, record);
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
  const ColumnsRecord<codec> start{w.chunk_data(chunk), static_cast<size_t>(width)};
  const auto record_of = [&](int group) __attribute__((always_inline)) {
    return ColumnsRecord<codec>{start.p + static_cast<size_t>(group / kGroups) * start.bytes(), start.width};
  };
  for (int i = 0; i < outputs; i += 16) store(y + kOutBlock * block_begin + i, zero());
  const int last = w.segment_begin(segment + 1) * kGroups;
  // The next group some channel of which is read.
  const auto list_from = [&](int group, Channels& out) __attribute__((always_inline)) {
    while (group < last && active.quads[2 * group] + active.quads[2 * group + 1] == 0) ++group;
    out.count = 0;
    if (group >= last) return group;
    const ColumnsRecord<codec> record = record_of(group);
    out.scales = record.group(group % kGroups);
    out.list(record.channels(group % kGroups), record.places(), active.channel + kGroup * group,
             4 * (active.quads[2 * group] + active.quads[2 * group + 1]));
    return group;
  };
  Channels lists[2];
  size_t bytes = 0;
  int turn = 0, block = -1;
  for (int group = list_from(w.segment_begin(segment) * kGroups, lists[0]); group < last; turn ^= 1) {
    const Channels& here = lists[turn];
    Channels& next = lists[turn ^ 1];
    const int after = list_from(group + 1, next);
    const ColumnsRecord<codec> record = record_of(group);
    const int g = group % kGroups;
    const size_t at = static_cast<size_t>(group) * static_cast<size_t>(x.stride);
    const int first_quads = active.quads[2 * group];
    const Quads quads{here.at, active.q + kGroup * group, here.count / 4};
    const GroupInput in{x.scale[at], x.bias[at], {x.sums[2 * at], x.sums[2 * at + 1]}};
    const Sweep sweep(here, next, block_begin, block_end, kStep<codec>);
    int b = block_begin;
#if defined(THINFER_ISA_AVX512)
    if constexpr (kBits<codec> != 8) {
      for (; b + 2 <= block_end; b += 2) add_blocks<codec, PairDots<codec>>(quads, first_quads, sweep, record, g, b, in, y);
    }
#endif
    for (; b < block_end; ++b) add_blocks<codec, BlockDots<codec>>(quads, first_quads, sweep, record, g, b, in, y);
    bytes += static_cast<size_t>(channel_bytes(codec, outputs) * here.distinct + outputs * group_scale_bytes(codec));
    if (group / kGroups != block) bytes += static_cast<size_t>(outputs * block_scale_bytes(codec));
    block = group / kGroups;
    group = after;
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
