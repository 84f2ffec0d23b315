// Eight lanes of float32: the scales and sums of one record of the neurons layout, and how rows become lanes.
#pragma once

#include "cpu/isa/dot8.h"

namespace thinfer::THINFER_ISA {

#if defined(THINFER_ISA_AVX2) || defined(THINFER_ISA_AVX512)

// Bit i is set where q[i] is not 0, of 32.
THINFER_INLINE uint32_t nonzero_bits(const int8_t* q) {
  const __m256i zeros = _mm256_cmpeq_epi8(load_i8x32(q).v, _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(zeros));
}

struct f32x8 {
  __m256 v;
};
using i32x8 = __m256i;
THINFER_INLINE void store8(float* p, f32x8 a) { _mm256_storeu_ps(p, a.v); }
THINFER_INLINE f32x8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
THINFER_INLINE f32x8 load8_f16(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
THINFER_INLINE f32x8 load8_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
THINFER_INLINE f32x8 load8_i8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
THINFER_INLINE f32x8 repeat8(float x) { return {_mm256_set1_ps(x)}; }
THINFER_INLINE f32x8 mul8(f32x8 a, f32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
// What an offset of the weights adds to sums: offset * x_sum.
template <int offset>
THINFER_INLINE i32x8 offset_sums(const int32_t* x_sum) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x_sum));
  return _mm256_mullo_epi32(x, _mm256_set1_epi32(offset));
}
THINFER_INLINE f32x8 difference(i32x8 sum, i32x8 offset) { return {_mm256_cvtepi32_ps(_mm256_sub_epi32(sum, offset))}; }

// 8 rows of 8 32-bit numbers, `from` apart, to their columns.
THINFER_INLINE void transpose8(const float* in, size_t from, __m256 (&out)[8]) {
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + from * i);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}
// 16 rows of 8 32-bit numbers, `from` apart, to 8 rows of 16, `to` apart. They are stored as wide as they will be loaded:
// a load over two stores would wait for both to reach the cache.
THINFER_INLINE void transpose16(const float* in, size_t from, float* out, size_t to) {
  __m256 lo[8], hi[8];
  transpose8(in, from, lo);
  transpose8(in + 8 * from, from, hi);
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) {
#if defined(THINFER_ISA_AVX512)
    _mm512_storeu_ps(out + to * i, _mm512_insertf32x8(_mm512_castps256_ps512(lo[i]), hi[i], 1));
#else
    _mm256_storeu_ps(out + to * i, lo[i]);
    _mm256_storeu_ps(out + to * i + 8, hi[i]);
#endif
  }
}

// 8 rows of 16 numbers of 16 bits: out[k] holds number k of each row, and number k + 8 in its upper half.
THINFER_INLINE void transpose_halves8(const uint16_t* const* rows, size_t at, __m256i (&r)[8]) {
  __m256i t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + at));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);      // numbers 0-3 of two rows
    t[i + 4] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);  // numbers 4-7
  }
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4) {
    const __m256i a = _mm256_unpacklo_epi32(t[half], t[half + 1]), b = _mm256_unpackhi_epi32(t[half], t[half + 1]);
    const __m256i c = _mm256_unpacklo_epi32(t[half + 2], t[half + 3]), d = _mm256_unpackhi_epi32(t[half + 2], t[half + 3]);
    r[half] = _mm256_unpacklo_epi64(a, c);
    r[half + 1] = _mm256_unpackhi_epi64(a, c);
    r[half + 2] = _mm256_unpacklo_epi64(b, d);
    r[half + 3] = _mm256_unpackhi_epi64(b, d);
  }
}
// 16 rows of 16 numbers of 16 bits to 16 rows of 16, stored as wide as they will be loaded.
THINFER_INLINE void transpose_halves(const uint16_t* const* rows, size_t at, uint16_t* out) {
  __m256i lo[8], hi[8];
  transpose_halves8(rows, at, lo);
  transpose_halves8(rows + 8, at, hi);
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
#if defined(THINFER_ISA_AVX512)
    const __m256i first = _mm256_permute2x128_si256(lo[k], hi[k], 0x20);
    const __m256i second = _mm256_permute2x128_si256(lo[k], hi[k], 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * k), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * (k + 8)), second);
#else
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * k), _mm256_castsi256_si128(lo[k]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * k + 8), _mm256_castsi256_si128(hi[k]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * (k + 8)), _mm256_extracti128_si256(lo[k], 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * (k + 8) + 8), _mm256_extracti128_si256(hi[k], 1));
#endif
  }
}

#else

THINFER_INLINE uint32_t nonzero_bits(const int8_t* q) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(q[i] != 0) << i;
  return bits;
}

struct f32x8 {
  float v[8];
};
#define THINFER_EACH8(expression)                  \
  f32x8 r;                                         \
  for (int i = 0; i < 8; ++i) r.v[i] = expression; \
  return r
THINFER_INLINE void store8(float* p, f32x8 a) { __builtin_memcpy(p, a.v, 32); }
THINFER_INLINE f32x8 load8(const float* p) { THINFER_EACH8(p[i]); }
THINFER_INLINE f32x8 load8_f16(const uint8_t* p) {
  uint16_t half[8];
  __builtin_memcpy(half, p, 16);
  THINFER_EACH8(half_to_float(half[i]));
}
THINFER_INLINE f32x8 load8_u8(const uint8_t* p) { THINFER_EACH8(static_cast<float>(p[i])); }
THINFER_INLINE f32x8 load8_i8(const uint8_t* p) { THINFER_EACH8(static_cast<float>(static_cast<int8_t>(p[i]))); }
THINFER_INLINE f32x8 repeat8(float x) { THINFER_EACH8(x); }
THINFER_INLINE f32x8 mul8(f32x8 a, f32x8 b) { THINFER_EACH8(a.v[i] * b.v[i]); }
template <int offset>
THINFER_INLINE i32x8 offset_sums(const int32_t* x_sum) {
  i32x8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = offset * x_sum[i];
  return r;
}
THINFER_INLINE f32x8 difference(const i32x8& sum, const i32x8& offset) {
  THINFER_EACH8(static_cast<float>(sum.v[i] - offset.v[i]));
}
#undef THINFER_EACH8
THINFER_INLINE void transpose16(const float* in, size_t from, float* out, size_t to) {
  for (size_t i = 0; i < 16; ++i) {
    for (size_t k = 0; k < 8; ++k) __builtin_memcpy(out + to * k + i, in + from * i + k, sizeof(float));
  }
}
THINFER_INLINE void transpose_halves(const uint16_t* const* rows, size_t at, uint16_t* out) {
  for (size_t k = 0; k < 16; ++k) {
    for (size_t i = 0; i < 16; ++i) out[16 * k + i] = rows[i][at + k];
  }
}

#endif

}  // namespace thinfer::THINFER_ISA
