// Sampling from a distribution over the vocabulary. Answers are bracketed: what is not certain is left to the caller.
#pragma once

#include <optional>

#include "kernels.h"

namespace thinfer {

// The token whose share of the summed weights holds the point `uniform` in [0, 1), in order of ids; nothing where
// another way of rounding the weights and their sums could give another one.
std::optional<int> draw(const OpKernels& kernels, const float* scores, int n, const SoftmaxScale& scale,
                        double uniform);

// The sum of all weights, within kSoftmaxError of itself.
double softmax_total(const OpKernels& kernels, const float* scores, int n, const SoftmaxScale& scale);

}  // namespace thinfer
