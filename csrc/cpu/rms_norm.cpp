#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

void rms_norm(const float* x, const float* weight, float* out, int n, float eps) {
  // Four sums hide the latency of fma; their number and the order of adding them are part of the result.
  f32x16 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const f32x16 v = load(x + i + 16 * j);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (int j = 0; i < n; i += 16, ++j) {
    const f32x16 v = load_n(x + i, n - i);
    sums[j] = fma(v, v, sums[j]);
  }
  const float total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const f32x16 scale = set1(1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps));
  for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  if (i < n) store_n(out + i, mul(mul(load_n(x + i, n - i), scale), load_n(weight + i, n - i)), n - i);
}

}  // namespace thinfer::THINFER_ISA
