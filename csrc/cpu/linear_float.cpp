// y = W x with float32 activations over any codec and layout: the oracle of the integer kernels, and the kernel of
// float checkpoints. Each output is one chain y = fma(w, x, y) over the inputs in ascending order.
#include "cpu/columns_record.h"
#include "linear_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

constexpr int kPanelOutputs = 64;

THINFER_INLINE f32x16 load_weights(const float* p) { return load(p); }
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};
THINFER_INLINE f32x16 load_weights(const Half* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
THINFER_INLINE f32x16 load_weights(const BFloat* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }

// A step over one group of inputs: which of its channels count, and where its activations are.
struct Inputs {
  const float* x;  // first channel of the group, first row
  int ldx;
  const uint8_t* channel;
  int count;
};

// kRows x kVectors sums in registers while the group's channels pass.
template <int kRows, int kVectors, class Weight>
THINFER_INLINE void add_rows(const Weight* w, size_t stride, const Inputs& in, int row, float* y, int ldy) {
  f32x16 acc[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = load(y + static_cast<ptrdiff_t>(row + r) * ldy + 16 * v);
  }
  for (int i = 0; i < in.count; ++i) {
    const size_t channel = in.channel[i];
    f32x16 weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = load_weights(w + channel * stride + 16 * v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const f32x16 x = set1(in.x[static_cast<ptrdiff_t>(row + r) * in.ldx + static_cast<ptrdiff_t>(channel)]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(weights[v], x, acc[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(y + static_cast<ptrdiff_t>(row + r) * ldy + 16 * v, acc[r][v]);
  }
}

template <int kVectors, class Weight>
THINFER_INLINE void add_group(const Weight* w, size_t stride, const Inputs& in, int rows, float* y, int ldy) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) add_rows<4, kVectors>(w, stride, in, row, y, ldy);
  for (; row < rows; ++row) add_rows<1, kVectors>(w, stride, in, row, y, ldy);
}

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

template <Codec codec>
THINFER_INLINE void dequantize_tile(const uint8_t* quads, const GroupScales& s, float* panel, int outputs) {
  // (q - offset) * d + m, each operation rounded, as the file's own definition is computed.
  float d[16], d2[16], m[16];
  store(d, s.d);
  store(d2, s.d2);
  store(m, s.m);
  for (int i = 0; i < kGroup; ++i) {
    for (int o = 0; o < 16; ++o) {
      const int q = quads[64 * (i / 4) + 4 * o + (i % 4)] - traits(codec).offset;
      const float scaled = static_cast<float>(q) * (kHalves<codec> && i >= 16 ? d2[o] : d[o]);
      panel[i * outputs + o] = !kHasMin<codec>                         ? scaled
                               : traits(codec).scale == ScaleKind::k ? scaled - m[o]
                                                                     : scaled + m[o];
    }
  }
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
    const Inputs in{x + kGroup * g, ldx, channel,
                    list_channels(x + kGroup * g, rows, ldx, group_width, skip_zeros, channel)};
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
