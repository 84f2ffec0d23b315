#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

void rope(const float* x, const float* cosine, const float* sine, float* out, int heads, int head_dim, int half) {
  for (int head = 0; head < heads; ++head, x += head_dim, out += head_dim) {
    for (int i = 0; i < half; i += 16) {
      const int n = half - i;
      const f32x16 c = load_n(cosine + i, n);
      const f32x16 s = load_n(sine + i, n);
      const f32x16 a = load_n(x + i, n);
      const f32x16 b = load_n(x + half + i, n);
      store_n(out + i, fnma(b, s, mul(a, c)), n);
      store_n(out + half + i, fma(a, s, mul(b, c)), n);
    }
    for (int i = 2 * half; i < head_dim; i += 16) {
      const int n = head_dim - i;
      store_n(out + i, load_n(x + i, n), n);
    }
  }
}

}  // namespace thinfer::THINFER_ISA
