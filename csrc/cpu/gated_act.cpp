#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

template <Activation activation>
THINFER_INLINE f32x16 activate(f32x16 x) {
  if constexpr (activation == Activation::silu) {
    return mul(x, sigmoid(x));
  } else if constexpr (activation == Activation::relu) {
    return max(zero(), x);  // the second operand wins over NaN, so NaN is kept
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

template <Activation activation>
static void gated(const float* gate, const float* up, float* out, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, mul(activate<activation>(load(gate + i)), load(up + i)));
  if (i < n) {
    const int rest = n - i;
    store_n(out + i, mul(activate<activation>(load_n(gate + i, rest)), load_n(up + i, rest)), rest);
  }
}

void gated_act(const float* gate, const float* up, float* out, int n, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return gated<Activation::silu>(gate, up, out, n);
    case Activation::gelu:
      return gated<Activation::gelu>(gate, up, out, n);
    case Activation::gelu_tanh:
      return gated<Activation::gelu_tanh>(gate, up, out, n);
    case Activation::relu:
      return gated<Activation::relu>(gate, up, out, n);
  }
}

}  // namespace thinfer::THINFER_ISA
