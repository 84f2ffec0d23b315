// A group of 32 inputs: its scales, the unpacking of its quants, and the float step that ends it.
//
// Every integer kernel ends a group with the same two operations in the same order, whatever the layout, the number of
// rows and the channels skipped: acc = fma(sum, d * dx, acc), then acc = fma(+-m, bias, acc). That is why they agree to
// the bit.
#pragma once

#include "codec.h"
#include "cpu/isa/dot.h"

namespace thinfer::THINFER_ISA {

template <Codec codec>
constexpr int kBits = traits(codec).bits;
template <Codec codec>
constexpr int kOffset = kBits<codec> == 8 ? kOffset8 : traits(codec).offset;
template <Codec codec>
constexpr bool kHasMin = traits(codec).scale == ScaleKind::dm || traits(codec).scale == ScaleKind::k;
template <Codec codec>
constexpr bool kHalves = traits(codec).scale == ScaleKind::k16;  // one scale per 16 inputs

// Scales of 16 outputs for one group. d2 is the second half's with 16-wide groups; m is subtracted in two-level codecs.
struct GroupScales {
  f32x16 d, d2, m;
};

// `group` points at the group's scales of the first of 16 outputs, planes `stride` outputs apart; `block` at the
// block's.
template <Codec codec>
THINFER_INLINE GroupScales load_scales(const uint8_t* group, const uint8_t* block, size_t stride) {
  GroupScales s = {};
  const uint16_t* half = reinterpret_cast<const uint16_t*>(group);
  const uint16_t* block_half = reinterpret_cast<const uint16_t*>(block);
  if constexpr (traits(codec).scale == ScaleKind::d) {
    s.d = load_f16(half);
  } else if constexpr (traits(codec).scale == ScaleKind::dm) {
    s.d = load_f16(half);
    s.m = load_f16(half + stride);
  } else if constexpr (traits(codec).scale == ScaleKind::k) {
    s.d = mul(load_f16(block_half), load_u8_as_float(group));
    s.m = mul(load_f16(block_half + stride), load_u8_as_float(group + stride));
  } else {
    const f32x16 d = load_f16(block_half);
    s.d = mul(d, load_i8_as_float(group));
    s.d2 = mul(d, load_i8_as_float(group + stride));
  }
  return s;
}

template <Codec codec>
THINFER_INLINE f32x16 end_half(f32x16 acc, i32x16 sum, f32x16 d, float scale, int32_t x_sum) {
  if constexpr (kOffset<codec> != 0) sum = minus(sum, kOffset<codec> * x_sum);
  return fma(to_float(sum), mul(d, set1(scale)), acc);
}

// Ends a group with one scale per output.
template <Codec codec>
THINFER_INLINE f32x16 end_group(f32x16 acc, i32x16 sum, const GroupScales& s, float scale, float bias,
                                const int32_t* x_sums) {
  acc = end_half<codec>(acc, sum, s.d, scale, x_sums[0] + x_sums[1]);
  if constexpr (traits(codec).scale == ScaleKind::dm) acc = fma(s.m, set1(bias), acc);
  if constexpr (traits(codec).scale == ScaleKind::k) acc = fnma(s.m, set1(bias), acc);
  return acc;
}

// Calls use(v, quants) for the 8 vectors of 4 inputs of packed groups; load(i) gives the i-th packed vector.
template <int bits, class Load, class Use>
THINFER_INLINE void each_packed_vector(Load&& load_packed, Use&& use) {
  if constexpr (bits == 8) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) use(v, load_packed(v));
  } else if constexpr (bits == 4) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const auto pair = load_packed(c);
      use(2 * c, low_nibbles(pair));
      use(2 * c + 1, high_nibbles(pair));
    }
  } else {
    const auto p0 = load_packed(0), p1 = load_packed(1), p2 = load_packed(2), p3 = load_packed(3), h0 = load_packed(4);
    if constexpr (bits == 5) {
      use(0, with_high_bits<0, 1>(low_nibbles(p0), h0));
      use(1, with_high_bits<1, 1>(high_nibbles(p0), h0));
      use(2, with_high_bits<2, 1>(low_nibbles(p1), h0));
      use(3, with_high_bits<3, 1>(high_nibbles(p1), h0));
      use(4, with_high_bits<4, 1>(low_nibbles(p2), h0));
      use(5, with_high_bits<5, 1>(high_nibbles(p2), h0));
      use(6, with_high_bits<6, 1>(low_nibbles(p3), h0));
      use(7, with_high_bits<7, 1>(high_nibbles(p3), h0));
    } else {
      const auto h1 = load_packed(5);
      use(0, with_high_bits<0, 3>(low_nibbles(p0), h0));
      use(1, with_high_bits<2, 3>(high_nibbles(p0), h0));
      use(2, with_high_bits<4, 3>(low_nibbles(p1), h0));
      use(3, with_high_bits<6, 3>(high_nibbles(p1), h0));
      use(4, with_high_bits<0, 3>(low_nibbles(p2), h1));
      use(5, with_high_bits<2, 3>(high_nibbles(p2), h1));
      use(6, with_high_bits<4, 3>(low_nibbles(p3), h1));
      use(7, with_high_bits<6, 3>(high_nibbles(p3), h1));
    }
  }
}

// The 8 vectors of a packed group of the rows layout.
template <int bits, class Use>
THINFER_INLINE void each_quad(const uint8_t* p, Use&& use) {
  each_packed_vector<bits>([&](int i) __attribute__((always_inline)) { return load_u8(p + 64 * i); }, use);
}

// The 8 vectors of a block from its interleaved nibbles w and bits above them; V is one block wide or two.
template <int bits, class V, class Use>
THINFER_INLINE void each_nibble_vector(const V (&w)[4], V h0, V h1, Use&& use) {
  if constexpr (bits == 4) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      use(k, low_nibbles(w[k]));
      use(k + 4, high_nibbles(w[k]));
    }
  } else if constexpr (bits == 5) {
    use(0, with_high_bits<0, 1>(low_nibbles(w[0]), h0));
    use(1, with_high_bits<1, 1>(low_nibbles(w[1]), h0));
    use(2, with_high_bits<2, 1>(low_nibbles(w[2]), h0));
    use(3, with_high_bits<3, 1>(low_nibbles(w[3]), h0));
    use(4, with_high_bits<4, 1>(high_nibbles(w[0]), h0));
    use(5, with_high_bits<5, 1>(high_nibbles(w[1]), h0));
    use(6, with_high_bits<6, 1>(high_nibbles(w[2]), h0));
    use(7, with_high_bits<7, 1>(high_nibbles(w[3]), h0));
  } else {
    use(0, with_high_bits<0, 3>(low_nibbles(w[0]), h0));
    use(1, with_high_bits<2, 3>(low_nibbles(w[1]), h0));
    use(2, with_high_bits<4, 3>(low_nibbles(w[2]), h0));
    use(3, with_high_bits<6, 3>(low_nibbles(w[3]), h0));
    use(4, with_high_bits<0, 3>(high_nibbles(w[0]), h1));
    use(5, with_high_bits<2, 3>(high_nibbles(w[1]), h1));
    use(6, with_high_bits<4, 3>(high_nibbles(w[2]), h1));
    use(7, with_high_bits<6, 3>(high_nibbles(w[3]), h1));
  }
}

// Four channels of the columns layout at one block of 64 outputs: calls use(k, quants) for its 8 vectors of 8 outputs.
// nibbles: offset of the block in a channel; high: offset of its bits above the nibble.
template <int bits, class Use>
THINFER_INLINE void each_column_vector(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d,
                                       size_t nibbles, size_t high, Use&& use) {
  u8x32 w[4];
  interleave4(a + nibbles, b + nibbles, c + nibbles, d + nibbles, w);
  if constexpr (bits == 8) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) use(k, w[k]);
    interleave4(a + nibbles + 32, b + nibbles + 32, c + nibbles + 32, d + nibbles + 32, w);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) use(k + 4, w[k]);
  } else {
    u8x32 h0 = {}, h1 = {};
    if constexpr (bits > 4) h0 = interleave4_short(a + high, b + high, c + high, d + high);
    if constexpr (bits > 5) h1 = interleave4_short(a + high + 8, b + high + 8, c + high + 8, d + high + 8);
    each_nibble_vector<bits>(w, h0, h1, use);
  }
}

}  // namespace thinfer::THINFER_ISA
