// Integer dot products of 16 output rows by 4 inputs: u8 quants times one int8 activation quad, exact in int32; or of two
// rows by eight quads, which TwiceInputs holds for each half of a vector.
// Dot<bits> adds up at most 8 quads, one group of 32 inputs; see dot8.h for the integer ranges.
#pragma once

#include "cpu/isa/dot8.h"

namespace thinfer::THINFER_ISA {

#if defined(THINFER_ISA_AVX512)

struct u8x64 {
  __m512i v;
};
struct i32x16 {
  __m512i v;
};
THINFER_INLINE u8x64 load_u8(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
THINFER_INLINE void store_u8(uint8_t* p, u8x64 a) { _mm512_storeu_si512(p, a.v); }
THINFER_INLINE u8x64 low_nibbles(u8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
THINFER_INLINE u8x64 high_nibbles(u8x64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// ((a >> shift) & mask) << 4, or-ed into q; shift may be negative (left).
template <int shift, int mask>
THINFER_INLINE u8x64 with_high_bits(u8x64 q, u8x64 a) {
  const __m512i moved = shift >= 4 ? _mm512_srli_epi16(a.v, shift - 4) : _mm512_slli_epi16(a.v, 4 - shift);
  return {_mm512_or_si512(q.v, _mm512_and_si512(moved, _mm512_set1_epi8(mask << 4)))};
}
THINFER_INLINE i32x16 join(__m256i lo, __m256i hi) { return {_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1)}; }
THINFER_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
THINFER_INLINE i32x16 minus(i32x16 a, int32_t b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }
// Rounds to nearest even and narrows; values lie within +-127. Returns their sum.
THINFER_INLINE int32_t store_i8(int8_t* p, f32x16 a) {
  const __m512i v = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
  return _mm512_reduce_add_epi32(v);
}
THINFER_INLINE f32x16 load_u8_as_float(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
THINFER_INLINE f32x16 load_i8_as_float(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
struct TwiceInputs {
  __m512i v;
  THINFER_INLINE_MEMBER explicit TwiceInputs(const int8_t* p) : v(_mm512_broadcast_i64x4(load_i8x32(p).v)) {}
};
template <int bits>
struct Dot {
  __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  THINFER_INLINE_MEMBER void add(u8x64 q, TwiceInputs x, int step) {
    sum[step & 1] = _mm512_dpbusd_epi32(sum[step & 1], q.v, x.v);
  }
  THINFER_INLINE_MEMBER void add(u8x64 q, const int8_t* quad, int step) {
    int32_t x;
    __builtin_memcpy(&x, quad, 4);
    sum[step & 1] = _mm512_dpbusd_epi32(sum[step & 1], q.v, _mm512_set1_epi32(x));
  }
  THINFER_INLINE_MEMBER i32x16 total() const { return {_mm512_add_epi32(sum[0], sum[1])}; }
};

// Two blocks of 64 outputs of the columns layout at once: 512-bit registers, for 256-bit ones would leave a port idle.
// Low and high halves of every vector belong to the first and the second block.
THINFER_INLINE void interleave4(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, u8x64 (&out)[4]) {
  const __m512i va = load_u8(a).v, vb = load_u8(b).v, vc = load_u8(c).v, vd = load_u8(d).v;
  const __m512i ab0 = _mm512_unpacklo_epi8(va, vb), ab1 = _mm512_unpackhi_epi8(va, vb);
  const __m512i cd0 = _mm512_unpacklo_epi8(vc, vd), cd1 = _mm512_unpackhi_epi8(vc, vd);
  out[0].v = _mm512_unpacklo_epi16(ab0, cd0);
  out[1].v = _mm512_unpackhi_epi16(ab0, cd0);
  out[2].v = _mm512_unpacklo_epi16(ab1, cd1);
  out[3].v = _mm512_unpackhi_epi16(ab1, cd1);
}
THINFER_INLINE u8x64 join_u8(u8x32 first, u8x32 second) {
  return {_mm512_inserti64x4(_mm512_castsi256_si512(first.v), second.v, 1)};
}
struct DotPair {
  __m512i sum;
  THINFER_INLINE_MEMBER explicit DotPair(int32_t start = 0) : sum(_mm512_set1_epi32(start)) {}
  THINFER_INLINE_MEMBER void add(u8x64 q, const int8_t* quad) {
    int32_t x;
    __builtin_memcpy(&x, quad, 4);
    sum = _mm512_dpbusd_epi32(sum, q.v, _mm512_set1_epi32(x));
  }
};
THINFER_INLINE u8x64 without_low_nibbles(u8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(-16))}; }
// Sums over whole bytes and over 16 * high nibbles -> sums over low and over high nibbles.
THINFER_INLINE void separate_nibbles(DotPair& whole, DotPair& high) {
  whole.sum = _mm512_sub_epi32(whole.sum, high.sum);
  high.sum = _mm512_srai_epi32(high.sum, 4);
}
// 16 outputs of the first (0) or second (1) block from two pairs of 8.
template <int block>
THINFER_INLINE i32x16 join_pairs(DotPair lo, DotPair hi) {
  return {_mm512_shuffle_i64x2(lo.sum, hi.sum, block == 0 ? 0x44 : 0xee)};
}

#elif defined(THINFER_ISA_AVX2)

struct u8x64 {
  __m256i lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};
THINFER_INLINE u8x64 load_u8(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
THINFER_INLINE void store_u8(uint8_t* p, u8x64 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
THINFER_INLINE u8x64 low_nibbles(u8x64 a) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
THINFER_INLINE u8x64 high_nibbles(u8x64 a) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), m), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), m)};
}
template <int shift, int mask>
THINFER_INLINE __m256i high_bits(__m256i a) {
  const __m256i moved = shift >= 4 ? _mm256_srli_epi16(a, shift - 4) : _mm256_slli_epi16(a, 4 - shift);
  return _mm256_and_si256(moved, _mm256_set1_epi8(mask << 4));
}
template <int shift, int mask>
THINFER_INLINE u8x64 with_high_bits(u8x64 q, u8x64 a) {
  return {_mm256_or_si256(q.lo, high_bits<shift, mask>(a.lo)), _mm256_or_si256(q.hi, high_bits<shift, mask>(a.hi))};
}
THINFER_INLINE i32x16 join(__m256i lo, __m256i hi) { return {lo, hi}; }
THINFER_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
THINFER_INLINE i32x16 minus(i32x16 a, int32_t b) {
  const __m256i v = _mm256_set1_epi32(b);
  return {_mm256_sub_epi32(a.lo, v), _mm256_sub_epi32(a.hi, v)};
}
THINFER_INLINE int32_t store_i8(int8_t* p, f32x16 a) {
  const __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m256i s8 = _mm256_add_epi32(lo, hi);
  const __m128i s4 = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
  const __m128i s2 = _mm_add_epi32(s4, _mm_shuffle_epi32(s4, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s2, _mm_shuffle_epi32(s2, 0xb1)));
}
THINFER_INLINE f32x16 load_u8_as_float(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
THINFER_INLINE f32x16 load_i8_as_float(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}

struct TwiceInputs {
  i8x32 v;
  THINFER_INLINE_MEMBER explicit TwiceInputs(const int8_t* p) : v(load_i8x32(p)) {}
};
template <int bits>
struct Dot {
  Dot8<bits> lo, hi;
  THINFER_INLINE_MEMBER void add(u8x64 q, TwiceInputs x, int step) {
    lo.add({q.lo}, x.v, step);
    hi.add({q.hi}, x.v, step);
  }
  THINFER_INLINE_MEMBER void add(u8x64 q, const int8_t* quad, int step) {
    lo.add({q.lo}, quad, step);
    hi.add({q.hi}, quad, step);
  }
  THINFER_INLINE_MEMBER i32x16 total() { return {lo.total(), hi.total()}; }
};

#else

struct u8x64 {
  uint8_t v[64];
};
struct i32x16 {
  int32_t v[16];
};
THINFER_INLINE u8x64 load_u8(const uint8_t* p) {
  u8x64 r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
THINFER_INLINE void store_u8(uint8_t* p, u8x64 a) { __builtin_memcpy(p, a.v, 64); }
THINFER_INLINE u8x64 low_nibbles(u8x64 a) {
  for (int i = 0; i < 64; ++i) a.v[i] &= 15;
  return a;
}
THINFER_INLINE u8x64 high_nibbles(u8x64 a) {
  for (int i = 0; i < 64; ++i) a.v[i] >>= 4;
  return a;
}
template <int shift, int mask>
THINFER_INLINE u8x64 with_high_bits(u8x64 q, u8x64 a) {
  for (int i = 0; i < 64; ++i) q.v[i] = static_cast<uint8_t>(q.v[i] | (((a.v[i] >> shift) & mask) << 4));
  return q;
}
THINFER_INLINE i32x16 join(i32x8 lo, i32x8 hi) {
  i32x16 r;
  for (int i = 0; i < 8; ++i) {
    r.v[i] = lo.v[i];
    r.v[8 + i] = hi.v[i];
  }
  return r;
}
THINFER_INLINE f32x16 to_float(i32x16 a) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
THINFER_INLINE i32x16 minus(i32x16 a, int32_t b) {
  for (int i = 0; i < 16; ++i) a.v[i] -= b;
  return a;
}
THINFER_INLINE int32_t store_i8(int8_t* p, f32x16 a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    const float whole = (a.v[i] + 12582912.0f) - 12582912.0f;  // rounds to nearest even below 2^22
    p[i] = static_cast<int8_t>(whole);
    sum += p[i];
  }
  return sum;
}
THINFER_INLINE f32x16 load_u8_as_float(const uint8_t* p) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(p[i]);
  return r;
}
THINFER_INLINE f32x16 load_i8_as_float(const uint8_t* p) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return r;
}
struct TwiceInputs {
  i8x32 v;
  THINFER_INLINE_MEMBER explicit TwiceInputs(const int8_t* p) : v(load_i8x32(p)) {}
};
template <int bits>
struct Dot {
  i32x16 sum = {};
  THINFER_INLINE_MEMBER void add(const u8x64& q, const TwiceInputs& x, int) {
    for (int i = 0; i < 64; ++i) sum.v[i / 4] += static_cast<int32_t>(q.v[i]) * x.v.v[i % 32];
  }
  THINFER_INLINE_MEMBER void add(const u8x64& q, const int8_t* quad, int) {
    for (int r = 0; r < 16; ++r) {
      for (int i = 0; i < 4; ++i) sum.v[r] += static_cast<int32_t>(q.v[4 * r + i]) * quad[i];
    }
  }
  THINFER_INLINE_MEMBER i32x16 total() const { return sum; }
};

#endif

}  // namespace thinfer::THINFER_ISA
