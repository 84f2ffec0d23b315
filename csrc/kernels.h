// The kernels of every op but linear, as one table per instruction set (see dispatch.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace thinfer {

constexpr int kBlock = 64;     // positions in a block of the KV cache
constexpr int kSegment = 128;  // positions whose attention is summed before being joined to the rest

// fatrelu(x) is x above a threshold and else 0. drelu, of gated FFNs only, is relu of the gate and of what it gates.
enum class Activation { silu, gelu, gelu_tanh, relu, relu2, fatrelu, drelu };

// A group of rows of one sequence at consecutive positions, attending with the query heads of one kv head.
struct AttendJob {
  const float* queries;  // of the group's first row and the kv head's first query head: heads of head_dim floats
  ptrdiff_t row_stride;  // floats between rows of queries
  int rows;
  int group;  // query heads per kv head
  int head_dim;
  int position;  // of the first row
  int window;    // positions a row sees, itself included; 0 for all
  float scale;
  const float* slopes;     // of the group's query heads: slope * (key - query position) is added; null: nothing
  bool half;               // the cache holds f16 rather than f32
  const int32_t* table;    // the sequence's cache blocks by position / kBlock
  uint8_t* const* blocks;  // base of each cache block
  size_t key_offset;       // bytes from a block's base to this layer and kv head: keys [head_dim][kBlock]
  size_t value_offset;     // and values [kBlock][padded head_dim]
  int first_segment;       // segments [first, last) of kSegment positions
  int last_segment;
};

// Attention of a group so far: per query (row-major, then head) a running maximum, sum and unnormalised output.
struct AttendState {
  float* maximum;  // [queries]
  float* sum;      // [queries]
  float* output;   // [queries][padded head_dim]
};

constexpr int kSoftmaxBlock = 128;  // weights that are added up first

// How far two ways to compute a sum of softmax weights may be apart, as a fraction of the sum. exp() of float32 is
// within 3 units in the last place here and in NumPy, each (5e-7 together), and 128 float32 are added with at most 18
// roundings (1.1e-6); what adds them in float64 has no such error. Rounded up.
constexpr float kSoftmaxError = 2.5e-6f;

// Weight of a score: e^((score - top) / temperature), and 0 below `least`.
struct SoftmaxScale {
  float top;
  float temperature;
  float least;
};

struct OpKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight over n floats. out may be x.
  void (*rms_norm)(const float* x, const float* weight, float* out, int n, float eps);
  // out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over n floats. out may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float* out, int n, float eps);
  // Rotates the first 2 * half of each head of one row by its angles: cosine, sine [half]; the rest passes. out may be
  // x.
  void (*rope)(const float* x, const float* cosine, const float* sine, float* out, int heads, int head_dim, int half);
  // out[i] = activation(gate[i]) * up[i]. fatrelu is 0 below `cut`.
  void (*gated_act)(const float* gate, const float* up, float* out, int n, Activation activation, float cut);
  // out[i] = activation(x[i]); not drelu.
  void (*act)(const float* x, float* out, int n, Activation activation, float cut);
  void (*add)(const float* a, const float* b, float* out, int n);
  // Stores one row's key and value of one kv head at `slot` of a cache block.
  void (*write_kv)(const float* key, const float* value, uint8_t* keys, uint8_t* values, int slot, int head_dim,
                   bool half);
  // Fills state from the job's segments. scratch: attend_scratch_floats(rows * group, head_dim).
  void (*attend)(const AttendJob& job, const AttendState& state, float* scratch);
  // Joins a later state to an earlier one of the same queries.
  void (*attend_join)(const AttendState& into, const AttendState& later, int queries, int head_dim);
  // out = output / sum for one query; head_dim floats.
  void (*attend_finish)(const float* output, float sum, float* out, int head_dim);
  // Weights of n scores; false if one is too near scale.least to say whether it is below.
  bool (*softmax_weights)(const float* scores, int n, const SoftmaxScale& scale, float* weights);
  // Their sums by blocks of kSoftmaxBlock; as above.
  bool (*softmax_sums)(const float* scores, int n, const SoftmaxScale& scale, float* sums);
};

inline size_t attend_scratch_floats(int queries, int head_dim) {
  const auto q = static_cast<size_t>(queries + 15);
  const auto width = static_cast<size_t>((head_dim + 15) & ~15);
  // queries, scores, state of one segment (output, maximum, sum), one block of keys or values as float32
  return q * width + q * kBlock + q * width + 2 * q + 64 + kBlock * width;
}

const OpKernels& op_kernels(Isa isa);

}  // namespace thinfer
