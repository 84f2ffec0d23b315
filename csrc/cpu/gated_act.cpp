#include "cpu/activations.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

template <Activation activation>
static void gated(const float* gate, const float* up, float* out, int n, float cut) {
  const f32x16 limit = set1(cut);
  const auto product = [&](f32x16 g, f32x16 u) {
    if constexpr (activation == Activation::drelu) u = activate<Activation::relu>(u, limit);
    return mul(activate<activation>(g, limit), u);
  };
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, product(load(gate + i), load(up + i)));
  if (i < n) {
    const int rest = n - i;
    store_n(out + i, product(load_n(gate + i, rest), load_n(up + i, rest)), rest);
  }
}

void gated_act(const float* gate, const float* up, float* out, int n, Activation activation, float cut) {
  switch (activation) {
#define THINFER_CASE(name) \
  case Activation::name:   \
    return gated<Activation::name>(gate, up, out, n, cut);
    THINFER_CASE(silu)
    THINFER_CASE(gelu)
    THINFER_CASE(gelu_tanh)
    THINFER_CASE(relu)
    THINFER_CASE(relu2)
    THINFER_CASE(fatrelu)
    THINFER_CASE(drelu)
#undef THINFER_CASE
  }
}

}  // namespace thinfer::THINFER_ISA
