// f32x16 as sixteen floats: runs on any machine and defines what the other instruction sets must compute.
#pragma once

namespace thinfer::THINFER_ISA {

struct f32x16 {
  float v[16];
};
struct mask16 {
  uint16_t bits;
};

#define THINFER_EACH(expression)                    \
  f32x16 r;                                         \
  for (int i = 0; i < 16; ++i) r.v[i] = expression; \
  return r

THINFER_INLINE f32x16 load(const float* p) { THINFER_EACH(p[i]); }
THINFER_INLINE void store(float* p, f32x16 a) { __builtin_memcpy(p, a.v, 64); }
THINFER_INLINE f32x16 load_n(const float* p, int n) { THINFER_EACH(i < n ? p[i] : 0.0f); }
THINFER_INLINE void store_n(float* p, f32x16 a, int n) {
  for (int i = 0; i < 16 && i < n; ++i) p[i] = a.v[i];
}
THINFER_INLINE f32x16 set1(float x) { THINFER_EACH(x); }
THINFER_INLINE f32x16 zero() { THINFER_EACH(0.0f); }
THINFER_INLINE f32x16 iota() { THINFER_EACH(static_cast<float>(i)); }
THINFER_INLINE f32x16 add(f32x16 a, f32x16 b) { THINFER_EACH(a.v[i] + b.v[i]); }
THINFER_INLINE f32x16 sub(f32x16 a, f32x16 b) { THINFER_EACH(a.v[i] - b.v[i]); }
THINFER_INLINE f32x16 mul(f32x16 a, f32x16 b) { THINFER_EACH(a.v[i] * b.v[i]); }
THINFER_INLINE f32x16 div(f32x16 a, f32x16 b) { THINFER_EACH(a.v[i] / b.v[i]); }
THINFER_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { THINFER_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
THINFER_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { THINFER_EACH(__builtin_fmaf(-a.v[i], b.v[i], c.v[i])); }
// As x86 has it: the second operand when either is NaN.
THINFER_INLINE f32x16 min(f32x16 a, f32x16 b) { THINFER_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
THINFER_INLINE f32x16 max(f32x16 a, f32x16 b) { THINFER_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
THINFER_INLINE f32x16 neg(f32x16 a) { THINFER_EACH(float_of(bits_of(a.v[i]) ^ 0x80000000u)); }
THINFER_INLINE f32x16 abs(f32x16 a) { THINFER_EACH(float_of(bits_of(a.v[i]) & 0x7fffffffu)); }

#define THINFER_EACH_MASK(expression)                                                    \
  uint32_t bits = 0;                                                                     \
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>((expression) ? 1 : 0) << i; \
  return { static_cast<uint16_t>(bits) }

THINFER_INLINE mask16 less(f32x16 a, f32x16 b) { THINFER_EACH_MASK(a.v[i] < b.v[i]); }
THINFER_INLINE mask16 less_equal(f32x16 a, f32x16 b) { THINFER_EACH_MASK(a.v[i] <= b.v[i]); }
THINFER_INLINE uint32_t mask_bits(mask16 m) { return m.bits; }
// Lane i of the result is a's where the mask is set, else b's.
THINFER_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { THINFER_EACH((m.bits >> i) & 1 ? a.v[i] : b.v[i]); }

THINFER_INLINE f32x16 load_f16(const uint16_t* p) { THINFER_EACH(half_to_float(p[i])); }
THINFER_INLINE void store_f16(uint16_t* p, f32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
THINFER_INLINE f32x16 load_bf16(const uint16_t* p) { THINFER_EACH(float_of(static_cast<uint32_t>(p[i]) << 16)); }

// a * 2^n for integer-valued n in [-126, 127], by its exponent bits.
THINFER_INLINE f32x16 scale_by_power(f32x16 a, f32x16 n) {
  THINFER_EACH(a.v[i] * float_of(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23));
}

// The order of both reductions is halves of 8, 4, 2, 1 on every instruction set.
THINFER_INLINE float reduce_add(f32x16 a) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) s[i] = s[i] + s[i + 4];
  for (int i = 0; i < 2; ++i) s[i] = s[i] + s[i + 2];
  return s[0] + s[1];
}
THINFER_INLINE float reduce_max(f32x16 a) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = a.v[i] > a.v[i + 8] ? a.v[i] : a.v[i + 8];
  for (int i = 0; i < 4; ++i) s[i] = s[i] > s[i + 4] ? s[i] : s[i + 4];
  for (int i = 0; i < 2; ++i) s[i] = s[i] > s[i + 2] ? s[i] : s[i + 2];
  return s[0] > s[1] ? s[0] : s[1];
}

#undef THINFER_EACH
#undef THINFER_EACH_MASK

}  // namespace thinfer::THINFER_ISA
