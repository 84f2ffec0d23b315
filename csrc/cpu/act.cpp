#include "cpu/activations.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

template <Activation activation>
static void plain(const float* x, float* out, int n, float cut) {
  const f32x16 limit = set1(cut);
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, activate<activation>(load(x + i), limit));
  if (i < n) store_n(out + i, activate<activation>(load_n(x + i, n - i), limit), n - i);
}

void act(const float* x, float* out, int n, Activation activation, float cut) {
  switch (activation) {
#define THINFER_CASE(name) \
  case Activation::name:   \
    return plain<Activation::name>(x, out, n, cut);
    THINFER_CASE(silu)
    THINFER_CASE(gelu)
    THINFER_CASE(gelu_tanh)
    THINFER_CASE(relu)
    THINFER_CASE(relu2)
    THINFER_CASE(fatrelu)
#undef THINFER_CASE
    case Activation::drelu:
      return;  // there is nothing that it gates
  }
}

}  // namespace thinfer::THINFER_ISA
