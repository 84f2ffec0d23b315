// Stored tensor types and the decoding of their blocks into the in-memory codecs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "codec.h"

namespace thinfer {

enum class StoredType : uint8_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

// Throws std::invalid_argument for a type that has no decoder.
StoredType parse_stored_type(const std::string& name);
Codec parse_codec(const std::string& name);
const char* codec_name(Codec codec);
// The codec that holds the type losslessly.
Codec codec_of(StoredType type);
size_t stored_row_bytes(StoredType type, int inputs);

// Quants (offset in place) and scales of one row's block of 32 or 256 inputs; d, m, D and M are float16 bits.
struct Block {
  uint8_t q[256];
  uint16_t d, m;   // of the group of 32, or D and M of the block of 256
  uint8_t sc[16];  // per group of 32, or per 16 (int8)
  uint8_t mn[8];
};

// Decodes block `index` of a stored row. `codec` is codec_of(type), or a codec that a float type is quantised to:
// i8_d (as Q8_0) or u4_dm (as Q4_1).
void decode_block(StoredType type, Codec codec, const uint8_t* row, int index, Block& out);
// Decodes `count` weights of a stored float row from `first`.
void decode_floats(StoredType type, const uint8_t* row, int first, int count, float* out);
// The float32 weights of a block: (q - offset) * d + m.
void block_to_floats(Codec codec, const Block& block, float* out);

}  // namespace thinfer
