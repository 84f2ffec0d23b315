#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

namespace {

struct Scale {
  explicit Scale(const SoftmaxScale& scale)
      : top(set1(scale.top)),
        temperature(set1(scale.temperature)),
        least(set1(scale.least)),
        divides(scale.temperature != 1.0f) {}

  f32x16 top;
  f32x16 temperature;
  f32x16 least;
  bool divides;
};

}  // namespace

// Weights of 16 scores; sets bits of `unclear` where one is too near `least` to say on which side of it exp() falls.
THINFER_INLINE f32x16 weigh(f32x16 scores, const Scale& scale, uint32_t* unclear) {
  f32x16 x = sub(scores, scale.top);
  if (scale.divides) x = div(x, scale.temperature);
  const f32x16 w = exp_of_negative(x);
  *unclear |= mask_bits(less(abs(sub(w, scale.least)), mul(scale.least, set1(kSoftmaxError))));
  return select(less(w, scale.least), zero(), w);
}

bool softmax_weights(const float* scores, int n, const SoftmaxScale& scale, float* weights) {
  const Scale scales(scale);
  uint32_t unclear = 0;
  int i = 0;
  for (; i + 16 <= n; i += 16) store(weights + i, weigh(load(scores + i), scales, &unclear));
  if (i < n) store_n(weights + i, weigh(load_n(scores + i, n - i), scales, &unclear), n - i);
  return unclear == 0;
}

bool softmax_sums(const float* scores, int n, const SoftmaxScale& scale, float* sums) {
  const Scale scales(scale);
  uint32_t unclear = 0;
  int i = 0;
  for (; i + kSoftmaxBlock <= n; i += kSoftmaxBlock) {
    f32x16 sum = weigh(load(scores + i), scales, &unclear);
    for (int k = 16; k < kSoftmaxBlock; k += 16) sum = add(sum, weigh(load(scores + i + k), scales, &unclear));
    *sums++ = reduce_add(sum);
  }
  if (i < n) {
    float rest[kSoftmaxBlock];
    if (!softmax_weights(scores + i, n - i, scale, rest)) unclear = 1;
    float sum = 0.0f;
    for (int k = 0; k < n - i; ++k) sum += rest[k];
    *sums = sum;
  }
  return unclear == 0;
}

}  // namespace thinfer::THINFER_ISA
