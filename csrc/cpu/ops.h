// The kernels of this directory, for the table in op_kernels.cpp. Their meaning is in csrc/kernels.h.
#pragma once

#include "kernels.h"

namespace thinfer::THINFER_ISA {

void rms_norm(const float* x, const float* weight, float* out, int n, float eps);
void layer_norm(const float* x, const float* weight, const float* bias, float* out, int n, float eps);
void rope(const float* x, const float* cosine, const float* sine, float* out, int heads, int head_dim, int half);
void gated_act(const float* gate, const float* up, float* out, int n, Activation activation, float cut);
void act(const float* x, float* out, int n, Activation activation, float cut);
void add_rows(const float* a, const float* b, float* out, int n);
void write_kv(const float* key, const float* value, uint8_t* keys, uint8_t* values, int slot, int head_dim, bool half);
void attend(const AttendJob& job, const AttendState& state, float* scratch);
void attend_join(const AttendState& into, const AttendState& later, int queries, int head_dim);
void attend_finish(const float* output, float sum, float* out, int head_dim);
bool softmax_weights(const float* scores, int n, const SoftmaxScale& scale, float* weights);
bool softmax_sums(const float* scores, int n, const SoftmaxScale& scale, float* sums);

}  // namespace thinfer::THINFER_ISA
