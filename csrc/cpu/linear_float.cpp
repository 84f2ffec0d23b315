// y = W x with float32 activations over any codec and layout: the oracle of the integer kernels, and the kernel of
// float checkpoints. Each output is one chain y = fma(w, x, y) over the inputs in ascending order.
#include "cpu/columns_record.h"
#include "cpu/float_group.h"
#include "linear_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

constexpr int kPanelOutputs = 64;
constexpr size_t kAhead = 4096;  // bytes that are fetched ahead

// The channels of a group to use, of `width` there are: all, or those that are not 0 in some row.
int list_channels(const float* x, int rows, int ldx, int width, bool skip_zeros, uint8_t* channel) {
  int count = 0;
  for (int i = 0; i < width; ++i) {
    bool used = !skip_zeros;
    for (int r = 0; r < rows && !used; ++r) used = x[static_cast<ptrdiff_t>(r) * ldx + i] != 0.0f;
    channel[count] = static_cast<uint8_t>(i);
    count += used;
  }
  return count;
}

// Unpacks one group of `vectors` x 16 outputs starting at tile `tile` to panel [32][16 * vectors].
template <Codec codec>
void unpack_group(const Matrix& w, int tile, int group, float* panel, uint8_t* quads) {
  constexpr int kGroups = groups_per_block(codec);
  const int block = group / kGroups, g = group % kGroups;
  if (w.layout == Layout::rows) {
    const uint8_t* p = w.tile_data(tile) + static_cast<size_t>(block) * rows_record_bytes(codec);
    const uint8_t* scales = p + static_cast<size_t>(rows_group_bytes(codec)) * kGroups;
    constexpr size_t kScales = static_cast<size_t>(kTile) * group_scale_bytes(codec);
    each_quad<kBits<codec>>(p + static_cast<size_t>(rows_group_bytes(codec)) * static_cast<size_t>(g),
                            [&](int v, u8x64 q) __attribute__((always_inline)) { store_u8(quads + 64 * v, q); });
    dequantize_tile<codec>(quads, load_scales<codec>(scales + kScales * static_cast<size_t>(g), scales + kScales * kGroups, kTile),
                           panel, kTile);
    return;
  }
  const int chunk = tile * kTile / w.chunk;
  const int b = (tile * kTile - chunk * w.chunk) / kOutBlock;
  const ColumnsRecord<codec> record{
      w.chunk_data(chunk) + static_cast<size_t>(block) * columns_record_bytes(codec, w.chunk_width(chunk)),
      static_cast<size_t>(w.chunk_width(chunk))};
  record.expand(g, b, quads);
  for (int t = 0; t < 4; ++t) {
    dequantize_tile<codec>(quads + 512 * t, record.scales(g, static_cast<size_t>(kOutBlock * b + kTile * t)),
                           panel + kTile * t, kOutBlock);
  }
}

template <class Weight>
size_t float_codec(const Matrix& w, const float* x, int rows, int ldx, float* y, int ldy, int tile_begin, int tile_end,
                   bool skip_zeros) {
  size_t bytes = 0;
  uint8_t channel[kGroup];
  const int chunk = tile_begin * kTile / w.chunk;
  const size_t width = static_cast<size_t>(w.chunk_width(chunk));
  const Weight* base = reinterpret_cast<const Weight*>(w.chunk_data(chunk)) - static_cast<ptrdiff_t>(chunk) * w.chunk;
  for (int g = 0; g * kGroup < w.inputs; ++g) {
    const int group_width = w.inputs - g * kGroup < kGroup ? w.inputs - g * kGroup : kGroup;
    const int used = list_channels(x + kGroup * g, rows, ldx, group_width, skip_zeros, channel);
    // Of narrow chunks all is read in order if all is used; of others the same channels' next outputs follow.
    const size_t in_order = used == kGroup ? kAhead : 0;
    const Inputs in{x + kGroup * g, ldx, channel, used, width == kOutBlock ? in_order : kOutBlock * sizeof(Weight)};
    const Weight* group = base + static_cast<size_t>(g) * kGroup * width;
    for (int tile = tile_begin; tile < tile_end; tile += 4) {
      add_group<4>(group + tile * kTile, width, in, rows, y + tile * kTile, ldy);
    }
    bytes += static_cast<size_t>(in.count) * static_cast<size_t>(tile_end - tile_begin) * kTile * sizeof(Weight);
  }
  return bytes;
}

template <Codec codec>
size_t quantized_codec(const Matrix& w, const float* x, int rows, int ldx, float* y, int ldy, int tile_begin,
                       int tile_end, bool skip_zeros, uint8_t* scratch) {
  uint8_t* quads = scratch;
  float* panel = reinterpret_cast<float*>(scratch + kExpandedBytes);
  uint8_t channel[kGroup];
  constexpr int kGroups = groups_per_block(codec);
  const bool wide = w.layout == Layout::columns;
  size_t read = 0;  // per output
  for (int tile = tile_begin; tile < tile_end; tile += wide ? 4 : 1) {
    bool block_read = false;
    for (int g = 0; g < w.inputs / kGroup; ++g) {
      const Inputs in{x + kGroup * g, ldx, channel,
                      list_channels(x + kGroup * g, rows, ldx, kGroup, skip_zeros, channel)};
      block_read = (g % kGroups != 0 && block_read) || in.count > 0;
      if (block_read && (g + 1) % kGroups == 0) read += static_cast<size_t>(block_scale_bytes(codec));
      if (in.count == 0) continue;
      unpack_group<codec>(w, tile, g, panel, quads);
      if (wide) {
        add_group<4>(panel, kPanelOutputs, in, rows, y + tile * kTile, ldy);
      } else {
        add_group<1>(panel, kTile, in, rows, y + tile * kTile, ldy);
      }
      // A group is unpacked whole, however few of its channels are used.
      read += static_cast<size_t>(traits(codec).bits * kGroup / 8 + group_scale_bytes(codec));
    }
  }
  return read * static_cast<size_t>(wide ? kOutBlock : kTile);
}

}  // namespace

size_t float_linear(const Matrix& w, const float* x, int rows, int ldx, float* y, int ldy, int tile_begin, int tile_end,
                    bool skip_zeros, uint8_t* scratch) {
  for (int r = 0; r < rows; ++r) {
    for (int t = tile_begin; t < tile_end; ++t) store(y + static_cast<ptrdiff_t>(r) * ldy + t * kTile, zero());
  }
  size_t bytes = 0;
  switch (w.codec) {
    case Codec::f32: return float_codec<float>(w, x, rows, ldx, y, ldy, tile_begin, tile_end, skip_zeros);
    case Codec::f16: return float_codec<Half>(w, x, rows, ldx, y, ldy, tile_begin, tile_end, skip_zeros);
    case Codec::bf16: return float_codec<BFloat>(w, x, rows, ldx, y, ldy, tile_begin, tile_end, skip_zeros);
    default:
      THINFER_FOR_CODEC(w.codec, bytes = quantized_codec<codec>(w, x, rows, ldx, y, ldy, tile_begin, tile_end,
                                                               skip_zeros, scratch));
  }
  return bytes;
}

}  // namespace thinfer::THINFER_ISA
