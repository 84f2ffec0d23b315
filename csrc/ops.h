// Makers of the ops that have no packed weights. Buffers are ids in the program; widths are in floats.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "neuron_lists.h"
#include "program.h"
#include "row_source.h"

namespace thinfer {

// out[r] = source row tokens[r].
std::unique_ptr<Op> make_embed(std::shared_ptr<const RowSource> source, int out);

// out = x / rms(x) * weight; weight has the buffer's width.
std::unique_ptr<Op> make_rms_norm(const OpKernels& kernels, int x, int out, std::vector<float> weight, float eps);

// out = (x - mean(x)) / deviation(x) * weight + bias; both have the buffer's width.
std::unique_ptr<Op> make_layer_norm(const OpKernels& kernels, int x, int out, std::vector<float> weight,
                                    std::vector<float> bias, float eps);

// out[r] = x[r] + source row positions[r] + offset.
std::unique_ptr<Op> make_positions(const OpKernels& kernels, std::shared_ptr<const RowSource> source, int x, int out,
                                   int offset);

// q | k | v rows of heads: where the heads of each are.
struct Heads {
  int heads;
  int kv_heads;
  int head_dim;
  int width() const { return (heads + 2 * kv_heads) * head_dim; }
};

// rms_norm of every query head by q_norm and key head by k_norm [head_dim]; values pass.
std::unique_ptr<Op> make_head_norm(const OpKernels& kernels, int x, int out, Heads heads, std::vector<float> q_norm,
                                   std::vector<float> k_norm, float eps);

// Cosines and sines of the positions of a step: computed once a step, shared by the layers.
class RopeTable {
 public:
  RopeTable(std::vector<float> inv_freq, float attention_factor);
  bool equals(const std::vector<float>& inv_freq, float attention_factor) const;
  void fill(const Batch& batch);
  int half() const { return static_cast<int>(inv_freq_.size()); }
  const float* cosine(int row) const { return table_.data() + static_cast<size_t>(2 * row) * inv_freq_.size(); }
  const float* sine(int row) const { return cosine(row) + inv_freq_.size(); }

 private:
  std::vector<float> inv_freq_;
  float factor_;
  uint64_t step_ = 0;
  std::vector<float> table_;  // [row][cosine, sine][half]
};

// Rotates the first 2 * table.half() of query and key heads by their row's position; the rest and values pass.
std::unique_ptr<Op> make_rope(const OpKernels& kernels, int x, int out, Heads heads, std::shared_ptr<RopeTable> table);

// Writes keys and values to the cache, then out [rows, heads * head_dim] = causal attention. window 0: all positions.
// slopes: one a head, or none (see AttendJob). lists: heads that a row computes, the others are 0; null: all of them.
std::unique_ptr<Op> make_attention(const OpKernels& kernels, int x, int out, Heads heads, int layer, float scale,
                                   int window, std::vector<float> slopes, std::shared_ptr<const NeuronLists> lists = nullptr);

// What an FFN does between its linears: fatrelu is 0 up to the threshold, which others ignore.
struct Act {
  Activation activation;
  float threshold;
  bool gated;  // x is gate | up, each of `neurons`, rather than `neurons` alone
};

// out [neurons], or out [width] zero but for neuron j at ids[j].
std::unique_ptr<Op> make_act(const OpKernels& kernels, int x, int out, int neurons, Act act, std::vector<int> ids,
                             int width);

std::unique_ptr<Op> make_add(const OpKernels& kernels, int a, int b, int out, int width);

// out[i] = x[out_rows[i]].
std::unique_ptr<Op> make_select(int x, int out, int width);

}  // namespace thinfer
