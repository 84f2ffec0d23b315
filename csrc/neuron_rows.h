// Writes and reads single rows of the neurons layout.
#pragma once

#include "codec.h"
#include "gguf_blocks.h"

namespace thinfer {

// Packs one stored row to w.row_bytes() zeroed bytes at `out`.
void pack_neuron(const Matrix& w, StoredType type, const uint8_t* row, uint8_t* out);
// Row `index` as float32 [w.inputs].
void read_neuron(const Matrix& w, int index, float* out);

}  // namespace thinfer
