#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

// Sum of term(vector) over n floats. Four sums hide the latency of add; their number and order are part of the result.
template <typename Term>
THINFER_INLINE float total(const float* x, int n, Term term) {
  f32x16 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) sums[j] = term(sums[j], load(x + i + 16 * j));
  }
  for (int j = 0; i < n; i += 16, ++j) {
    const f32x16 inside = set1(static_cast<float>(n - i));
    // Lanes past the end count as nothing, whatever the term makes of a zero.
    sums[j] = select(less(iota(), inside), term(sums[j], load_n(x + i, n - i)), sums[j]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

void layer_norm(const float* x, const float* weight, const float* bias, float* out, int n, float eps) {
  const auto count = static_cast<float>(n);
  const f32x16 mean = set1(total(x, n, [](f32x16 sum, f32x16 v) { return add(sum, v); }) / count);
  const float squares = total(x, n, [&](f32x16 sum, f32x16 v) {
    const f32x16 d = sub(v, mean);
    return fma(d, d, sum);
  });
  const f32x16 scale = set1(1.0f / __builtin_sqrtf(squares / count + eps));
  for (int i = 0; i < n; i += 16) {
    const int rest = n - i;
    const f32x16 unit = mul(sub(load_n(x + i, rest), mean), scale);
    store_n(out + i, fma(unit, load_n(weight + i, rest), load_n(bias + i, rest)), rest);
  }
}

}  // namespace thinfer::THINFER_ISA
