// Integer dot products of 8 outputs by 4 inputs, and the interleaving of four input channels that feeds them.
//
// VNNI adds into int32 directly. AVX2 adds pairs into int16 first: |q| * 127 * 2 a pair, so 8 quads fit at 4 bits
// (30480), 4 at 5 bits (31496) and 2 at 6 bits (32004) before they must be widened; saturation would be silent. Unsigned
// 8 bits do not fit at all: those quants are made signed and multiplied as |w| * sign(w) x, at most 128 * 127 * 2 =
// 32512, and widened at once. kOffset8 is the offset that 8-bit sums still contain.
#pragma once

#include "cpu/isa/simd.h"


namespace thinfer::THINFER_ISA {

#if defined(THINFER_ISA_AVX2) || defined(THINFER_ISA_AVX512)

struct u8x32 {
  __m256i v;
};
struct i8x32 {
  __m256i v;
};
THINFER_INLINE i8x32 load_i8x32(const int8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
// Bit i is set where q[i] is not 0, of 32.
THINFER_INLINE uint32_t nonzero_bits(const int8_t* q) {
  const __m256i zeros = _mm256_cmpeq_epi8(load_i8x32(q).v, _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(zeros));
}
THINFER_INLINE i8x32 repeat_quad(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x)};
}
THINFER_INLINE u8x32 load_u8x32(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
THINFER_INLINE void store_u8x32(uint8_t* p, u8x32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
THINFER_INLINE u8x32 low_nibbles(u8x32 a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
THINFER_INLINE u8x32 high_nibbles(u8x32 a) {
  return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))};
}
// q | ((a >> shift) & mask) << 4
template <int shift, int mask>
THINFER_INLINE u8x32 with_high_bits(u8x32 q, u8x32 a) {
  const __m256i moved = shift >= 4 ? _mm256_srli_epi16(a.v, shift - 4) : _mm256_slli_epi16(a.v, 4 - shift);
  return {_mm256_or_si256(q.v, _mm256_and_si256(moved, _mm256_set1_epi8(mask << 4)))};
}
// Four channels of 32 bytes -> four vectors of 8 outputs x 4 channels; byte positions as codec.h columns_byte says.
THINFER_INLINE void interleave4(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, u8x32 (&out)[4]) {
  const __m256i va = load_u8x32(a).v, vb = load_u8x32(b).v, vc = load_u8x32(c).v, vd = load_u8x32(d).v;
  const __m256i ab0 = _mm256_unpacklo_epi8(va, vb), ab1 = _mm256_unpackhi_epi8(va, vb);
  const __m256i cd0 = _mm256_unpacklo_epi8(vc, vd), cd1 = _mm256_unpackhi_epi8(vc, vd);
  out[0].v = _mm256_unpacklo_epi16(ab0, cd0);
  out[1].v = _mm256_unpackhi_epi16(ab0, cd0);
  out[2].v = _mm256_unpacklo_epi16(ab1, cd1);
  out[3].v = _mm256_unpackhi_epi16(ab1, cd1);
}
// Four channels of 8 bytes -> one vector of 8 x 4 channels, in order.
THINFER_INLINE u8x32 interleave4_short(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const __m128i va = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a));
  const __m128i vb = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
  const __m128i vc = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(c));
  const __m128i vd = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(d));
  const __m128i ab = _mm_unpacklo_epi8(va, vb), cd = _mm_unpacklo_epi8(vc, vd);
  return {_mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd))};
}

#if defined(THINFER_ISA_AVX512) || defined(THINFER_ISA_AVXVNNI)
constexpr int kOffset8 = 128;
template <int bits>
struct Dot8 {
  __m256i sum = _mm256_setzero_si256();
  THINFER_INLINE_MEMBER void add(u8x32 q, const int8_t* quad, int step) { add(q, repeat_quad(quad), step); }
  THINFER_INLINE_MEMBER void add(u8x32 q, i8x32 x, int) {
#if defined(THINFER_ISA_AVX512)
    sum = _mm256_dpbusd_epi32(sum, q.v, x.v);
#else
    sum = _mm256_dpbusd_avx_epi32(sum, q.v, x.v);
#endif
  }
  THINFER_INLINE_MEMBER __m256i total() const { return sum; }
};
#else
constexpr int kOffset8 = 0;
template <int bits>
struct Dot8 {
  static constexpr int kQuads = bits == 4 ? 8 : bits == 5 ? 4 : 2;  // that fit in int16
  __m256i sum = _mm256_setzero_si256(), narrow = _mm256_setzero_si256();
  THINFER_INLINE_MEMBER void widen() {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
    narrow = _mm256_setzero_si256();
  }
  THINFER_INLINE_MEMBER void add(u8x32 q, const int8_t* quad, int step) { add(q, repeat_quad(quad), step); }
  THINFER_INLINE_MEMBER void add(u8x32 q, i8x32 x, int step) {
    if constexpr (bits == 8) {
      const __m256i w = _mm256_xor_si256(q.v, _mm256_set1_epi8(-128));
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x.v, w));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(q.v, x.v));
      if (kQuads < 8 && (step + 1) % kQuads == 0) widen();
    }
  }
  THINFER_INLINE_MEMBER __m256i total() {
    if constexpr (bits != 8) widen();
    return sum;
  }
};
#endif

#else

struct u8x32 {
  uint8_t v[32];
};
struct i8x32 {
  int8_t v[32];
};
THINFER_INLINE i8x32 load_i8x32(const int8_t* p) {
  i8x32 r;
  __builtin_memcpy(r.v, p, 32);
  return r;
}
THINFER_INLINE uint32_t nonzero_bits(const int8_t* q) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(q[i] != 0) << i;
  return bits;
}
THINFER_INLINE i8x32 repeat_quad(const int8_t* p) {
  i8x32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i % 4];
  return r;
}
THINFER_INLINE u8x32 load_u8x32(const uint8_t* p) {
  u8x32 r;
  __builtin_memcpy(r.v, p, 32);
  return r;
}
THINFER_INLINE void store_u8x32(uint8_t* p, u8x32 a) { __builtin_memcpy(p, a.v, 32); }
THINFER_INLINE u8x32 low_nibbles(u8x32 a) {
  for (int i = 0; i < 32; ++i) a.v[i] &= 15;
  return a;
}
THINFER_INLINE u8x32 high_nibbles(u8x32 a) {
  for (int i = 0; i < 32; ++i) a.v[i] >>= 4;
  return a;
}
template <int shift, int mask>
THINFER_INLINE u8x32 with_high_bits(u8x32 q, u8x32 a) {
  for (int i = 0; i < 32; ++i) q.v[i] = static_cast<uint8_t>(q.v[i] | (((a.v[i] >> shift) & mask) << 4));
  return q;
}
THINFER_INLINE void interleave4(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, u8x32 (&out)[4]) {
  const uint8_t* channels[4] = {a, b, c, d};
  for (int k = 0; k < 4; ++k) {
    for (int r = 0; r < 8; ++r) {
      const int byte = r < 4 ? 4 * k + r : 16 + 4 * k + (r - 4);
      for (int i = 0; i < 4; ++i) out[k].v[4 * r + i] = channels[i][byte];
    }
  }
}
THINFER_INLINE u8x32 interleave4_short(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  u8x32 out;
  for (int r = 0; r < 8; ++r) {
    out.v[4 * r] = a[r];
    out.v[4 * r + 1] = b[r];
    out.v[4 * r + 2] = c[r];
    out.v[4 * r + 3] = d[r];
  }
  return out;
}
struct i32x8 {
  int32_t v[8];
};
constexpr int kOffset8 = 128;
template <int bits>
struct Dot8 {
  i32x8 sum = {};
  THINFER_INLINE_MEMBER void add(const u8x32& q, const int8_t* quad, int step) { add(q, repeat_quad(quad), step); }
  THINFER_INLINE_MEMBER void add(const u8x32& q, const i8x32& x, int) {
    for (int i = 0; i < 32; ++i) sum.v[i / 4] += static_cast<int32_t>(q.v[i]) * x.v[i];
  }
  THINFER_INLINE_MEMBER i32x8 total() const { return sum; }
};

#endif

// Lists the set bits of 16 as channels `first` and up, and their quants; returns how many there are. Needs room for
// 16 of each.
THINFER_INLINE int list_used(uint32_t used, int first, const int8_t* q, uint8_t* channel, int8_t* value) {
#if defined(THINFER_ISA_AVX512)
  const auto mask = static_cast<__mmask16>(used);
  const __m512i places = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(first));
  const __m512i quants = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + first)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(channel), _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(mask, places)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(value), _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(mask, quants)));
  return __builtin_popcount(used);
#else
  int count = 0;
  for (; used != 0; used &= used - 1) {
    const int i = first + __builtin_ctz(used);
    channel[count] = static_cast<uint8_t>(i);
    value[count++] = q[i];
  }
  return count;
#endif
}

}  // namespace thinfer::THINFER_ISA
