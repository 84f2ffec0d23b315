// Any rows of a matrix in the neurons layout times integer activations.
//
// A vector holds two rows with one group in each lane, so a row's groups come out side by side; sixteen rows are then
// transposed, and each group ends as in every other kernel, one row a lane. That keeps the order of float operations,
// hence the bits. Sums that fit 16 bits are transposed as such.
#include "cpu/gemm_group.h"
#include "cpu/isa/tile_sums.h"
#include "cpu/neuron_tile.h"
#include "neuron_kernels.h"

namespace thinfer::THINFER_ISA {
namespace {

// Fetched ahead: what is in flight stays in the first-level cache until it is used. Measured on an Intel Xeon with AVX-512 and
// on an AMD Zen 3 with AVX2, where further ahead is 5 to 10 % slower; other processors were not.
#if defined(THINFER_ISA_AVX512)
constexpr size_t kAheadRecords = 4;
#else
constexpr size_t kAheadRecords = 1;
#endif
constexpr size_t kPlane = static_cast<size_t>(kSuper) * kTile;  // a number for every group and row of a tile

// The records of two rows, `groups` groups each.
template <Codec codec>
struct RecordPair {
  const uint8_t *a, *b;
  size_t groups;

  // Calls use(v, quants) for the 8 vectors; lanes past the groups hold bytes without meaning.
  template <class Use>
  THINFER_INLINE_MEMBER void each_vector(Use&& use) const {
    each_packed_vector<kBits<codec>>(
        [&](int i) __attribute__((always_inline)) {
          const size_t at = 4 * groups * static_cast<size_t>(i);
          return load_pair(a + at, b + at);
        },
        use);
  }
  // Of the lanes: d of the groups, or of their first halves and d2 of their second ones, and minima.
  THINFER_INLINE_MEMBER GroupScales scales() const {
    const size_t at = static_cast<size_t>(neurons_quant_bytes(codec, static_cast<int>(groups)));
    const uint8_t *one = a + at, *two = b + at;
    GroupScales s = {};
    if constexpr (traits(codec).scale == ScaleKind::d) {
      s.d = load_pair_f16(one, two);
    } else if constexpr (traits(codec).scale == ScaleKind::dm) {
      s.d = load_pair_f16(one, two);
      s.m = load_pair_f16(one + 2 * groups, two + 2 * groups);
    } else {
      const f32x16 whole = block_scale(one, two, 0);
      if constexpr (traits(codec).scale == ScaleKind::k) {
        s.d = mul(whole, load_pair_u8(one, two));
        s.m = mul(block_scale(one, two, 1), load_pair_u8(one + groups, two + groups));
      } else {
        s.d = mul(whole, load_pair_i8(one, two));
        s.d2 = mul(whole, load_pair_i8(one + groups, two + groups));
      }
    }
    return s;
  }

 private:
  THINFER_INLINE_MEMBER f32x16 block_scale(const uint8_t* one, const uint8_t* two, size_t which) const {
    uint16_t half[2];
    __builtin_memcpy(half, one + 2 * groups + 2 * which, 2);
    __builtin_memcpy(half + 1, two + 2 * groups + 2 * which, 2);
    return set_pair(half_to_float(half[0]), half_to_float(half[1]));
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

// Inputs of one record, each vector twice.
struct RecordInputs {
  TwiceInputs v[8];
  THINFER_INLINE_MEMBER explicit RecordInputs(const int8_t* q)
      : v{TwiceInputs(q),       TwiceInputs(q + 32),  TwiceInputs(q + 64),  TwiceInputs(q + 96),
          TwiceInputs(q + 128), TwiceInputs(q + 160), TwiceInputs(q + 192), TwiceInputs(q + 224)} {}
};

// Of 4 bits and one scale a group. The sum of a group's (q - 8) * x is at most 32 * 8 * 127: 16 bits hold it.
void gemv_tile_u4_d(const Matrix& w, const NeuronInput& x, const TilePair& tile, float* y, int count) {
  static_assert(kGroup * traits(Codec::u4_d).offset * 127 <= 32767);
  constexpr size_t kFull = static_cast<size_t>(neurons_record_bytes(Codec::u4_d, kSuper));
  const int groups = w.inputs / kGroup;
  f32x16 acc = zero();
  Segments segments(w, 1);
  for (int first = 0; first < groups; first += kSuper) {
    const int here = groups - first < kSuper ? groups - first : kSuper;
    const size_t offset = kFull * static_cast<size_t>(first / kSuper), vector = 4 * static_cast<size_t>(here);
    const i32x16 start = times(load_twice(x.sums + first), -traits(Codec::u4_d).offset);
    const RecordInputs inputs(x.q + first * kGroup);
    const Ahead ahead = tile.ahead(offset + kAheadRecords * kFull);
    const auto dot = [&](int r) __attribute__((always_inline)) {
      ahead.prefetch(r, kFull);
      ahead.prefetch(r + 8, kFull);
      NibbleDot sum(start);
      const uint8_t *a = tile.rows.at[r] + offset, *b = tile.rows.at[r + 8] + offset;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum.add(load_pair(a + vector * i, b + vector * i), inputs.v[2 * i], inputs.v[2 * i + 1], i);
      return sum.total();
    };
    i16x32 pairs[4];
#pragma GCC unroll 1
    for (int r = 0; r < 8; r += 2) pairs[r / 2] = narrow(dot(r), dot(r + 1));
    f32x16 sums[kSuper], d[kSuper];
    sums_by_lane(pairs, sums);
    halves_by_lane(tile.rows.at, offset + static_cast<size_t>(neurons_quant_bytes(Codec::u4_d, here)), d);
#pragma GCC unroll 8
    for (int g = 0; g < kSuper; ++g) {
      if (g == here) break;
      acc = fma(sums[g], mul(d[g], set1(x.scale[first + g])), acc);
      segments.after(first + g, acc);
    }
  }
  store_n(y, segments.total, count);
}

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
    // Kept apart from the rows' stores, which the compiler must assume to change what is in memory.
    const f32x16 scale = load_twice(x.scale + first);
    const int32_t* sums = x.sums + first;
    const i32x16 offset1 = times(load_twice(kHalf ? sums + x.sums_stride : sums), kOffset<codec>);
    const i32x16 offset2 = times(load_twice(sums + 2 * x.sums_stride), kOffset<codec>);
    const RecordInputs inputs(x.q + first * kGroup);
    const Ahead ahead = tile.ahead(offset + kAheadRecords * kFull);
#pragma GCC unroll 1
    for (int r = 0; r < kTile; r += 2) {
      ahead.prefetch(r, kFull);
      ahead.prefetch(r + 1, kFull);
      const RecordPair<codec> weights{tile.rows.at[r] + offset, tile.rows.at[r + 1] + offset, static_cast<size_t>(here)};
      const GroupScales s = weights.scales();
      const int at = kSuper * r;
      Dot<kBits<codec>> one, two;
      weights.each_vector([&](int v, u8x64 quants) __attribute__((always_inline)) {
        if (!kHalf || v < 4) {
          one.add(quants, inputs.v[v], v);
        } else {
          two.add(quants, inputs.v[v], v);
        }
      });
      store(sum + at, to_float(minus(one.total(), offset1)));
      store(factor + at, mul(s.d, scale));
      if constexpr (kHalf) {
        store(sum2 + at, to_float(minus(two.total(), offset2)));
        store(factor2 + at, mul(s.d2, scale));
      }
      if constexpr (kMin) store(minimum + at, s.m);
    }
    for (size_t plane = 0; plane < (kHalf ? 4 : kMin ? 3 : 2); ++plane) {
      transpose16(planes + plane * kPlane, lanes + plane * kPlane, kTile);
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
    uint8_t* by_row = reinterpret_cast<uint8_t*>(unordered + 2 * kPlane);  // [8 vectors][16 rows][32]
    const Ahead ahead = tile.ahead(offset + kAheadRecords * kFull);
    for (int r = 0; r < kTile; r += 2) {
      ahead.prefetch(r, kFull);
      ahead.prefetch(r + 1, kFull);
      const RecordPair<codec> weights{tile.rows.at[r] + offset, tile.rows.at[r + 1] + offset, static_cast<size_t>(groups)};
      weights.each_vector([&](int v, u8x64 q) __attribute__((always_inline)) { store_u8(by_row + 512 * v + 32 * r, q); });
      const GroupScales s = weights.scales();
      store(unordered + kSuper * r, s.d);
      store(unordered + kPlane + kSuper * r, kHalves<codec> ? s.d2 : s.m);
    }
    transpose16(unordered, scales, kTile);
    transpose16(unordered + kPlane, scales + kPlane, kTile);
    for (int v = 0; v < 8; ++v) {
      transpose16(reinterpret_cast<const float*>(by_row + 512 * v), reinterpret_cast<float*>(quants + 64 * v), 128);
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

void neurons_gemv(const Matrix& w, const NeuronInput& x, const RowIds& rows, float* y, uint8_t* scratch) {
  each_tile(w, rows, [&](const TilePair& tile, int first, int here) __attribute__((always_inline)) {
    THINFER_FOR_CODEC(w.codec, {
      if constexpr (codec == Codec::u4_d) {
        gemv_tile_u4_d(w, x, tile, y + first, here);
      } else {
        gemv_tile<codec>(w, x, tile, reinterpret_cast<float*>(scratch), y + first, here);
      }
    });
  });
}
void neurons_gemm(const Matrix& w, const QuantizedRows& x, const RowIds& rows, float* y, int ldy, uint8_t* scratch) {
  each_tile(w, rows, [&](const TilePair& tile, int first, int here) __attribute__((always_inline)) {
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
