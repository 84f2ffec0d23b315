// Sums of sixteen rows of the neurons layout by eight groups, which fit 16 bits, and their scales: from a row in each half
// vector to a row in each lane. Half as wide as floats they take half the shuffles. NibbleDot makes the sums.
#pragma once

#include "cpu/isa/row_pair.h"
#include "cpu/isa/transpose.h"

namespace thinfer::THINFER_ISA {

#if defined(THINFER_ISA_AVX512)

// start + the low nibbles of some vectors times their inputs + the high nibbles times theirs.
class NibbleDot {
 public:
  THINFER_INLINE_MEMBER explicit NibbleDot(i32x16 start) : low_(start.v) {}
  THINFER_INLINE_MEMBER void add(u8x64 both, TwiceInputs low, TwiceInputs high, int) {
    low_ = _mm512_dpbusd_epi32(low_, low_nibbles(both).v, low.v);
    high_ = _mm512_dpbusd_epi32(high_, without_low_nibbles(both).v, high.v);
  }
  THINFER_INLINE_MEMBER i32x16 total() const { return {_mm512_add_epi32(low_, _mm512_srai_epi32(high_, 4))}; }

 private:
  __m512i low_, high_ = _mm512_setzero_si512();  // 16 * the sum of high nibbles, exact in int32
};

// [quarter of 16 bytes][2 row pairs][4 groups]: rows r and r + 8 of two neighbouring r.
struct i16x32 {
  __m512i v;
};
THINFER_INLINE i16x32 narrow(i32x16 a, i32x16 b) { return {_mm512_packs_epi32(a.v, b.v)}; }

// Row pairs 2 i and 2 i + 1 in pairs[i] -> the sums of each group, a row a lane.
THINFER_INLINE void sums_by_lane(const i16x32 (&pairs)[4], f32x16 (&sums)[8]) {
  __m512i p[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) p[i] = _mm512_unpacklo_epi16(pairs[i].v, _mm512_unpackhi_epi64(pairs[i].v, pairs[i].v));
  const __m512i a = _mm512_unpacklo_epi32(p[0], p[1]), b = _mm512_unpackhi_epi32(p[0], p[1]);
  const __m512i c = _mm512_unpacklo_epi32(p[2], p[3]), d = _mm512_unpackhi_epi32(p[2], p[3]);
  const __m512i groups[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                             _mm512_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    // Quarters: group g of rows 0-7, group g + 4 of them, and both of rows 8-15.
    const __m512i ordered = _mm512_shuffle_i64x2(groups[g], groups[g], 0xd8);
    sums[g].v = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(ordered)));
    sums[g + 4].v = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(ordered, 1)));
  }
}

#elif defined(THINFER_ISA_AVX2)

class NibbleDot {
 public:
  THINFER_INLINE_MEMBER explicit NibbleDot(i32x16 start) : start_(start) {}
  THINFER_INLINE_MEMBER void add(u8x64 both, TwiceInputs low, TwiceInputs high, int step) {
    dot_.add(low_nibbles(both), low, 2 * step);
    dot_.add(high_nibbles(both), high, 2 * step + 1);
  }
  THINFER_INLINE_MEMBER i32x16 total() {
    const i32x16 sum = dot_.total();
    return {_mm256_add_epi32(sum.lo, start_.lo), _mm256_add_epi32(sum.hi, start_.hi)};
  }

 private:
  Dot<4> dot_;
  i32x16 start_;
};

struct i16x32 {
  __m256i lo, hi;
};
THINFER_INLINE i16x32 narrow(i32x16 a, i32x16 b) {
  return {_mm256_packs_epi32(a.lo, b.lo), _mm256_packs_epi32(a.hi, b.hi)};
}

THINFER_INLINE __m256 widen(__m128i sums) { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(sums)); }
// Of eight rows: group g in the lower half of groups[g], group g + 4 in its upper one.
THINFER_INLINE void groups_of_half(__m256i p0, __m256i p1, __m256i p2, __m256i p3, __m256i (&groups)[4]) {
  p0 = _mm256_unpacklo_epi16(p0, _mm256_unpackhi_epi64(p0, p0));
  p1 = _mm256_unpacklo_epi16(p1, _mm256_unpackhi_epi64(p1, p1));
  p2 = _mm256_unpacklo_epi16(p2, _mm256_unpackhi_epi64(p2, p2));
  p3 = _mm256_unpacklo_epi16(p3, _mm256_unpackhi_epi64(p3, p3));
  const __m256i a = _mm256_unpacklo_epi32(p0, p1), b = _mm256_unpackhi_epi32(p0, p1);
  const __m256i c = _mm256_unpacklo_epi32(p2, p3), d = _mm256_unpackhi_epi32(p2, p3);
  groups[0] = _mm256_unpacklo_epi64(a, c);
  groups[1] = _mm256_unpackhi_epi64(a, c);
  groups[2] = _mm256_unpacklo_epi64(b, d);
  groups[3] = _mm256_unpackhi_epi64(b, d);
}
THINFER_INLINE void sums_by_lane(const i16x32 (&pairs)[4], f32x16 (&sums)[8]) {
  __m256i lo[4], hi[4];
  groups_of_half(pairs[0].lo, pairs[1].lo, pairs[2].lo, pairs[3].lo, lo);
  groups_of_half(pairs[0].hi, pairs[1].hi, pairs[2].hi, pairs[3].hi, hi);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    sums[g] = {widen(_mm256_castsi256_si128(lo[g])), widen(_mm256_castsi256_si128(hi[g]))};
    sums[g + 4] = {widen(_mm256_extracti128_si256(lo[g], 1)), widen(_mm256_extracti128_si256(hi[g], 1))};
  }
}

#else

class NibbleDot {
 public:
  explicit NibbleDot(const i32x16& start) { dot_.sum = start; }
  void add(const u8x64& both, const TwiceInputs& low, const TwiceInputs& high, int step) {
    dot_.add(low_nibbles(both), low, 2 * step);
    dot_.add(high_nibbles(both), high, 2 * step + 1);
  }
  i32x16 total() const { return dot_.total(); }

 private:
  Dot<4> dot_;
};

struct i16x32 {
  int16_t v[2][16];  // of two row pairs: 8 groups of row r, 8 of row r + 8
};
THINFER_INLINE i16x32 narrow(const i32x16& a, const i32x16& b) {
  i16x32 out;
  for (int i = 0; i < 16; ++i) {
    out.v[0][i] = static_cast<int16_t>(a.v[i]);
    out.v[1][i] = static_cast<int16_t>(b.v[i]);
  }
  return out;
}
THINFER_INLINE void sums_by_lane(const i16x32 (&pairs)[4], f32x16 (&sums)[8]) {
  for (int row = 0; row < 16; ++row) {
    const int16_t* of_row = pairs[row % 8 / 2].v[row % 2] + row / 8 * 8;
    for (int g = 0; g < 8; ++g) sums[g].v[row] = static_cast<float>(of_row[g]);
  }
}

#endif

// Eight float16 of each of sixteen rows, `at` bytes behind their beginnings -> each of the eight, a row a lane.
THINFER_INLINE void halves_by_lane(const uint8_t* const* rows, size_t at, f32x16 (&out)[8]) {
#if defined(THINFER_ISA_AVX512) || defined(THINFER_ISA_AVX2)
  __m256i r[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at));
    r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 8] + at)), 1);
  }
  transpose_halves8(r);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#if defined(THINFER_ISA_AVX512)
    out[i].v = _mm512_cvtph_ps(r[i]);
#else
    out[i] = {_mm256_cvtph_ps(_mm256_castsi256_si128(r[i])), _mm256_cvtph_ps(_mm256_extracti128_si256(r[i], 1))};
#endif
  }
#else
  for (int row = 0; row < 16; ++row) {
    uint16_t halves[8];
    __builtin_memcpy(halves, rows[row] + at, sizeof halves);
    for (int i = 0; i < 8; ++i) out[i].v[row] = half_to_float(halves[i]);
  }
#endif
}

}  // namespace thinfer::THINFER_ISA
