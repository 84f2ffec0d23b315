// Two rows of the neurons layout side by side: a vector's lower half belongs to the first and its upper half to the second.
// A lane of 32 bits is one of a record's eight groups.
#pragma once

#include "cpu/isa/dot.h"

namespace thinfer::THINFER_ISA {

#if defined(THINFER_ISA_AVX512)

THINFER_INLINE u8x64 load_pair(const uint8_t* a, const uint8_t* b) { return join_u8(load_u8x32(a), load_u8x32(b)); }
THINFER_INLINE __m256i load_pair16(const uint8_t* a, const uint8_t* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
}
THINFER_INLINE __m128i load_pair8(const uint8_t* a, const uint8_t* b) {
  return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)));
}
THINFER_INLINE f32x16 load_pair_f16(const uint8_t* a, const uint8_t* b) { return {_mm512_cvtph_ps(load_pair16(a, b))}; }
THINFER_INLINE f32x16 load_pair_u8(const uint8_t* a, const uint8_t* b) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_pair8(a, b)))};
}
THINFER_INLINE f32x16 load_pair_i8(const uint8_t* a, const uint8_t* b) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_pair8(a, b)))};
}
THINFER_INLINE f32x16 set_pair(float a, float b) {
  return {_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(a), _mm512_set1_ps(b))};
}
THINFER_INLINE f32x16 load_twice(const float* p) { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
THINFER_INLINE i32x16 load_twice(const int32_t* p) {
  return {_mm512_broadcast_i32x8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
THINFER_INLINE i32x16 times(i32x16 a, int32_t b) { return {_mm512_mullo_epi32(a.v, _mm512_set1_epi32(b))}; }
THINFER_INLINE i32x16 minus(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }

#elif defined(THINFER_ISA_AVX2)

THINFER_INLINE u8x64 load_pair(const uint8_t* a, const uint8_t* b) { return {load_u8x32(a).v, load_u8x32(b).v}; }
THINFER_INLINE f32x16 load_pair_f16(const uint8_t* a, const uint8_t* b) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)))};
}
THINFER_INLINE __m256 load8_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
THINFER_INLINE __m256 load8_i8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
THINFER_INLINE f32x16 load_pair_u8(const uint8_t* a, const uint8_t* b) { return {load8_u8(a), load8_u8(b)}; }
THINFER_INLINE f32x16 load_pair_i8(const uint8_t* a, const uint8_t* b) { return {load8_i8(a), load8_i8(b)}; }
THINFER_INLINE f32x16 set_pair(float a, float b) { return {_mm256_set1_ps(a), _mm256_set1_ps(b)}; }
THINFER_INLINE f32x16 load_twice(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p)}; }
THINFER_INLINE i32x16 load_twice(const int32_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {v, v};
}
THINFER_INLINE i32x16 times(i32x16 a, int32_t b) {
  const __m256i v = _mm256_set1_epi32(b);
  return {_mm256_mullo_epi32(a.lo, v), _mm256_mullo_epi32(a.hi, v)};
}
THINFER_INLINE i32x16 minus(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }

#else

THINFER_INLINE u8x64 load_pair(const uint8_t* a, const uint8_t* b) {
  u8x64 r;
  __builtin_memcpy(r.v, a, 32);
  __builtin_memcpy(r.v + 32, b, 32);
  return r;
}
#define THINFER_EACH_PAIR(type, expression) \
  type r;                                   \
  for (int i = 0; i < 16; ++i) {            \
    const int lane = i % 8;                 \
    const auto* p = i < 8 ? a : b;          \
    r.v[i] = expression;                    \
  }                                         \
  return r
THINFER_INLINE f32x16 load_pair_f16(const uint8_t* first, const uint8_t* second) {
  uint16_t a[8], b[8];
  __builtin_memcpy(a, first, sizeof a);
  __builtin_memcpy(b, second, sizeof b);
  THINFER_EACH_PAIR(f32x16, half_to_float(p[lane]));
}
THINFER_INLINE f32x16 load_pair_u8(const uint8_t* a, const uint8_t* b) {
  THINFER_EACH_PAIR(f32x16, static_cast<float>(p[lane]));
}
THINFER_INLINE f32x16 load_pair_i8(const uint8_t* a, const uint8_t* b) {
  THINFER_EACH_PAIR(f32x16, static_cast<float>(static_cast<int8_t>(p[lane])));
}
#undef THINFER_EACH_PAIR
THINFER_INLINE f32x16 set_pair(float a, float b) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = i < 8 ? a : b;
  return r;
}
THINFER_INLINE f32x16 load_twice(const float* p) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = p[i % 8];
  return r;
}
THINFER_INLINE i32x16 load_twice(const int32_t* p) {
  i32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = p[i % 8];
  return r;
}
THINFER_INLINE i32x16 times(i32x16 a, int32_t b) {
  for (int i = 0; i < 16; ++i) a.v[i] *= b;
  return a;
}
THINFER_INLINE i32x16 minus(i32x16 a, const i32x16& b) {
  for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i];
  return a;
}

#endif

}  // namespace thinfer::THINFER_ISA
