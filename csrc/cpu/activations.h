// Activations of one vector, for the ops that apply them.
#pragma once

#include "cpu/isa/simd.h"
#include "kernels.h"

namespace thinfer::THINFER_ISA {

template <Activation activation>
THINFER_INLINE f32x16 activate(f32x16 x, f32x16 cut) {
  if constexpr (activation == Activation::silu) {
    return mul(x, sigmoid(x));
  } else if constexpr (activation == Activation::relu || activation == Activation::drelu) {
    return max(zero(), x);  // the second operand wins over NaN, so NaN is kept
  } else if constexpr (activation == Activation::relu2) {
    const f32x16 positive = max(zero(), x);
    return mul(positive, positive);
  } else if constexpr (activation == Activation::fatrelu) {
    return select(less(x, cut), zero(), x);  // NaN is not less, so it is kept
  } else {
    const f32x16 half = mul(set1(0.5f), x);
    if constexpr (activation == Activation::gelu) {
      return fma(half, erf(mul(x, set1(0.70710678f))), half);
    } else {
      const f32x16 inner = mul(set1(0.79788456f), fma(mul(mul(x, x), x), set1(0.044715f), x));
      return fma(half, tanh(inner), half);
    }
  }
}

}  // namespace thinfer::THINFER_ISA
