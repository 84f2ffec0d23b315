// Any rows of a matrix in the neurons layout times float32 activations. As in linear_float.cpp each output is one chain
// y = fma(w, x, y) over the inputs in ascending order; sixteen rows are transposed into the lanes of a vector.
#include "cpu/float_group.h"
#include "cpu/isa/transpose.h"
#include "cpu/neuron_tile.h"
#include "neuron_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

constexpr size_t kAhead = 512;  // bytes: eight lines of each of sixteen rows are in flight

// Inputs [first, first + n) of 16 rows to panel [n][16]. Both floats of 16 bits are moved as they are.
THINFER_INLINE void fill_panel(const TilePair& tile, size_t first, int n, uint16_t* panel) {
  const uint16_t* at[kTile];
  const Ahead ahead = tile.ahead(2 * first + kAhead);
  for (int r = 0; r < kTile; ++r) {
    at[r] = reinterpret_cast<const uint16_t*>(tile.rows.at[r]) + first;
    ahead.prefetch(r, 64);
  }
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    transpose_halves(at, static_cast<size_t>(i), panel + kTile * i);
  }
  for (; i < n; ++i) {
    for (int r = 0; r < kTile; ++r) panel[kTile * i + r] = at[r][i];
  }
}
THINFER_INLINE void fill_panel(const TilePair& tile, size_t first, int n, float* panel) {
  for (int i = 0; i < n; ++i) {
    for (int r = 0; r < kTile; ++r) {
      __builtin_memcpy(panel + kTile * i + r, tile.rows.at[r] + 4 * (first + static_cast<size_t>(i)), sizeof(float));
    }
  }
}

template <class Weight, class Stored>
void float_rows(const Matrix& w, const TilePair& tile, const float* x, int n_rows, int ldx, float* y, Stored* panel) {
  uint8_t channel[kGroup];
  for (int i = 0; i < kGroup; ++i) channel[i] = static_cast<uint8_t>(i);
  for (int first = 0; first < w.inputs; first += kGroup) {
    const int n = w.inputs - first < kGroup ? w.inputs - first : kGroup;
    fill_panel(tile, static_cast<size_t>(first), n, panel);
    add_group<1>(reinterpret_cast<const Weight*>(panel), kTile, Inputs{x + first, ldx, channel, n}, n_rows, y, kTile);
  }
}

// Quants of one group of 16 rows in the order of the rows layout, and its scales.
template <Codec codec>
void gather_group(const Matrix& w, const TilePair& tile, int group, uint8_t* quads, float* numbers) {
  const int groups = w.inputs / kGroup, record = group / kSuper, g = group % kSuper;
  const int here = groups - record * kSuper < kSuper ? groups - record * kSuper : kSuper;
  const size_t width = static_cast<size_t>(4 * here);
  for (int r = 0; r < kTile; ++r) {
    const uint8_t* p = tile.rows.at[r] + static_cast<size_t>(neurons_record_bytes(codec, kSuper)) * static_cast<size_t>(record);
    each_packed_vector<kBits<codec>>(
        [&](int i) __attribute__((always_inline)) { return load_u8x32(p + width * static_cast<size_t>(i)); },
        [&](int v, u8x32 q) __attribute__((always_inline)) {
          uint8_t bytes[32];
          store_u8x32(bytes, q);
          __builtin_memcpy(quads + 64 * v + 4 * r, bytes + 4 * g, 4);
        });
    const uint8_t* s = p + neurons_quant_bytes(codec, here);
    uint16_t half[2] = {0, 0};
    if constexpr (block_scale_bytes(codec) > 0) {
      __builtin_memcpy(half, s + 2 * here, static_cast<size_t>(block_scale_bytes(codec)));
    } else {
      __builtin_memcpy(half, s + 2 * g, 2);
      if constexpr (kHasMin<codec>) __builtin_memcpy(half + 1, s + 2 * (here + g), 2);
    }
    float d = half_to_float(half[0]), second = half_to_float(half[1]);
    if constexpr (traits(codec).scale == ScaleKind::k) {
      d *= static_cast<float>(s[g]);
      second *= static_cast<float>(s[here + g]);
    } else if constexpr (kHalves<codec>) {
      second = d * static_cast<float>(static_cast<int8_t>(s[here + g]));
      d *= static_cast<float>(static_cast<int8_t>(s[g]));
    }
    numbers[r] = d;
    numbers[kTile + r] = second;
  }
}

template <Codec codec>
void quantised_rows(const Matrix& w, const TilePair& tile, const float* x, int n_rows, int ldx, float* y, uint8_t* scratch) {
  float* panel = reinterpret_cast<float*>(scratch);
  float* numbers = panel + kGroup * kTile;
  uint8_t* quads = reinterpret_cast<uint8_t*>(numbers + 2 * kTile);
  uint8_t channel[kGroup];
  for (int i = 0; i < kGroup; ++i) channel[i] = static_cast<uint8_t>(i);
  for (int g = 0; g < w.inputs / kGroup; ++g) {
    gather_group<codec>(w, tile, g, quads, numbers);
    const f32x16 second = load(numbers + kTile);
    dequantize_tile<codec>(quads, GroupScales{load(numbers), second, second}, panel, kTile);
    add_group<1>(panel, kTile, Inputs{x + kGroup * g, ldx, channel, kGroup}, n_rows, y, kTile);
  }
}

}  // namespace

void neurons_float(const Matrix& w, const float* x, int n, int ldx, const RowIds& rows, float* y, int ldy, uint8_t* scratch) {
  float* sums = reinterpret_cast<float*>(scratch);
  uint8_t* rest = scratch + static_cast<size_t>(n) * kTile * sizeof(float);
  each_tile(w, rows, [&](const TilePair& tile, int first, int here) __attribute__((always_inline)) {
    for (int r = 0; r < n; ++r) store(sums + kTile * r, zero());
    switch (w.codec) {
      case Codec::f32: float_rows<float>(w, tile, x, n, ldx, sums, reinterpret_cast<float*>(rest)); break;
      case Codec::f16: float_rows<Half>(w, tile, x, n, ldx, sums, reinterpret_cast<uint16_t*>(rest)); break;
      case Codec::bf16: float_rows<BFloat>(w, tile, x, n, ldx, sums, reinterpret_cast<uint16_t*>(rest)); break;
      default: THINFER_FOR_CODEC(w.codec, quantised_rows<codec>(w, tile, x, n, ldx, sums, rest));
    }
    for (int r = 0; r < n; ++r) store_n(y + static_cast<ptrdiff_t>(r) * ldy + first, load(sums + kTile * r), here);
  });
}

}  // namespace thinfer::THINFER_ISA
