#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

extern const OpKernels op_kernels;
const OpKernels op_kernels = {
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rope = rope,
    .gated_act = gated_act,
    .act = act,
    .add = add_rows,
    .write_kv = write_kv,
    .attend = attend,
    .attend_join = attend_join,
    .attend_finish = attend_finish,
    .softmax_weights = softmax_weights,
    .softmax_sums = softmax_sums,
};

}  // namespace thinfer::THINFER_ISA
