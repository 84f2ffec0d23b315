// How sixteen rows of the neurons layout become the lanes of a vector.
#pragma once

#include "cpu/isa/simd.h"

namespace thinfer::THINFER_ISA {

#if defined(THINFER_ISA_AVX2) || defined(THINFER_ISA_AVX512)

// Four numbers of rows 0, 4, 8 and 12, which are 8 numbers long: a quarter each. Quarters that are put together on loading
// need no shuffle across them later.
THINFER_INLINE f32x16 load_quarters(const float* p) {
#if defined(THINFER_ISA_AVX512)
  const __m512 first = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(p)), _mm_loadu_ps(p + 32), 1);
  return {_mm512_insertf32x4(_mm512_insertf32x4(first, _mm_loadu_ps(p + 64), 2), _mm_loadu_ps(p + 96), 3)};
#else
  return {_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 32), 1),
          _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 64)), _mm_loadu_ps(p + 96), 1)};
#endif
}
// The lower pairs of a and b, and the upper ones, number by number in every quarter.
THINFER_INLINE f32x16 interleave_low(f32x16 a, f32x16 b) {
#if defined(THINFER_ISA_AVX512)
  return {_mm512_unpacklo_ps(a.v, b.v)};
#else
  return {_mm256_unpacklo_ps(a.lo, b.lo), _mm256_unpacklo_ps(a.hi, b.hi)};
#endif
}
THINFER_INLINE f32x16 interleave_high(f32x16 a, f32x16 b) {
#if defined(THINFER_ISA_AVX512)
  return {_mm512_unpackhi_ps(a.v, b.v)};
#else
  return {_mm256_unpackhi_ps(a.lo, b.lo), _mm256_unpackhi_ps(a.hi, b.hi)};
#endif
}
// Pairs chosen in every quarter: 0x44 the lower ones of a and b, 0xee the upper ones.
template <int which>
THINFER_INLINE f32x16 shuffle(f32x16 a, f32x16 b) {
#if defined(THINFER_ISA_AVX512)
  return {_mm512_shuffle_ps(a.v, b.v, which)};
#else
  return {_mm256_shuffle_ps(a.lo, b.lo, which), _mm256_shuffle_ps(a.hi, b.hi, which)};
#endif
}

// 16 rows of 8 32-bit numbers to 8 rows of 16, `to` apart. They are stored as wide as they will be loaded: a load over two
// stores would wait for both to reach the cache.
THINFER_INLINE void transpose16(const float* in, float* out, size_t to) {
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4, in += 4, out += 4 * to) {
    const f32x16 a = load_quarters(in), b = load_quarters(in + 8), c = load_quarters(in + 16), d = load_quarters(in + 24);
    const f32x16 ab = interleave_low(a, b), cd = interleave_low(c, d);
    store(out, shuffle<0x44>(ab, cd));
    store(out + to, shuffle<0xee>(ab, cd));
    const f32x16 ab2 = interleave_high(a, b), cd2 = interleave_high(c, d);
    store(out + 2 * to, shuffle<0x44>(ab2, cd2));
    store(out + 3 * to, shuffle<0xee>(ab2, cd2));
  }
}

// 8 rows of 8 numbers of 16 bits, in each half of 8 registers: row i of both in r[i], then number k of all rows in r[k].
THINFER_INLINE void transpose_halves8(__m256i (&r)[8]) {
  __m256i t[8];
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
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    lo[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + at));
    hi[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i + 8] + at));
  }
  transpose_halves8(lo);
  transpose_halves8(hi);
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

THINFER_INLINE void transpose16(const float* in, float* out, size_t to) {
  for (size_t i = 0; i < 16; ++i) {
    for (size_t k = 0; k < 8; ++k) __builtin_memcpy(out + to * k + i, in + 8 * i + k, sizeof(float));
  }
}
THINFER_INLINE void transpose_halves(const uint16_t* const* rows, size_t at, uint16_t* out) {
  for (size_t k = 0; k < 16; ++k) {
    for (size_t i = 0; i < 16; ++i) out[16 * k + i] = rows[i][at + k];
  }
}

#endif

}  // namespace thinfer::THINFER_ISA
