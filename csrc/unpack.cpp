// Reads single rows back from packed matrices: a tied embedding has one copy, packed for the output head.
#include <cstring>

#include "half.h"
#include "neuron_rows.h"
#include "pack.h"

namespace thinfer {
namespace {

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

void load_group_scales(Codec codec, const uint8_t* p, size_t stride, int g, Block& out) {
  switch (traits(codec).scale) {
    case ScaleKind::d: out.d = load16(p); break;
    case ScaleKind::dm:
      out.d = load16(p);
      out.m = load16(p + 2 * stride);
      break;
    case ScaleKind::k:
      out.sc[g] = p[0];
      out.mn[g] = p[stride];
      break;
    case ScaleKind::k16:
      out.sc[2 * g] = p[0];
      out.sc[2 * g + 1] = p[stride];
      break;
    case ScaleKind::none: break;
  }
}
void load_block_scales(Codec codec, const uint8_t* p, size_t stride, Block& out) {
  if (block_scale_bytes(codec) > 0) out.d = load16(p);
  if (block_scale_bytes(codec) > 2) out.m = load16(p + 2 * stride);
}

void read_rows_block(const Matrix& w, int index, int block, Block& out) {
  const int bits = traits(w.codec).bits, groups = groups_per_block(w.codec);
  const size_t r = static_cast<size_t>(index % kTile);
  const size_t quants = static_cast<size_t>(rows_group_bytes(w.codec));
  const size_t scales = static_cast<size_t>(kTile) * static_cast<size_t>(group_scale_bytes(w.codec));
  const uint8_t* p = w.tile_data(index / kTile) + static_cast<size_t>(block) * static_cast<size_t>(rows_record_bytes(w.codec));
  const uint8_t* scale_area = p + quants * static_cast<size_t>(groups);
  const size_t plane = traits(w.codec).block == 32 ? 2 : 1;
  load_block_scales(w.codec, scale_area + scales * static_cast<size_t>(groups) + 2 * r, kTile, out);
  for (int g = 0; g < groups; ++g, p += quants) {
    load_group_scales(w.codec, scale_area + scales * static_cast<size_t>(g) + plane * r, kTile, g, out);
    for (int i = 0; i < kGroup; ++i) {
      const int v = i / 4;
      const size_t at = 4 * r + static_cast<size_t>(i % 4);
      uint8_t& q = out.q[kGroup * g + i];
      if (bits == 8) {
        q = p[64 * static_cast<size_t>(v) + at];
        continue;
      }
      const int low = (p[64 * static_cast<size_t>(v / 2) + at] >> (v % 2 ? 4 : 0)) & 15;
      const int high = bits == 5   ? (p[256 + at] >> v) & 1
                       : bits == 6 ? (p[256 + 64 * static_cast<size_t>(v / 4) + at] >> (2 * (v % 4))) & 3
                                   : 0;
      q = static_cast<uint8_t>(low | (high << 4));
    }
  }
}

void read_columns_block(const Matrix& w, int index, int block, Block& out) {
  const int bits = traits(w.codec).bits, groups = groups_per_block(w.codec);
  const int chunk = index / w.chunk;
  const int out_in_chunk = index - chunk * w.chunk;
  const int width = w.chunk_width(chunk);
  const int o = out_in_chunk % kOutBlock, k = o / 8, r = o % 8;
  const size_t block64 = static_cast<size_t>(out_in_chunk / kOutBlock), wide = static_cast<size_t>(width);
  const size_t plane = traits(w.codec).block == 32 ? 2 : 1, in_chunk = static_cast<size_t>(out_in_chunk);
  const uint8_t* p = w.chunk_data(chunk) + static_cast<size_t>(block) * columns_record_bytes(w.codec, width);
  load_block_scales(w.codec, p + 2 * in_chunk, wide, out);
  p += wide * static_cast<size_t>(block_scale_bytes(w.codec));
  for (int g = 0; g < groups; ++g, p += columns_group_bytes(w.codec, width)) {
    load_group_scales(w.codec, p + plane * in_chunk, wide, g, out);
    const uint8_t* channels = p + wide * static_cast<size_t>(group_scale_bytes(w.codec));
    for (int i = 0; i < kGroup; ++i) {
      const uint8_t* channel = channels + channel_places(w.codec, width)(i);
      uint8_t& q = out.q[kGroup * g + i];
      const size_t byte = static_cast<size_t>(columns_byte(o % 32));
      if (bits == 8) {
        q = channel[64 * block64 + 32 * static_cast<size_t>(o / 32) + byte];
        continue;
      }
      const int low = (channel[32 * block64 + byte] >> (o / 32 ? 4 : 0)) & 15;
      const uint8_t* above = channel + wide / 2 + block64 * (bits == 6 ? 16 : 8) + r;
      const int high = bits == 5 ? (above[0] >> k) & 1 : bits == 6 ? (above[8 * (k / 4)] >> (2 * (k % 4))) & 3 : 0;
      q = static_cast<uint8_t>(low | (high << 4));
    }
  }
}

void read_float_row(const Matrix& w, int index, float* out) {
  const int chunk = index / w.chunk;
  const size_t width = static_cast<size_t>(w.chunk_width(chunk));
  const size_t element = static_cast<size_t>(traits(w.codec).bits / 8);
  const uint8_t* p = w.chunk_data(chunk) + element * static_cast<size_t>(index - chunk * w.chunk);
  for (int i = 0; i < w.inputs; ++i, p += element * width) {
    if (w.codec == Codec::f32) {
      std::memcpy(out + i, p, 4);
    } else if (w.codec == Codec::f16) {
      out[i] = half_to_float(load16(p));
    } else {
      const uint32_t bits = static_cast<uint32_t>(load16(p)) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  }
}

}  // namespace

void PackedMatrix::row(int index, float* out) const {
  if (matrix_.layout == Layout::neurons) {
    read_neuron(matrix_, index, out);
    return;
  }
  if (is_float(matrix_.codec)) {
    read_float_row(matrix_, index, out);
    return;
  }
  Block block;
  for (int b = 0; b < matrix_.blocks(); ++b) {
    matrix_.layout == Layout::rows ? read_rows_block(matrix_, index, b, block)
                                   : read_columns_block(matrix_, index, b, block);
    block_to_floats(matrix_.codec, block, out + b * traits(matrix_.codec).block);
  }
}

}  // namespace thinfer
