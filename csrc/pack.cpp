#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "half.h"
#include "neuron_rows.h"

namespace thinfer {
namespace {

constexpr uint32_t kNibbles = 0x0f0f0f0fu;

// The stacked rows of all parts; rows past the end (padding) are null.
class Rows {
 public:
  explicit Rows(const std::vector<StoredRows>& parts) : parts_(parts) {}
  const uint8_t* at(int row, StoredType* type) const {
    for (const StoredRows& part : parts_) {
      if (row < part.rows) {
        *type = part.type;
        return part.row(row);
      }
      row -= part.rows;
    }
    return nullptr;
  }

 private:
  const std::vector<StoredRows>& parts_;
};

// A padding row: zero weights whatever the codec.
void zero_block(Codec codec, Block& out) {
  std::memset(&out, 0, sizeof out);
  std::memset(out.q, traits(codec).offset, sizeof out.q);
}

void load_blocks(const Rows& rows, Codec codec, int first, int count, int index, Block* out) {
  for (int r = 0; r < count; ++r) {
    StoredType type{};
    const uint8_t* row = rows.at(first + r, &type);
    row ? decode_block(type, codec, row, index, out[r]) : zero_block(codec, out[r]);
  }
}

void store16(uint8_t* p, uint16_t v) { std::memcpy(p, &v, 2); }

// Group scales of `count` outputs as planes `stride` outputs apart.
void store_group_scales(Codec codec, const Block* blocks, int count, int g, uint8_t* p, size_t stride) {
  for (int r = 0; r < count; ++r) {
    const size_t o = static_cast<size_t>(r);
    switch (traits(codec).scale) {
      case ScaleKind::d: store16(p + 2 * o, blocks[r].d); break;
      case ScaleKind::dm:
        store16(p + 2 * o, blocks[r].d);
        store16(p + 2 * (stride + o), blocks[r].m);
        break;
      case ScaleKind::k:
        p[o] = blocks[r].sc[g];
        p[stride + o] = blocks[r].mn[g];
        break;
      case ScaleKind::k16:
        p[o] = blocks[r].sc[2 * g];
        p[stride + o] = blocks[r].sc[2 * g + 1];
        break;
      case ScaleKind::none: break;
    }
  }
}
void store_block_scales(Codec codec, const Block* blocks, int count, uint8_t* p, size_t stride) {
  for (int r = 0; r < count; ++r) {
    const size_t o = static_cast<size_t>(r);
    if (block_scale_bytes(codec) > 0) store16(p + 2 * o, blocks[r].d);
    if (block_scale_bytes(codec) > 2) store16(p + 2 * (stride + o), blocks[r].m);
  }
}

// 16 rows x 32 inputs in the order codec.h gives; `out` is zeroed.
void store_rows_group(int bits, const Block* blocks, int g, uint8_t* out) {
  for (int r = 0; r < kTile; ++r) {
    for (int v = 0; v < 8; ++v) {
      uint32_t quad, word;
      std::memcpy(&quad, blocks[r].q + kGroup * g + 4 * v, 4);
      if (bits == 8) {
        std::memcpy(out + 64 * v + 4 * r, &quad, 4);
        continue;
      }
      uint8_t* low = out + 64 * (v / 2) + 4 * r;
      std::memcpy(&word, low, 4);
      word |= (quad & kNibbles) << (v % 2 ? 4 : 0);
      std::memcpy(low, &word, 4);
      if (bits == 4) continue;
      uint8_t* high = out + 256 + (bits == 6 ? 64 * (v / 4) : 0) + 4 * r;
      const int shift = bits == 6 ? 2 * (v % 4) : v;
      std::memcpy(&word, high, 4);
      word |= ((quad >> 4) & kNibbles) << shift;
      std::memcpy(high, &word, 4);
    }
  }
}

void pack_rows_tile(const Matrix& w, const Rows& rows, int tile, uint8_t* out) {
  const int groups = groups_per_block(w.codec);
  const size_t quants = static_cast<size_t>(rows_group_bytes(w.codec));
  const size_t scales = static_cast<size_t>(kTile) * static_cast<size_t>(group_scale_bytes(w.codec));
  Block blocks[kTile];
  for (int block = 0; block < w.blocks(); ++block, out += rows_record_bytes(w.codec)) {
    load_blocks(rows, w.codec, tile * kTile, kTile, block, blocks);
    uint8_t* scale_area = out + quants * static_cast<size_t>(groups);
    for (int g = 0; g < groups; ++g) {
      store_rows_group(traits(w.codec).bits, blocks, g, out + quants * static_cast<size_t>(g));
      store_group_scales(w.codec, blocks, kTile, g, scale_area + scales * static_cast<size_t>(g), kTile);
    }
    store_block_scales(w.codec, blocks, kTile, scale_area + scales * static_cast<size_t>(groups), kTile);
  }
}

// One channel at one block of 64 outputs.
void store_column(int bits, const Block* blocks, int input, uint8_t* low, uint8_t* high) {
  if (bits == 8) {
    for (int o = 0; o < kOutBlock; ++o) low[32 * (o / 32) + columns_byte(o % 32)] = blocks[o].q[input];
    return;
  }
  for (int o = 0; o < 32; ++o) {
    low[columns_byte(o)] = static_cast<uint8_t>((blocks[o].q[input] & 15) | ((blocks[o + 32].q[input] & 15) << 4));
  }
  if (bits == 4) return;
  std::memset(high, 0, bits == 6 ? 16 : 8);
  for (int o = 0; o < kOutBlock; ++o) {
    const int k = o / 8, r = o % 8;
    const int above = blocks[o].q[input] >> 4;
    uint8_t& byte = high[bits == 6 ? r + 8 * (k / 4) : r];
    byte = static_cast<uint8_t>(byte | (above << (bits == 6 ? 2 * (k % 4) : k)));
  }
}

void pack_columns_block(const Matrix& w, const Rows& rows, int block64, uint8_t* data) {
  const int chunk = block64 * kOutBlock / w.chunk;
  const int in_chunk = block64 - chunk * (w.chunk / kOutBlock);
  const size_t width = static_cast<size_t>(w.chunk_width(chunk));
  const int bits = traits(w.codec).bits, groups = groups_per_block(w.codec);
  const ChannelPlaces place = channel_places(w.codec, static_cast<int>(width));
  const size_t plane_bytes = traits(w.codec).block == 32 ? 2 : 1;
  const size_t out0 = static_cast<size_t>(in_chunk) * kOutBlock;
  uint8_t* record = data + (w.chunk_data(chunk) - w.data);
  std::vector<Block> blocks(kOutBlock);
  for (int block = 0; block < w.blocks(); ++block, record += columns_record_bytes(w.codec, static_cast<int>(width))) {
    load_blocks(rows, w.codec, block64 * kOutBlock, kOutBlock, block, blocks.data());
    store_block_scales(w.codec, blocks.data(), kOutBlock, record + 2 * out0, width);
    uint8_t* group = record + width * static_cast<size_t>(block_scale_bytes(w.codec));
    for (int g = 0; g < groups; ++g, group += columns_group_bytes(w.codec, static_cast<int>(width))) {
      store_group_scales(w.codec, blocks.data(), kOutBlock, g, group + plane_bytes * out0, width);
      uint8_t* channels = group + width * static_cast<size_t>(group_scale_bytes(w.codec));
      for (int i = 0; i < kGroup; ++i) {
        uint8_t* channel = channels + place(i);
        store_column(bits, blocks.data(), kGroup * g + i, channel + static_cast<size_t>(in_chunk) * (bits == 8 ? 64 : 32),
                     channel + width / 2 + static_cast<size_t>(in_chunk) * (bits == 6 ? 16 : 8));
      }
    }
  }
}

void store_float(Codec codec, uint8_t* p, float value) {
  if (codec == Codec::f32) {
    std::memcpy(p, &value, 4);
  } else if (codec == Codec::f16) {
    store16(p, float_to_half(value));
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    store16(p, static_cast<uint16_t>(bits >> 16));  // only packed from bfloat16: exact
  }
}

// Stored bits of a float type that is kept as it is.
void copy_float(int bytes, uint8_t* to, const uint8_t* from) { std::memcpy(to, from, static_cast<size_t>(bytes)); }

void pack_float_block(const Matrix& w, const Rows& rows, int block64, uint8_t* data) {
  const int chunk = block64 * kOutBlock / w.chunk;
  const size_t width = static_cast<size_t>(w.chunk_width(chunk));
  const size_t element = static_cast<size_t>(traits(w.codec).bits / 8);
  const int first = block64 * kOutBlock - chunk * w.chunk;
  uint8_t* base = data + (w.chunk_data(chunk) - w.data);
  float values[kGroup];
  for (int o = 0; o < kOutBlock; ++o) {
    StoredType type{};
    const uint8_t* row = rows.at(block64 * kOutBlock + o, &type);
    if (!row) continue;  // pages are zeroed
    uint8_t* out = base + element * static_cast<size_t>(first + o);
    if (codec_of(type) == w.codec) {
      for (int i = 0; i < w.inputs; ++i) {
        copy_float(static_cast<int>(element), out + element * width * static_cast<size_t>(i), row + element * static_cast<size_t>(i));
      }
      continue;
    }
    for (int i = 0; i < w.inputs; i += kGroup) {
      const int count = std::min(kGroup, w.inputs - i);
      decode_floats(type, row, i, count, values);
      for (int j = 0; j < count; ++j) store_float(w.codec, out + element * width * static_cast<size_t>(i + j), values[j]);
    }
  }
}

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

PackedMatrix::PackedMatrix(const std::vector<StoredRows>& parts, int inputs, Codec codec, Layout layout, int chunk,
                           int segments, ThreadPool& pool, std::shared_ptr<Arena> arena)
    : arena_(std::move(arena)) {
  int outputs = 0;
  for (const StoredRows& part : parts) {
    outputs += part.rows;
    const bool requantised = is_float(codec_of(part.type)) && (codec == Codec::i8_d || codec == Codec::u4_dm || codec == Codec::f16);
    if (codec_of(part.type) != codec && !requantised) throw std::invalid_argument("a part's type does not fit the codec");
  }
  if (outputs <= 0 || inputs <= 0) throw std::invalid_argument("an empty matrix");
  if (!is_float(codec) && inputs % traits(codec).block != 0) throw std::invalid_argument("inputs are not a multiple of the codec's block");
  if (is_float(codec) && layout == Layout::rows) throw std::invalid_argument("float codecs have no rows layout");
  if (layout == Layout::columns && (chunk <= 0 || chunk % kOutBlock != 0)) throw std::invalid_argument("chunk is not a multiple of 64");
  if (segments < 1 || (segments > 1 && segments > inputs / traits(codec).block)) throw std::invalid_argument("too many segments");
  const bool columns = layout == Layout::columns, neurons = layout == Layout::neurons;
  matrix_.codec = codec;
  matrix_.layout = layout;
  matrix_.outputs = outputs;
  matrix_.inputs = inputs;
  matrix_.padded_outputs = neurons ? outputs : round_up(outputs, columns ? kOutBlock : kTile);
  matrix_.chunk = columns ? std::min(chunk, matrix_.padded_outputs) : 0;
  matrix_.segments = segments;
  bytes_ = columns   ? 0
           : neurons ? static_cast<size_t>(outputs) * matrix_.row_bytes()
                     : static_cast<size_t>(matrix_.tiles()) * static_cast<size_t>(matrix_.blocks()) * static_cast<size_t>(rows_record_bytes(codec));
  for (int c = 0; columns && c < matrix_.chunks(); ++c) {
    bytes_ += matrix_.chunk_bytes(matrix_.chunk_width(c));
  }
  uint8_t* data = allocate();
  const Rows rows(parts);
  const int items = columns ? matrix_.padded_outputs / kOutBlock : neurons ? outputs : matrix_.tiles();
  parallel_for(pool, items, 1, [&](int begin, int end, int) {
    for (int item = begin; item < end; ++item) {
      if (neurons) {
        StoredType type{};
        const uint8_t* row = rows.at(item, &type);
        pack_neuron(matrix_, type, row, data + static_cast<size_t>(item) * matrix_.row_bytes());
      } else if (is_float(codec)) {
        pack_float_block(matrix_, rows, item, data);
      } else if (columns) {
        pack_columns_block(matrix_, rows, item, data);
      } else {
        pack_rows_tile(matrix_, rows, item, data + (matrix_.tile_data(item) - matrix_.data));
      }
    }
  });
}

PackedMatrix::PackedMatrix(const Matrix& matrix, size_t bytes, std::shared_ptr<Arena> arena)
    : matrix_(matrix), bytes_(bytes), arena_(std::move(arena)) {}

uint8_t* PackedMatrix::allocate() {
  constexpr size_t kPrefetchSlack = 8192;  // kernels prefetch past the end
  uint8_t* data = arena_->take(bytes_ + kPrefetchSlack);
  matrix_.data = data;
  return data;
}

std::shared_ptr<PackedMatrix> PackedMatrix::copy() const {
  std::shared_ptr<PackedMatrix> other(new PackedMatrix(matrix_, bytes_, arena_));
  std::memcpy(other->allocate(), matrix_.data, bytes_);
  return other;
}

void PackedMatrix::evict() const {
#if defined(__SSE2__)
  for (size_t i = 0; i < bytes_; i += 64) _mm_clflush(matrix_.data + i);
  _mm_mfence();
#endif
}

void StoredRowSource::row(int index, float* out) const {
  const uint8_t* row = source_.row(index);
  const Codec codec = codec_of(source_.type);
  if (is_float(codec)) {
    decode_floats(source_.type, row, 0, inputs_, out);
    return;
  }
  Block block;
  for (int b = 0; b < inputs_ / traits(codec).block; ++b) {
    decode_block(source_.type, codec, row, b, block);
    block_to_floats(codec, block, out + b * traits(codec).block);
  }
}

}  // namespace thinfer
