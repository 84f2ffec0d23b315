// Activations to int8 in groups of 32 inputs, with thresholds applied first, and the list of channels that matter.
#include "cpu/isa/dot.h"
#include "linear_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

// NaN is kept: a channel is dropped only where |x| * weight <= threshold is true.
THINFER_INLINE f32x16 masked(f32x16 x, const float* channel_scale, f32x16 threshold) {
  const f32x16 score = channel_scale ? mul(abs(x), load(channel_scale)) : abs(x);
  return select(less_equal(score, threshold), zero(), x);
}

// Fills the last quad of `count` channels with the last of them and quants of 0; returns the new count.
THINFER_INLINE int fill_quad(int count, uint8_t* channel, int8_t* value) {
  const int over = count & 3;
  if (over == 0) return count;
  uint32_t channels, values;
  __builtin_memcpy(&channels, channel + (count - over), 4);
  __builtin_memcpy(&values, value + (count - over), 4);
  const uint32_t kept = (uint32_t{1} << (8 * over)) - 1;
  channels = (channels & kept) | (channel[count - 1] * 0x01010101u & ~kept);
  values &= kept;
  __builtin_memcpy(channel + (count - over), &channels, 4);
  __builtin_memcpy(value + (count - over), &values, 4);
  return count - over + 4;
}

}  // namespace

void mask(const float* x, int inputs, float threshold, const float* channel_scale, float* y) {
  const f32x16 t = set1(threshold);
  for (int i = 0; i < inputs; i += 16) {
    store(y + i, masked(load(x + i), channel_scale ? channel_scale + i : nullptr, t));
  }
}

// q = round(x * 127 / max|x|), ties to even, so |q| <= 127; scale = max|x| / 127.
void quantize(const float* x, int inputs, float threshold, const float* channel_scale, const QuantizedRows& out,
              int row) {
  const f32x16 t = set1(threshold);
  for (int g = 0; g < inputs / kGroup; ++g) {
    const size_t at = static_cast<size_t>(g) * static_cast<size_t>(out.stride) + static_cast<size_t>(row);
    f32x16 a = load(x + kGroup * g), b = load(x + kGroup * g + 16);
    if (threshold >= 0.0f) {
      a = masked(a, channel_scale ? channel_scale + kGroup * g : nullptr, t);
      b = masked(b, channel_scale ? channel_scale + kGroup * g + 16 : nullptr, t);
    }
    const f32x16 top = set1(3.402823466e38f);
    const f32x16 abs_a = abs(a), abs_b = abs(b);
    const bool finite = mask_bits(less_equal(abs_a, top)) == 0xffff && mask_bits(less_equal(abs_b, top)) == 0xffff;
    const float largest = reduce_max(max(abs_a, abs_b));
    // Below this the reciprocal would overflow; such a group is 0 to any precision that matters.
    const bool empty = !(largest > 1e-36f);
    const f32x16 inverse = set1(finite && !empty ? 127.0f / largest : 0.0f);
    int8_t* q = out.q + at * kGroup;
    const int32_t sum_a = store_i8(q, finite ? mul(a, inverse) : zero());
    const int32_t sum_b = store_i8(q + 16, finite ? mul(b, inverse) : zero());
    const float scale = !finite ? __builtin_nanf("") : empty ? 0.0f : largest / 127.0f;
    out.scale[at] = scale;
    out.bias[at] = scale * static_cast<float>(sum_a + sum_b);
    out.sums[2 * at] = sum_a;
    out.sums[2 * at + 1] = sum_b;
  }
}

int find_active(const QuantizedRows& x, int row, int inputs, bool halves, const ActiveChannels& out) {
  int active = 0;
  for (int g = 0; g < inputs / kGroup; ++g) {
    const size_t at = static_cast<size_t>(g) * static_cast<size_t>(x.stride) + static_cast<size_t>(row);
    const int8_t* q = x.q + at * kGroup;
    uint8_t* channel = out.channel + kGroup * g;
    int8_t* value = out.q + kGroup * g;
    // A NaN scale must reach every output, so such a group counts as read in full.
    const bool keep_all = !(x.scale[at] == x.scale[at]);
    const uint32_t used = keep_all ? ~uint32_t{0} : nonzero_bits(q);
    int filled = 0;
    out.quads[2 * g + 1] = 0;
    for (int half = 0; half < kGroup; half += 16) {
      const int start = halves ? filled : 0, found = list_used(used >> half & 0xffff, half, q, channel + filled, value + filled);
      filled += found;
      active += found;
      if (halves || half > 0) {
        filled = fill_quad(filled, channel, value);
        out.quads[2 * g + (halves && half > 0 ? 1 : 0)] = static_cast<uint8_t>((filled - start) / 4);
      }
    }
  }
  return active;
}

}  // namespace thinfer::THINFER_ISA
