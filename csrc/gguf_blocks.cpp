#include "gguf_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace thinfer {
namespace {

struct TypeInfo {
  const char* name;
  StoredType type;
  Codec codec;
  int weights;  // per stored block
  int bytes;
};
constexpr TypeInfo kTypes[] = {
    {"F32", StoredType::F32, Codec::f32, 1, 4},         {"F16", StoredType::F16, Codec::f16, 1, 2},
    {"BF16", StoredType::BF16, Codec::bf16, 1, 2},      {"Q8_0", StoredType::Q8_0, Codec::i8_d, 32, 34},
    {"Q4_0", StoredType::Q4_0, Codec::u4_d, 32, 18},    {"Q4_1", StoredType::Q4_1, Codec::u4_dm, 32, 20},
    {"Q5_0", StoredType::Q5_0, Codec::u5_d, 32, 22},    {"Q5_1", StoredType::Q5_1, Codec::u5_dm, 32, 24},
    {"Q4_K", StoredType::Q4_K, Codec::u4_k, 256, 144},  {"Q5_K", StoredType::Q5_K, Codec::u5_k, 256, 176},
    {"Q6_K", StoredType::Q6_K, Codec::u6_k, 256, 210},
};
constexpr const char* kCodecNames[] = {"u4_d", "u4_dm", "u5_d", "u5_dm", "i8_d", "u4_k",
                                       "u5_k", "u6_k",  "f16",  "bf16",  "f32"};

const TypeInfo& info(StoredType type) { return kTypes[static_cast<int>(type)]; }

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}
uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

void split_nibbles(const uint8_t* p, uint8_t* q) {
  for (int j = 0; j < 16; ++j) {
    q[j] = p[j] & 15;
    q[j + 16] = p[j] >> 4;
  }
}
void add_fifth_bits(uint32_t bits, uint8_t* q) {
  for (int j = 0; j < 32; ++j) q[j] = static_cast<uint8_t>(q[j] | (((bits >> j) & 1u) << 4));
}
// The 12 bytes of 6-bit scales and minimums of Q4_K and Q5_K.
void decode_k_scales(const uint8_t* b, Block& out) {
  for (int k = 0; k < 4; ++k) {
    out.sc[k] = b[k] & 63;
    out.mn[k] = b[k + 4] & 63;
    out.sc[k + 4] = static_cast<uint8_t>((b[k + 8] & 15) | ((b[k] >> 6) << 4));
    out.mn[k + 4] = static_cast<uint8_t>((b[k + 8] >> 4) | ((b[k + 4] >> 6) << 4));
  }
}

// As llama.cpp quantises Q8_0.
void quantize_q8(const float* x, Block& out) {
  float largest = 0.0f;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float d = largest / 127.0f;
  const float inverse = d > 0.0f ? 1.0f / d : 0.0f;
  out.d = float_to_half(d);
  for (int i = 0; i < 32; ++i) out.q[i] = static_cast<uint8_t>(128 + static_cast<int>(std::round(x[i] * inverse)));
}
// As llama.cpp quantises Q4_1.
void quantize_q4(const float* x, Block& out) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  const float m = *low, d = (*high - m) / 15.0f;
  const float inverse = d > 0.0f ? 1.0f / d : 0.0f;
  out.d = float_to_half(d);
  out.m = float_to_half(m);
  for (int i = 0; i < 32; ++i) {
    out.q[i] = static_cast<uint8_t>(std::min(15, static_cast<int>((x[i] - m) * inverse + 0.5f)));
  }
}

}  // namespace

StoredType parse_stored_type(const std::string& name) {
  for (const TypeInfo& type : kTypes) {
    if (name == type.name) return type.type;
  }
  throw std::invalid_argument("no decoder for tensor type " + name);
}
Codec parse_codec(const std::string& name) {
  for (size_t i = 0; i < std::size(kCodecNames); ++i) {
    if (name == kCodecNames[i]) return static_cast<Codec>(i);
  }
  throw std::invalid_argument("unknown codec " + name);
}
const char* codec_name(Codec codec) { return kCodecNames[static_cast<int>(codec)]; }
Codec codec_of(StoredType type) { return info(type).codec; }
size_t stored_row_bytes(StoredType type, int inputs) {
  return static_cast<size_t>(inputs / info(type).weights) * static_cast<size_t>(info(type).bytes);
}

void decode_floats(StoredType type, const uint8_t* row, int first, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    if (type == StoredType::F32) {
      std::memcpy(out + i, row + 4 * static_cast<size_t>(first + i), 4);
    } else if (type == StoredType::F16) {
      out[i] = half_to_float(load16(row + 2 * static_cast<size_t>(first + i)));
    } else {
      const uint32_t bits = static_cast<uint32_t>(load16(row + 2 * static_cast<size_t>(first + i))) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  }
}

void decode_block(StoredType type, Codec codec, const uint8_t* row, int index, Block& out) {
  const uint8_t* p = row + static_cast<size_t>(index) * static_cast<size_t>(info(type).bytes);
  switch (type) {
    case StoredType::F32:
    case StoredType::F16:
    case StoredType::BF16: {
      float x[32];
      decode_floats(type, row, 32 * index, 32, x);
      codec == Codec::i8_d ? quantize_q8(x, out) : quantize_q4(x, out);
      break;
    }
    case StoredType::Q8_0:
      out.d = load16(p);
      for (int i = 0; i < 32; ++i) out.q[i] = p[2 + i] ^ 0x80;
      break;
    case StoredType::Q4_0:
      out.d = load16(p);
      split_nibbles(p + 2, out.q);
      break;
    case StoredType::Q4_1:
      out.d = load16(p);
      out.m = load16(p + 2);
      split_nibbles(p + 4, out.q);
      break;
    case StoredType::Q5_0:
      out.d = load16(p);
      split_nibbles(p + 6, out.q);
      add_fifth_bits(load32(p + 2), out.q);
      break;
    case StoredType::Q5_1:
      out.d = load16(p);
      out.m = load16(p + 2);
      split_nibbles(p + 8, out.q);
      add_fifth_bits(load32(p + 4), out.q);
      break;
    case StoredType::Q4_K:
    case StoredType::Q5_K: {
      out.d = load16(p);
      out.m = load16(p + 2);
      decode_k_scales(p + 4, out);
      const uint8_t* high = p + 16;
      const uint8_t* low = type == StoredType::Q5_K ? p + 48 : p + 16;
      for (int g = 0; g < 4; ++g) {
        for (int l = 0; l < 32; ++l) {
          out.q[64 * g + l] = low[32 * g + l] & 15;
          out.q[64 * g + 32 + l] = low[32 * g + l] >> 4;
        }
        if (type == StoredType::Q5_K) {
          for (int l = 0; l < 32; ++l) {
            out.q[64 * g + l] = static_cast<uint8_t>(out.q[64 * g + l] | (((high[l] >> (2 * g)) & 1) << 4));
            out.q[64 * g + 32 + l] = static_cast<uint8_t>(out.q[64 * g + 32 + l] | (((high[l] >> (2 * g + 1)) & 1) << 4));
          }
        }
      }
      break;
    }
    case StoredType::Q6_K: {
      for (int half = 0; half < 2; ++half) {
        const uint8_t* ql = p + 64 * half;
        const uint8_t* qh = p + 128 + 32 * half;
        uint8_t* q = out.q + 128 * half;
        for (int l = 0; l < 32; ++l) {
          q[l] = static_cast<uint8_t>((ql[l] & 15) | ((qh[l] & 3) << 4));
          q[l + 32] = static_cast<uint8_t>((ql[l + 32] & 15) | (((qh[l] >> 2) & 3) << 4));
          q[l + 64] = static_cast<uint8_t>((ql[l] >> 4) | (((qh[l] >> 4) & 3) << 4));
          q[l + 96] = static_cast<uint8_t>((ql[l + 32] >> 4) | (((qh[l] >> 6) & 3) << 4));
        }
      }
      std::memcpy(out.sc, p + 192, 16);
      out.d = load16(p + 208);
      break;
    }
  }
}

void block_to_floats(Codec codec, const Block& block, float* out) {
  const CodecTraits t = traits(codec);
  const float block_d = half_to_float(block.d);
  const float block_m = t.scale == ScaleKind::dm || t.scale == ScaleKind::k ? half_to_float(block.m) : 0.0f;
  for (int i = 0; i < t.block; ++i) {
    const float q = static_cast<float>(block.q[i] - t.offset);
    switch (t.scale) {
      case ScaleKind::k:
        out[i] = q * (block_d * static_cast<float>(block.sc[i / 32])) - block_m * static_cast<float>(block.mn[i / 32]);
        break;
      case ScaleKind::k16:
        out[i] = q * (block_d * static_cast<float>(static_cast<int8_t>(block.sc[i / 16])));
        break;
      case ScaleKind::dm: out[i] = q * block_d + block_m; break;
      default: out[i] = q * block_d; break;
    }
  }
}

}  // namespace thinfer
