#include "sampling.h"

#include <algorithm>
#include <vector>

namespace thinfer {

namespace {

std::vector<float> block_sums(const OpKernels& kernels, const float* scores, int n, const SoftmaxScale& scale,
                              bool* clear) {
  std::vector<float> sums((static_cast<size_t>(n) + kSoftmaxBlock - 1) / kSoftmaxBlock);
  *clear = kernels.softmax_sums(scores, n, scale, sums.data());
  return sums;
}

}  // namespace

double softmax_total(const OpKernels& kernels, const float* scores, int n, const SoftmaxScale& scale) {
  bool clear = false;
  double total = 0;
  for (const float sum : block_sums(kernels, scores, n, scale, &clear)) total += sum;
  return total;
}

std::optional<int> draw(const OpKernels& kernels, const float* scores, int n, const SoftmaxScale& scale,
                        double uniform) {
  bool clear = false;
  const std::vector<float> sums = block_sums(kernels, scores, n, scale, &clear);
  if (!clear) return std::nullopt;
  double total = 0;
  for (const float sum : sums) total += sum;
  const double point = uniform * total;
  // A point and the border that it is compared with both err, here and there.
  const double margin = 4.0 * static_cast<double>(kSoftmaxError) * total;
  double below = 0;  // the weights of all blocks before this one
  size_t block = 0;
  while (block + 1 < sums.size() && below + sums[block] <= point) below += sums[block++];
  const int first = static_cast<int>(block) * kSoftmaxBlock;
  const int count = std::min(kSoftmaxBlock, n - first);
  float weights[kSoftmaxBlock];
  kernels.softmax_weights(scores + first, count, scale, weights);
  double low = below;
  for (int i = 0; i < count; ++i) {
    const double high = low + weights[i];
    if (point < high) {
      if (point - low > margin && high - point > margin) return first + i;
      return std::nullopt;
    }
    low = high;
  }
  return std::nullopt;
}

}  // namespace thinfer
