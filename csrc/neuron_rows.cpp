#include "neuron_rows.h"

#include <algorithm>
#include <cstring>

#include "half.h"

namespace thinfer {
namespace {

// Where the quant of an input of a record lies: byte of its low bits and their shift, and of the bits above.
struct Place {
  size_t low;
  int shift;
  size_t high;
  int high_shift;
};
Place place(int bits, int groups, int group, int input) {
  const int v = input / 4;
  const size_t width = static_cast<size_t>(4 * groups), at = static_cast<size_t>(4 * group + input % 4);
  if (bits == 8) return {static_cast<size_t>(v) * width + at, 0, 0, 0};
  const size_t above = width * static_cast<size_t>(4 + (bits == 6 ? v / 4 : 0)) + at;
  return {static_cast<size_t>(v / 2) * width + at, v % 2 ? 4 : 0, above, bits == 6 ? 2 * (v % 4) : v};
}

void store_quant(int bits, const Place& at, uint8_t q, uint8_t* record) {
  const auto put = [&](size_t byte, int value, int shift) { record[byte] = static_cast<uint8_t>(record[byte] | (value << shift)); };
  put(at.low, bits == 8 ? q : q & 15, at.shift);
  if (bits == 5 || bits == 6) put(at.high, q >> 4, at.high_shift);
}
uint8_t load_quant(int bits, const Place& at, const uint8_t* record) {
  if (bits == 8) return record[at.low];
  const int low = (record[at.low] >> at.shift) & 15;
  const int high = bits == 4 ? 0 : (record[at.high] >> at.high_shift) & (bits == 6 ? 3 : 1);
  return static_cast<uint8_t>(low | (high << 4));
}

// Calls use(group in record, groups of the record, start of the record, block, group in block) for the groups of a row.
template <class Use>
void each_group(const Matrix& w, Use&& use) {
  const int groups = w.inputs / kGroup, per_block = groups_per_block(w.codec);
  for (int group = 0; group < groups; ++group) {
    const int record = group / kSuper;
    const size_t start = static_cast<size_t>(record) * static_cast<size_t>(neurons_record_bytes(w.codec, kSuper));
    use(group % kSuper, std::min(kSuper, groups - record * kSuper), start, group / per_block, group % per_block);
  }
}

// Scales of a group as planes over the record's groups, and of its block behind them.
template <class Byte, class Number, class Small>
void each_scale(Codec codec, Byte* scales, int g, int groups, Number&& number, Small&& small) {
  const int block = groups * group_scale_bytes(codec);
  switch (traits(codec).scale) {
    case ScaleKind::d: number(scales + 2 * g, 0); break;
    case ScaleKind::dm:
      number(scales + 2 * g, 0);
      number(scales + 2 * (groups + g), 1);
      break;
    case ScaleKind::k:
    case ScaleKind::k16:
      small(scales + g, 0);
      small(scales + groups + g, 1);
      number(scales + block, 0);
      if (block_scale_bytes(codec) > 2) number(scales + block + 2, 1);
      break;
    case ScaleKind::none: break;
  }
}

// The group's bytes of a block: sc and mn, or the scales of both halves.
uint8_t* small_scale(Codec codec, Block& block, int g, int which) {
  if (traits(codec).scale == ScaleKind::k16) return &block.sc[2 * g + which];
  return which == 0 ? &block.sc[g] : &block.mn[g];
}

}  // namespace

void pack_neuron(const Matrix& w, StoredType type, const uint8_t* row, uint8_t* out) {
  if (is_float(w.codec)) {
    const size_t element = static_cast<size_t>(traits(w.codec).bits / 8);
    if (codec_of(type) == w.codec) {
      std::memcpy(out, row, w.row_bytes());
      return;
    }
    float values[kGroup];
    for (int i = 0; i < w.inputs; i += kGroup) {
      const int count = std::min(kGroup, w.inputs - i);
      decode_floats(type, row, i, count, values);
      for (int j = 0; j < count; ++j) {
        const uint16_t half = float_to_half(values[j]);  // the only float that others are converted to
        std::memcpy(out + element * static_cast<size_t>(i + j), &half, sizeof half);
      }
    }
    return;
  }
  const int bits = traits(w.codec).bits;
  Block block;
  int decoded = -1;
  each_group(w, [&](int g, int groups, size_t start, int index, int in_block) {
    if (index != decoded) decode_block(type, w.codec, row, index, block);
    decoded = index;
    uint8_t* record = out + start;
    for (int i = 0; i < kGroup; ++i) store_quant(bits, place(bits, groups, g, i), block.q[kGroup * in_block + i], record);
    each_scale(
        w.codec, record + neurons_quant_bytes(w.codec, groups), g, groups,
        [&](uint8_t* p, int which) { std::memcpy(p, which == 0 ? &block.d : &block.m, 2); },
        [&](uint8_t* p, int which) { *p = *small_scale(w.codec, block, in_block, which); });
  });
}

void read_neuron(const Matrix& w, int index, float* out) {
  const uint8_t* row = w.row_data(index);
  if (is_float(w.codec)) {
    const StoredType type = w.codec == Codec::f32 ? StoredType::F32 : w.codec == Codec::f16 ? StoredType::F16 : StoredType::BF16;
    decode_floats(type, row, 0, w.inputs, out);
    return;
  }
  const int bits = traits(w.codec).bits, per_block = groups_per_block(w.codec);
  Block block;
  each_group(w, [&](int g, int groups, size_t start, int at, int in_block) {
    const uint8_t* record = row + start;
    for (int i = 0; i < kGroup; ++i) block.q[kGroup * in_block + i] = load_quant(bits, place(bits, groups, g, i), record);
    each_scale(
        w.codec, record + neurons_quant_bytes(w.codec, groups), g, groups,
        [&](const uint8_t* p, int which) { std::memcpy(which == 0 ? &block.d : &block.m, p, 2); },
        [&](const uint8_t* p, int which) { *small_scale(w.codec, block, in_block, which) = *p; });
    if (in_block == per_block - 1) block_to_floats(w.codec, block, out + at * traits(w.codec).block);
  });
}

}  // namespace thinfer
