// In-memory weight codecs and the byte layouts of packed matrices.
//
// Every GGUF block type decodes losslessly into one codec: an unsigned integer q of 4, 5, 6 or 8 bits with an offset,
// and scales per group of the input. weight = d * (q - offset) + m.
//   *_d   d is a float16 per group of 32                          (Q4_0, Q5_0, Q8_0)
//   *_dm  d and m are float16 per group of 32                      (Q4_1, Q5_1)
//   *_k   d = D * sc and m = -M * mn; sc, mn uint8 per group of 32, D, M float16 per 256 (Q4_K, Q5_K)
//   u6_k  d = D * sc; sc int8 per group of 16, D float16 per 256   (Q6_K)
// The products of the two-level scales are exact in float32, so they lose nothing against the file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"

namespace thinfer {

enum class Codec : uint8_t { u4_d, u4_dm, u5_d, u5_dm, i8_d, u4_k, u5_k, u6_k, f16, bf16, f32 };
enum class ScaleKind : uint8_t { d, dm, k, k16, none };
// rows: 16 output rows interleaved, for dense use. columns: input channels contiguous over `chunk` outputs, for input
// skipping. neurons: each output row contiguous, for output skipping. Float codecs have no rows layout (columns with chunk
// 64 are read in order as well).
enum class Layout : uint8_t { rows, columns, neurons };

constexpr int kGroup = 32;    // inputs that share an activation scale
constexpr int kTile = 16;     // output rows interleaved in the rows layout
constexpr int kOutBlock = 64; // outputs decoded together in the columns layout
constexpr int kSuper = 8;     // groups decoded together in the neurons layout

struct CodecTraits {
  int bits;         // per weight, scales apart; 16 or 32 for floats
  int offset;       // subtracted from q
  ScaleKind scale;
  int block;        // inputs per packed record: 32, or 256 with two-level scales
};

static constexpr CodecTraits traits(Codec codec) {
  switch (codec) {
    case Codec::u4_d: return {4, 8, ScaleKind::d, 32};
    case Codec::u4_dm: return {4, 0, ScaleKind::dm, 32};
    case Codec::u5_d: return {5, 16, ScaleKind::d, 32};
    case Codec::u5_dm: return {5, 0, ScaleKind::dm, 32};
    case Codec::i8_d: return {8, 128, ScaleKind::d, 32};
    case Codec::u4_k: return {4, 0, ScaleKind::k, 256};
    case Codec::u5_k: return {5, 0, ScaleKind::k, 256};
    case Codec::u6_k: return {6, 32, ScaleKind::k16, 256};
    case Codec::f16: return {16, 0, ScaleKind::none, 32};
    case Codec::bf16: return {16, 0, ScaleKind::none, 32};
    case Codec::f32: return {32, 0, ScaleKind::none, 32};
  }
  return {0, 0, ScaleKind::none, 32};
}
static constexpr bool is_float(Codec codec) { return traits(codec).scale == ScaleKind::none; }
static constexpr int groups_per_block(Codec codec) { return traits(codec).block / kGroup; }

// Bytes of scales per output and group (`group_scales`), and per output and block (`block_scales`).
static constexpr int group_scale_bytes(Codec codec) {
  switch (traits(codec).scale) {
    case ScaleKind::d: return 2;
    case ScaleKind::dm: return 4;
    case ScaleKind::k: return 2;
    case ScaleKind::k16: return 2;
    case ScaleKind::none: return 0;
  }
  return 0;
}
static constexpr int block_scale_bytes(Codec codec) {
  switch (traits(codec).scale) {
    case ScaleKind::k: return 4;
    case ScaleKind::k16: return 2;
    default: return 0;
  }
}

// ---- rows: record (tile, block) = [groups: 32 x 16 quants][groups: scales][block scales], records of a tile in order.
// Quants of a group are 8 vectors v of 64 bytes, byte 4*r + i = input 4*v + i of row r. Low nibbles of vectors 2c and
// 2c+1 share 64 bytes (low, high half-byte); then the bits above the nibble: bit v of 64 bytes (5 bits), or bit pairs
// 2*(v%4) of 64 bytes v/4 (6 bits). 8-bit quants are the 8 vectors as they are.
static constexpr int rows_group_bytes(Codec codec) { return traits(codec).bits * kGroup * kTile / 8; }
static constexpr int rows_record_bytes(Codec codec) {
  return groups_per_block(codec) * (rows_group_bytes(codec) + kTile * group_scale_bytes(codec)) +
         kTile * block_scale_bytes(codec);
}

// ---- columns: record (chunk, block) = [block scales][per group: scales as planes over the chunk's outputs, then 32
// channels of `chunk` outputs]. A channel is its nibbles, then its bits above, each a run over blocks of 64 outputs.
static constexpr int channel_bytes(Codec codec, int outputs) { return traits(codec).bits * outputs / 8; }
// Where the channels of a group begin. Of whole KiB, a cache line is left free after every fourth: what they hold for the same
// outputs would lie in a few sets of the first-level cache (of 2 KiB in two, room for 16 lines), and go before it is used.
struct ChannelPlaces {
  size_t bytes, gap;  // of a channel, after every fourth
  THINFER_INLINE_MEMBER constexpr size_t operator()(int channel) const {
    return bytes * static_cast<size_t>(channel) + gap * static_cast<size_t>(channel / 4);
  }
};
static constexpr ChannelPlaces channel_places(Codec codec, int outputs) {
  const auto bytes = static_cast<size_t>(channel_bytes(codec, outputs));
  return {bytes, bytes % 1024 == 0 ? size_t{64} : 0};
}
static constexpr size_t columns_group_bytes(Codec codec, int chunk) {
  return static_cast<size_t>(chunk) * group_scale_bytes(codec) + channel_places(codec, chunk)(kGroup);
}
static constexpr size_t columns_record_bytes(Codec codec, int chunk) {
  return groups_per_block(codec) * columns_group_bytes(codec, chunk) +
         static_cast<size_t>(chunk) * block_scale_bytes(codec);
}
// Where output o (0..63) of a block of 64 stands after interleaving four channels by bytes and then by 16-bit words in
// 128-bit lanes: vector k = o/8 of 8 outputs; its byte is the same for k and k+4 (low and high half-byte).
static constexpr int columns_byte(int o) {
  const int k = (o / 8) % 4, r = o % 8;
  return r < 4 ? 4 * k + r : 16 + 4 * k + (r - 4);
}

// ---- neurons: an output row is a sequence of records of kSuper groups (the last may have fewer, n), so that one vector
// holds 4 inputs of every group: the 8 vectors of the rows layout, 4 * n bytes each, byte 4 * g + i of vector v being input
// 4 * v + i of group g, packed as there; then the group scales as planes over the n groups; then the block scales. Rows
// of float codecs are as stored.
static constexpr int neurons_quant_bytes(Codec codec, int groups) { return traits(codec).bits * kGroup * groups / 8; }
static constexpr int neurons_record_bytes(Codec codec, int groups) {
  return neurons_quant_bytes(codec, groups) + groups * group_scale_bytes(codec) + block_scale_bytes(codec);
}

struct Matrix {
  Codec codec = Codec::f32;
  Layout layout = Layout::rows;
  int outputs = 0;         // rows of the weight
  int inputs = 0;
  int padded_outputs = 0;  // multiple of 16 (rows) or of the 64-output block (columns); neurons: outputs
  int chunk = 0;           // columns: outputs per contiguous channel slice; the last chunk may be shorter
  int segments = 1;        // partial sums over the input, added in order; the same for every kernel of the matrix
  const uint8_t* data = nullptr;

  THINFER_INLINE_MEMBER int blocks() const { return inputs / traits(codec).block; }
  THINFER_INLINE_MEMBER int tiles() const { return padded_outputs / kTile; }
  THINFER_INLINE_MEMBER int chunks() const { return (padded_outputs + chunk - 1) / chunk; }
  THINFER_INLINE_MEMBER int chunk_width(int c) const { return (c + 1) * chunk <= padded_outputs ? chunk : padded_outputs - c * chunk; }
  THINFER_INLINE_MEMBER int segment_begin(int s) const { return static_cast<int>(static_cast<int64_t>(blocks()) * s / segments); }
  // Bytes of a columns chunk `width` outputs wide. Float codecs take any number of inputs, the others whole blocks.
  THINFER_INLINE_MEMBER size_t chunk_bytes(int width) const {
    return is_float(codec) ? static_cast<size_t>(inputs) * channel_bytes(codec, width)
                           : static_cast<size_t>(blocks()) * columns_record_bytes(codec, width);
  }
  // Start of a chunk: all chunks before it are full.
  THINFER_INLINE_MEMBER const uint8_t* chunk_data(int c) const { return data + static_cast<size_t>(c) * chunk_bytes(chunk); }
  // Of the neurons layout.
  THINFER_INLINE_MEMBER size_t row_bytes() const {
    return is_float(codec) ? static_cast<size_t>(inputs) * static_cast<size_t>(traits(codec).bits / 8)
                           : static_cast<size_t>(inputs) * static_cast<size_t>(traits(codec).bits) / 8 +
                                 static_cast<size_t>(inputs / kGroup * group_scale_bytes(codec)) +
                                 static_cast<size_t>(blocks() * block_scale_bytes(codec));
  }
  THINFER_INLINE_MEMBER const uint8_t* row_data(int r) const { return data + static_cast<size_t>(r) * row_bytes(); }
  // Of the rows layout.
  THINFER_INLINE_MEMBER size_t tile_bytes() const { return static_cast<size_t>(blocks()) * static_cast<size_t>(rows_record_bytes(codec)); }
  THINFER_INLINE_MEMBER const uint8_t* tile_data(int t) const { return data + static_cast<size_t>(t) * tile_bytes(); }
};

}  // namespace thinfer
