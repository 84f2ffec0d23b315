// Functions over f32x16 with fixed polynomials and explicit fma, so that every instruction set gives the same bits.
#pragma once

namespace thinfer::THINFER_ISA {

// The polynomial of e^x: x = n ln 2 + r with integer n; e^x = 2^n times the result.
THINFER_INLINE f32x16 exp_parts(f32x16 x, f32x16* n) {
  const f32x16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  *n = sub(fma(x, set1(1.44269504088896341f), magic), magic);
  f32x16 r = fnma(*n, set1(0.693359375f), x);
  r = fnma(*n, set1(-2.12194440e-4f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return add(fma(p, mul(r, r), r), set1(1.0f));
}

// Below this e^x counts as 0 rather than as a subnormal, which would be slow.
static constexpr float kExpLowest = -86.9f;

// e^x for x <= 0 or NaN: the bits of exp(), sooner.
THINFER_INLINE f32x16 exp_of_negative(f32x16 x) {
  const f32x16 lowest = set1(kExpLowest);
  f32x16 n;
  // max returns its second operand for NaN, so a NaN travels on.
  const f32x16 p = exp_parts(max(lowest, x), &n);
  return select(less(x, lowest), zero(), scale_by_power(p, n));
}

// e^x within 2 units in the last place; infinity above 88.72; NaN stays NaN.
THINFER_INLINE f32x16 exp(f32x16 x) {
  const f32x16 lowest = set1(kExpLowest);
  const f32x16 highest = set1(88.72283f);
  f32x16 n;
  const f32x16 p = exp_parts(min(highest, max(lowest, x)), &n);
  // n reaches 128 and scale_by_power takes 127 at most, hence the doubling first.
  f32x16 y = scale_by_power(add(p, p), sub(n, set1(1.0f)));
  y = select(less(x, lowest), zero(), y);
  return select(less(highest, x), set1(__builtin_inff()), y);
}

THINFER_INLINE f32x16 sigmoid(f32x16 x) { return div(set1(1.0f), add(set1(1.0f), exp(neg(x)))); }

// tanh by e^2x: absolute error about 1e-7.
THINFER_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 e = exp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

// Abramowitz and Stegun 7.1.26: absolute error below 2e-7.
THINFER_INLINE f32x16 erf(f32x16 x) {
  const f32x16 a = abs(x);
  const f32x16 t = div(set1(1.0f), fma(set1(0.3275911f), a, set1(1.0f)));
  f32x16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const f32x16 magnitude = fnma(mul(p, t), exp(neg(mul(a, a))), set1(1.0f));
  return select(less(x, zero()), neg(magnitude), magnitude);
}

}  // namespace thinfer::THINFER_ISA
