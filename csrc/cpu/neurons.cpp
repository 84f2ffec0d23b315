// Any rows of a matrix in the neurons layout times integer activations.
//
// A vector holds one group in each lane, so a row's groups come out side by side; sixteen rows are then transposed, and
// each group ends as in every other kernel, one row a lane. That keeps the order of float operations, hence the bits.
#include "cpu/gemm_group.h"
#include "cpu/isa/lanes8.h"
#include "cpu/neuron_tile.h"
#include "neuron_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

constexpr size_t kAheadRecords = 4;  // fetched ahead: what is in flight stays in the first-level cache until it is used
constexpr size_t kPlane = static_cast<size_t>(kSuper) * kTile;  // a number for every group and row of a tile

// A record of `groups` groups of one row.
template <Codec codec>
struct NeuronRecord {
  const uint8_t* p;
  size_t groups;

  // Calls use(v, quants) for the 8 vectors; lanes past the groups hold bytes without meaning.
  template <class Use>
  THINFER_INLINE_MEMBER void each_vector(Use&& use) const {
    each_packed_vector<kBits<codec>>(
        [&](int i) __attribute__((always_inline)) { return load_u8x32(p + 4 * groups * static_cast<size_t>(i)); }, use);
  }
  THINFER_INLINE_MEMBER const uint8_t* scales() const {
    return p + neurons_quant_bytes(codec, static_cast<int>(groups));
  }
  // Multiplies: of the groups, of their second halves, and minima.
  THINFER_INLINE_MEMBER void load_scales(f32x8* d, f32x8* d2, f32x8* m) const {
    const uint8_t* s = scales();
    if constexpr (traits(codec).scale == ScaleKind::d) {
      *d = load8_f16(s);
    } else if constexpr (traits(codec).scale == ScaleKind::dm) {
      *d = load8_f16(s);
      *m = load8_f16(s + 2 * groups);
    } else {
      uint16_t block[2] = {0, 0};
      __builtin_memcpy(block, s + 2 * groups, static_cast<size_t>(block_scale_bytes(codec)));
      const f32x8 whole = repeat8(half_to_float(block[0]));
      if constexpr (traits(codec).scale == ScaleKind::k) {
        *d = mul8(whole, load8_u8(s));
        *m = mul8(repeat8(half_to_float(block[1])), load8_u8(s + groups));
      } else {
        *d = mul8(whole, load8_i8(s));
        *d2 = mul8(whole, load8_i8(s + groups));
      }
    }
  }
};

// Where sums end and begin again.
struct Segments {
  const Matrix& w;
  int groups_per_block;
  int segment = 0;
  int end;
  f32x16 total = zero();
  THINFER_INLINE_MEMBER Segments(const Matrix& matrix, int per_block)
      : w(matrix), groups_per_block(per_block), end(matrix.segment_begin(1) * per_block) {}
  THINFER_INLINE_MEMBER void after(int group, f32x16& acc) {
    if (group + 1 != end) return;
    total = segment == 0 ? acc : add(total, acc);
    acc = zero();
    ++segment;
    end = w.segment_begin(segment + 1) * groups_per_block;
  }
};

template <Codec codec>
void gemv_tile(const Matrix& w, const NeuronInput& x, const TilePair& tile, float* planes, float* y, int count) {
  constexpr bool kHalf = kHalves<codec>, kMin = kHasMin<codec>;
  constexpr size_t kFull = static_cast<size_t>(neurons_record_bytes(codec, kSuper));
  // Per number of a group: [row][group] as computed, then [group][row].
  float *sum = planes, *factor = planes + kPlane, *sum2 = planes + 2 * kPlane, *factor2 = planes + 3 * kPlane,
        *minimum = sum2;
  float* lanes = planes + 4 * kPlane;
  const int groups = w.inputs / kGroup, records = (groups + kSuper - 1) / kSuper;
  f32x16 acc = zero();
  Segments segments(w, groups_per_block(codec));
  for (int record = 0; record < records; ++record) {
    const int first = record * kSuper;
    const int here = groups - first < kSuper ? groups - first : kSuper;
    const size_t offset = kFull * static_cast<size_t>(record);
    const int8_t* q = x.q + static_cast<size_t>(record) * 8 * 32;
    // Kept apart from the rows' stores, which the compiler must assume to change what is in memory.
    const f32x8 scale = load8(x.scale + first);
    const int32_t* sums = x.sums + first;
    const i32x8 offset1 = offset_sums<kOffset<codec>>(kHalf ? sums + x.sums_stride : sums);
    const i32x8 offset2 = offset_sums<kOffset<codec>>(sums + 2 * x.sums_stride);
    i8x32 inputs[8];
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) inputs[v] = load_i8x32(q + 32 * v);
#pragma GCC unroll 1
    for (int r = 0; r < kTile; ++r) {
      tile.prefetch(r, offset, kAheadRecords * kFull, kFull);
      const NeuronRecord<codec> weights{tile.rows.at[r] + offset, static_cast<size_t>(here)};
      f32x8 d = {}, d2 = {}, m = {};
      weights.load_scales(&d, &d2, &m);
      const int at = kSuper * r;
      if constexpr (kHalf) {
        Dot8<kBits<codec>> one, two;
        weights.each_vector([&](int v, u8x32 quants) __attribute__((always_inline)) {
          if (v < 4) {
            one.add(quants, inputs[v], v);
          } else {
            two.add(quants, inputs[v], v);
          }
        });
        store8(sum + at, difference(one.total(), offset1));
        store8(factor + at, mul8(d, scale));
        store8(sum2 + at, difference(two.total(), offset2));
        store8(factor2 + at, mul8(d2, scale));
      } else {
        Dot8<kBits<codec>> dot;
        weights.each_vector([&](int v, u8x32 quants) __attribute__((always_inline)) {
          dot.add(quants, inputs[v], v);
        });
        store8(sum + at, difference(dot.total(), offset1));
        store8(factor + at, mul8(d, scale));
        if constexpr (kMin) store8(minimum + at, m);
      }
    }
    for (size_t plane = 0; plane < (kHalf ? 4 : kMin ? 3 : 2); ++plane) {
      transpose16(planes + plane * kPlane, kSuper, lanes + plane * kPlane, kTile);
    }
    for (int g = 0; g < here; ++g) {
      const float* lane = lanes + kTile * g;
      acc = fma(load(lane), load(lane + kPlane), acc);
      if constexpr (kHalf) acc = fma(load(lane + 2 * kPlane), load(lane + 3 * kPlane), acc);
      if constexpr (kMin) {
        const f32x16 m = load(lane + 2 * kPlane), bias = set1(x.bias[first + g]);
        acc = traits(codec).scale == ScaleKind::k ? fnma(m, bias, acc) : fma(m, bias, acc);
      }
      segments.after(first + g, acc);
    }
  }
  store_n(y, segments.total, count);
}

// One record of 16 rows: the quants as the rows layout has them, [group][8 vectors][64], and the scales by lane.
template <Codec codec>
struct ExpandedRecord {
  uint8_t* quants;  // kSuper * 512
  float* scales;    // [d, d2 or m][group][16]

  explicit ExpandedRecord(uint8_t* scratch) : quants(scratch), scales(reinterpret_cast<float*>(scratch + kSuper * 512)) {}
  static constexpr size_t bytes() { return 2 * kSuper * 512 + 4 * kPlane * sizeof(float); }

  void fill(const TilePair& tile, size_t offset, int groups) {
    constexpr size_t kFull = static_cast<size_t>(neurons_record_bytes(codec, kSuper));
    float* unordered = scales + 2 * kPlane;
    uint8_t* by_row = reinterpret_cast<uint8_t*>(unordered + 2 * kPlane);
    for (int r = 0; r < kTile; ++r) {
      tile.prefetch(r, offset, kAheadRecords * kFull, kFull);
      const NeuronRecord<codec> weights{tile.rows.at[r] + offset, static_cast<size_t>(groups)};
      weights.each_vector([&](int v, u8x32 q) __attribute__((always_inline)) { store_u8x32(by_row + 256 * r + 32 * v, q); });
      f32x8 d = {}, d2 = {}, m = {};
      weights.load_scales(&d, &d2, &m);
      store8(unordered + kSuper * r, d);
      store8(unordered + kPlane + kSuper * r, kHalves<codec> ? d2 : m);
    }
    transpose16(unordered, kSuper, scales, kTile);
    transpose16(unordered + kPlane, kSuper, scales + kPlane, kTile);
    for (int v = 0; v < 8; ++v) {
      transpose16(reinterpret_cast<const float*>(by_row + 32 * v), 64, reinterpret_cast<float*>(quants + 64 * v), 128);
    }
  }
  THINFER_INLINE_MEMBER GroupScales group_scales(int g) const {
    const float* lane = scales + kTile * g;
    const f32x16 second = load(lane + kPlane);
    return {load(lane), second, second};
  }
};

template <Codec codec>
void gemm_tile(const Matrix& w, const QuantizedRows& x, const TilePair& tile, int count, float* y, int ldy,
               uint8_t* scratch) {
  constexpr size_t kFull = static_cast<size_t>(neurons_record_bytes(codec, kSuper));
  ExpandedRecord<codec> expanded(scratch);
  const int groups = w.inputs / kGroup;
  for (int row = 0; row < x.rows; row += kGemmRows) {
    const int some = x.rows - row < kGemmRows ? x.rows - row : kGemmRows;
    TileSums sums(scratch + ExpandedRecord<codec>::bytes(), some);
    int segment = 0;
    sums.begin_segment();
    for (int group = 0; group < groups; ++group) {
      const int g = group % kSuper;
      if (g == 0) {
        const int here = groups - group < kSuper ? groups - group : kSuper;
        expanded.fill(tile, kFull * static_cast<size_t>(group / kSuper), here);
      }
      gemm_group<codec>(expanded.quants + 512 * g, expanded.group_scales(g), x, group, row, some, sums.partial);
      if (group + 1 == w.segment_begin(segment + 1) * groups_per_block(codec)) {
        sums.end_segment(segment++);
        if (group + 1 < groups) sums.begin_segment();
      }
    }
    for (int r = 0; r < some; ++r) {
      store_n(y + static_cast<size_t>(row + r) * static_cast<size_t>(ldy), load(sums.total + r * kTile), count);
    }
  }
}

}  // namespace

void neurons_gemv(const Matrix& w, const NeuronInput& x, const int32_t* ids, int count, float* y, uint8_t* scratch) {
  each_tile(w, ids, count, [&](const TilePair& tile, int first, int here) __attribute__((always_inline)) {
    THINFER_FOR_CODEC(w.codec, gemv_tile<codec>(w, x, tile, reinterpret_cast<float*>(scratch), y + first, here));
  });
}
void neurons_gemm(const Matrix& w, const QuantizedRows& x, const int32_t* ids, int count, float* y, int ldy,
                  uint8_t* scratch) {
  each_tile(w, ids, count, [&](const TilePair& tile, int first, int here) __attribute__((always_inline)) {
    THINFER_FOR_CODEC(w.codec, gemm_tile<codec>(w, x, tile, here, y + first, ldy, scratch));
  });
}

void find_above(const float* x, int n, float threshold, bool magnitude, uint16_t* bits) {
  const f32x16 limit = set1(threshold);
  for (int i = 0; i < n; i += 16) {
    const f32x16 v = n - i >= 16 ? load(x + i) : load_n(x + i, n - i);
    bits[i / 16] = static_cast<uint16_t>(~mask_bits(less_equal(magnitude ? abs(v) : v, limit)));
  }
}

}  // namespace thinfer::THINFER_ISA
