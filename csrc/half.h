// Conversion between float16 and float32 in software, with the hardware's rounding and NaNs.
//
// Functions are static and inlined: a copy compiled for one instruction set can never be linked into another's code.
#pragma once

#include <cstdint>

#define THINFER_INLINE static inline __attribute__((always_inline))
#define THINFER_INLINE_MEMBER inline __attribute__((always_inline))

namespace thinfer {

THINFER_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
THINFER_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

THINFER_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 1023u;
  if (exponent == 31) {  // infinities; a NaN keeps its payload and becomes quiet, as the hardware does it
    return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  }
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24 is exact
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return float_of(bits_of(magnitude) | sign);
  }
  return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Rounds to nearest, ties to even.
THINFER_INLINE uint16_t float_to_half(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float aligned = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace thinfer
