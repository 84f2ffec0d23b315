// Addresses inside a record of the columns layout.
#pragma once

#include "cpu/gemm_group.h"

namespace thinfer::THINFER_ISA {

// Addresses inside a chunk `width` outputs wide.
template <Codec codec>
struct ColumnsRecord {
  static constexpr int kGroups = groups_per_block(codec);
  const uint8_t* p;
  size_t width;

  THINFER_INLINE_MEMBER size_t bytes() const { return columns_record_bytes(codec, static_cast<int>(width)); }
  THINFER_INLINE_MEMBER ChannelPlaces places() const { return channel_places(codec, static_cast<int>(width)); }
  THINFER_INLINE_MEMBER const uint8_t* group(int g) const {
    return p + width * block_scale_bytes(codec) + columns_group_bytes(codec, static_cast<int>(width)) * static_cast<size_t>(g);
  }
  THINFER_INLINE_MEMBER const uint8_t* channels(int g) const { return group(g) + width * group_scale_bytes(codec); }
  // Scales of outputs [out, out + 16) of the chunk.
  THINFER_INLINE_MEMBER GroupScales scales(int g, size_t out) const {
    constexpr size_t kPlane = traits(codec).scale == ScaleKind::d || traits(codec).scale == ScaleKind::dm ? 2 : 1;
    return load_scales<codec>(group(g) + kPlane * out, p + 2 * out, width);
  }
  static THINFER_INLINE_MEMBER size_t nibbles(int block64) {
    return static_cast<size_t>(block64) * (kBits<codec> == 8 ? 64 : 32);
  }
  THINFER_INLINE_MEMBER size_t high(int block64) const {
    return width / 2 + static_cast<size_t>(block64) * (kBits<codec> == 6 ? 16 : 8);
  }
  // All 32 channels of a group at a block of 64 outputs, as four tiles of the rows layout's 8 vectors: 4 x 512 bytes.
  THINFER_INLINE_MEMBER void expand(int g, int block64, uint8_t* out) const {
    const ChannelPlaces place = places();
    const size_t size = place.bytes, low = nibbles(block64), above = high(block64);
    for (int v = 0; v < 8; ++v) {
      const uint8_t* c = channels(g) + place(4 * v);
      each_column_vector<kBits<codec>>(c, c + size, c + 2 * size, c + 3 * size, low, above,
                                       [&](int k, u8x32 q) __attribute__((always_inline)) {
                                         store_u8x32(out + 512 * (k / 2) + 64 * v + 32 * (k % 2), q);
                                       });
    }
  }
};

}  // namespace thinfer::THINFER_ISA
