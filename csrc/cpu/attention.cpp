// Attention of a group of queries over blocks of the KV cache.
//
// Whatever the tile a query is computed in, its scores are sums over head_dim in order, its probabilities are reduced
// block by block at absolute positions, and its output is a sum over positions in order, so its bits depend on nothing
// but its own row: not on the rows beside it, the chunk it came in, or the instruction set.
#include "cpu/isa/simd.h"
#include "cpu/ops.h"

namespace thinfer::THINFER_ISA {

// Queries per register tile, and vectors beside each: as many accumulators as the registers hold.
static constexpr int kTile = 6;
template <int R>
static constexpr int tile_vectors() {
#if defined(THINFER_ISA_AVX512)
  return 4;
#elif defined(THINFER_ISA_AVX2)
  return R <= 1 ? 4 : R <= 3 ? 2 : 1;
#else
  return 1;
#endif
}

THINFER_INLINE f32x16 load_any(const float* p) { return load(p); }
THINFER_INLINE f32x16 load_any(const uint16_t* p) { return load_f16(p); }

// out[r][16 c ...] = sum over k of left[r][k] * right[k][16 c ...], added to what out holds if `adding`; k in order.
template <int R, int C, typename Right>
THINFER_INLINE void product(const float* left, ptrdiff_t left_stride, const Right* right, ptrdiff_t right_stride,
                            int depth, float* out, ptrdiff_t out_stride, bool adding) {
  f32x16 sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = adding ? load(out + r * out_stride + 16 * c) : zero();
  }
  for (int k = 0; k < depth; ++k, right += right_stride) {
    f32x16 v[C];
    for (int c = 0; c < C; ++c) v[c] = load_any(right + 16 * c);
    for (int r = 0; r < R; ++r) {
      const f32x16 l = set1(left[r * left_stride + k]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(l, v[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(out + r * out_stride + 16 * c, sum[r][c]);
  }
}

// R queries over `vectors` vectors of columns.
template <int R, typename Right>
static void product_rows(const float* left, ptrdiff_t left_stride, const Right* right, ptrdiff_t right_stride,
                         int depth, int vectors, float* out, ptrdiff_t out_stride, bool adding) {
  constexpr int C = tile_vectors<R>();
  int c = 0;
  for (; c + C <= vectors; c += C) {
    product<R, C>(left, left_stride, right + 16 * c, right_stride, depth, out + 16 * c, out_stride, adding);
  }
  for (; c < vectors; ++c) {
    product<R, 1>(left, left_stride, right + 16 * c, right_stride, depth, out + 16 * c, out_stride, adding);
  }
}

template <typename Right>
static void product_tile(int rows, const float* left, ptrdiff_t left_stride, const Right* right, ptrdiff_t right_stride,
                         int depth, int vectors, float* out, ptrdiff_t out_stride, bool adding) {
  switch (rows) {
#define THINFER_CASE(R) \
  case R:               \
    return product_rows<R>(left, left_stride, right, right_stride, depth, vectors, out, out_stride, adding);
    THINFER_CASE(1)
    THINFER_CASE(2)
    THINFER_CASE(3)
    THINFER_CASE(4)
    THINFER_CASE(5)
    THINFER_CASE(6)
#undef THINFER_CASE
  }
}

// Positions of a block that a query sees.
struct Range {
  int begin, end;
};

// A job's buffers, carved from its scratch.
struct Work {
  const AttendJob& job;
  int queries;
  ptrdiff_t width;      // padded head_dim
  float* packed;        // [queries][head_dim] scaled queries
  float* scores;        // [queries][kBlock]
  AttendState segment;  // state of the current segment
  float* plane;         // one block of keys or values as float32
};

THINFER_INLINE int lowest(const AttendJob& job, int row) {
  const int position = job.position + row;
  return job.window > 0 && position >= job.window ? position - job.window + 1 : 0;
}

THINFER_INLINE Range visible(const AttendJob& job, int row, int block) {
  const int start = block * kBlock;
  const int low = lowest(job, row) - start;
  const int high = job.position + row + 1 - start;
  return {low > 0 ? low : 0, high < kBlock ? high : kBlock};
}

THINFER_INLINE float exp1(float x) {
  float lanes[16];
  store(lanes, exp_of_negative(set1(x)));
  return lanes[0];
}

// (v0 . v1) . (v2 . v3) with the neutral element for missing vectors, so that leaving vectors out changes no bit.
template <int V, typename Combine>
THINFER_INLINE f32x16 four(const f32x16* v, f32x16 neutral, Combine combine) {
  const f32x16 low = combine(v[0], V > 1 ? v[1 % V] : neutral);
  const f32x16 high = combine(V > 2 ? v[2 % V] : neutral, V > 3 ? v[3 % V] : neutral);
  return combine(low, high);
}

THINFER_INLINE void scale_row(float* row, float factor, ptrdiff_t width) {
  const f32x16 f = set1(factor);
  for (ptrdiff_t i = 0; i < width; i += 16) store(row + i, mul(load(row + i), f));
}

// Scores of one query over the first V vectors of a block become probabilities relative to its running maximum.
template <int V>
static void soften(Work& w, int query, int block, Range range) {
  float* s = w.scores + query * kBlock;
  f32x16 v[V];
  for (int i = 0; i < V; ++i) v[i] = load(s + 16 * i);
  if (w.job.slopes != nullptr) {
    const f32x16 slope = set1(w.job.slopes[query % w.job.group]);
    const int distance = block * kBlock - (w.job.position + query / w.job.group);
    for (int i = 0; i < V; ++i) {
      v[i] = fma(slope, add(iota(), set1(static_cast<float>(distance + 16 * i))), v[i]);
    }
  }
  if (range.begin > 0 || range.end < 16 * V) {
    const f32x16 hidden = set1(-__builtin_inff());
    const f32x16 begin = set1(static_cast<float>(range.begin));
    const f32x16 end = set1(static_cast<float>(range.end));
    for (int i = 0; i < V; ++i) {
      const f32x16 at = add(iota(), set1(static_cast<float>(16 * i)));
      v[i] = select(less(at, begin), hidden, select(less(at, end), v[i], hidden));
    }
  }
  const float top = reduce_max(four<V>(v, set1(-__builtin_inff()), [](f32x16 a, f32x16 b) { return max(a, b); }));
  const float before = w.segment.maximum[query];
  const float now = top > before ? top : before;
  const f32x16 shift = set1(now);
  for (int i = 0; i < V; ++i) {
    v[i] = exp_of_negative(sub(v[i], shift));
    store(s + 16 * i, v[i]);
  }
  const float sum = reduce_add(four<V>(v, zero(), [](f32x16 a, f32x16 b) { return add(a, b); }));
  if (now == before) {  // a factor of exactly 1
    w.segment.sum[query] += sum;
    return;
  }
  const float factor = exp1(before - now);
  w.segment.sum[query] = __builtin_fmaf(w.segment.sum[query], factor, sum);
  w.segment.maximum[query] = now;
  scale_row(w.segment.output + query * w.width, factor, w.width);
}

static void soften_rows(Work& w, int begin, int end, int block, int vectors) {
  for (int query = begin; query < end; ++query) {
    const Range range = visible(w.job, query / w.job.group, block);
    switch (vectors) {
      case 1:
        soften<1>(w, query, block, range);
        break;
      case 2:
        soften<2>(w, query, block, range);
        break;
      case 3:
        soften<3>(w, query, block, range);
        break;
      default:
        soften<4>(w, query, block, range);
    }
  }
}

// Adds probabilities times values for the queries [query, query + rows) of one tile.
template <typename Value>
static void weigh(Work& w, int query, int rows, int block, const Value* values) {
  const int group = w.job.group;
  const Range first = visible(w.job, query / group, block);
  const Range last = visible(w.job, (query + rows - 1) / group, block);
  const int vectors = static_cast<int>(w.width / 16);
  const float* p = w.scores + query * kBlock;
  float* out = w.segment.output + query * w.width;
  // Later rows see further at both ends. What all see is one product; the rest is added per query, so that what a query
  // may not see (a NaN, say) never meets it, not even with probability 0.
  const int begin = last.begin;
  const int end = first.end;
  if (begin >= end) {
    for (int r = 0; r < rows; ++r) {
      const Range range = visible(w.job, (query + r) / group, block);
      if (range.begin < range.end) {
        product_rows<1>(p + r * kBlock + range.begin, kBlock, values + range.begin * w.width, w.width,
                        range.end - range.begin, vectors, out + r * w.width, w.width, true);
      }
    }
    return;
  }
  for (int r = 0; first.begin < begin && r < rows; ++r) {
    const int from = visible(w.job, (query + r) / group, block).begin;
    if (from < begin) {
      product_rows<1>(p + r * kBlock + from, kBlock, values + from * w.width, w.width, begin - from, vectors,
                      out + r * w.width, w.width, true);
    }
  }
  product_tile(rows, p + begin, kBlock, values + begin * w.width, w.width, end - begin, vectors, out, w.width, true);
  for (int r = 0; end < last.end && r < rows; ++r) {
    const int to = visible(w.job, (query + r) / group, block).end;
    if (to > end) {
      product_rows<1>(p + r * kBlock + end, kBlock, values + end * w.width, w.width, to - end, vectors,
                      out + r * w.width, w.width, true);
    }
  }
}

// Rows of halves as float32 in the job's plane: with several tiles they are widened once for all.
static const float* widen(const Work& w, const uint16_t* from, int rows, ptrdiff_t stride, int vectors) {
  for (int row = 0; row < rows; ++row) {
    for (int c = 0; c < vectors; ++c) store(w.plane + row * stride + 16 * c, load_f16(from + row * stride + 16 * c));
  }
  return w.plane;
}

template <typename Element>
static void score_tiles(Work& w, int begin, int end, int vectors, const Element* keys) {
  const int head_dim = w.job.head_dim;
  for (int query = begin; query < end; query += kTile) {
    const int rows = end - query < kTile ? end - query : kTile;
    product_tile(rows, w.packed + query * static_cast<ptrdiff_t>(head_dim), head_dim, keys, kBlock, head_dim, vectors,
                 w.scores + query * kBlock, kBlock, false);
  }
}

template <typename Element>
static void weigh_tiles(Work& w, int begin, int end, int block, const Element* values) {
  for (int query = begin; query < end; query += kTile) {
    weigh(w, query, end - query < kTile ? end - query : kTile, block, values);
  }
}

template <typename Element>
static void attend_block(Work& w, int block) {
  const AttendJob& job = w.job;
  // Rows that see something of the block: not those before it, nor those whose window has passed it.
  const int start = block * kBlock;
  int first = start - job.position;
  first = first > 0 ? first : 0;
  int last = job.rows;
  while (last > first && lowest(job, last - 1) >= start + kBlock) --last;
  if (first >= last) return;
  const int begin = first * job.group;
  const int end = last * job.group;
  const int seen = visible(job, last - 1, block).end;
  const int vectors = (seen + 15) / 16;

  const uint8_t* base = job.blocks[job.table[block]];
  const auto* keys = reinterpret_cast<const Element*>(base + job.key_offset);
  const auto* values = reinterpret_cast<const Element*>(base + job.value_offset);
  const bool several = end - begin > kTile;
  if (!several) {  // nobody has read them in this step: fetched while the scores are computed
    const auto* line = reinterpret_cast<const uint8_t*>(values + visible(job, first, block).begin * w.width);
    const auto* past = reinterpret_cast<const uint8_t*>(values + seen * w.width);
    for (; line < past; line += 64) __builtin_prefetch(line, 0, 3);
  }
  if constexpr (sizeof(Element) == 2) {
    if (several) {
      score_tiles(w, begin, end, vectors, widen(w, keys, job.head_dim, kBlock, vectors));
    } else {
      score_tiles(w, begin, end, vectors, keys);
    }
  } else {
    score_tiles(w, begin, end, vectors, keys);
  }
  soften_rows(w, begin, end, block, vectors);
  if constexpr (sizeof(Element) == 2) {
    if (several) {
      weigh_tiles(w, begin, end, block, widen(w, values, seen, w.width, static_cast<int>(w.width / 16)));
      return;
    }
  }
  weigh_tiles(w, begin, end, block, values);
}

static void reset(const AttendState& state, int queries, ptrdiff_t width) {
  for (int q = 0; q < queries; ++q) {
    state.maximum[q] = -__builtin_inff();
    state.sum[q] = 0.0f;
  }
  for (ptrdiff_t i = 0; i < queries * width; i += 16) store(state.output + i, zero());
}

void attend_join(const AttendState& into, const AttendState& later, int queries, int head_dim) {
  const ptrdiff_t width = (head_dim + 15) & ~15;
  for (int q = 0; q < queries; ++q) {
    const float a = into.maximum[q];
    const float b = later.maximum[q];
    if (later.sum[q] == 0.0f) continue;  // saw nothing of the segment (a sum that saw something is at least 1, or NaN)
    const float top = b > a ? b : a;
    const float keep = exp1(a - top);
    const float take = exp1(b - top);
    into.maximum[q] = top;
    into.sum[q] = __builtin_fmaf(later.sum[q], take, into.sum[q] * keep);
    float* out = into.output + q * width;
    const float* more = later.output + q * width;
    const f32x16 k = set1(keep);
    const f32x16 t = set1(take);
    for (ptrdiff_t i = 0; i < width; i += 16) store(out + i, fma(load(more + i), t, mul(load(out + i), k)));
  }
}

void attend(const AttendJob& job, const AttendState& state, float* scratch) {
  const int queries = job.rows * job.group;
  const int head_dim = job.head_dim;
  const ptrdiff_t width = (head_dim + 15) & ~15;
  const ptrdiff_t rounded = (queries + 15) & ~15;
  Work w{.job = job,
         .queries = queries,
         .width = width,
         .packed = scratch,
         .scores = nullptr,
         .segment = {},
         .plane = nullptr};
  w.scores = w.packed + rounded * width;
  w.segment.output = w.scores + rounded * kBlock;
  w.segment.maximum = w.segment.output + rounded * width;
  w.segment.sum = w.segment.maximum + rounded;
  w.plane = w.segment.sum + rounded;
  for (int q = 0; q < queries; ++q) {
    const float* from = job.queries + q / job.group * job.row_stride + q % job.group * head_dim;
    for (int i = 0; i < head_dim; ++i) w.packed[q * head_dim + i] = from[i] * job.scale;
  }

  reset(state, queries, width);
  const int last_block = (job.position + job.rows - 1) / kBlock + 1;
  for (int segment = job.first_segment; segment < job.last_segment; ++segment) {
    reset(w.segment, queries, width);
    int block = segment * (kSegment / kBlock);
    const int end = block + kSegment / kBlock < last_block ? block + kSegment / kBlock : last_block;
    for (; block < end; ++block) {
      if (job.half) {
        attend_block<uint16_t>(w, block);
      } else {
        attend_block<float>(w, block);
      }
    }
    attend_join(state, w.segment, queries, head_dim);
  }
}

void attend_finish(const float* output, float sum, float* out, int head_dim) {
  const f32x16 factor = set1(1.0f / sum);
  int i = 0;
  for (; i + 16 <= head_dim; i += 16) store(out + i, mul(load(output + i), factor));
  if (i < head_dim) store_n(out + i, mul(load(output + i), factor), head_dim - i);
}

void write_kv(const float* key, const float* value, uint8_t* keys, uint8_t* values, int slot, int head_dim, bool half) {
  const ptrdiff_t width = (head_dim + 15) & ~15;
  if (half) {
    auto* k = reinterpret_cast<uint16_t*>(keys) + slot;
    auto* v = reinterpret_cast<uint16_t*>(values) + slot * width;
    for (int i = 0; i < head_dim; i += 16) {
      uint16_t lanes[16];
      const int n = head_dim - i < 16 ? head_dim - i : 16;
      store_f16(lanes, load_n(key + i, n));
      for (int j = 0; j < n; ++j) k[(i + j) * kBlock] = lanes[j];
      store_f16(v + i, load_n(value + i, n));
    }
  } else {
    float* k = reinterpret_cast<float*>(keys) + slot;
    float* v = reinterpret_cast<float*>(values) + slot * width;
    for (int i = 0; i < head_dim; ++i) k[i * kBlock] = key[i];
    for (int i = 0; i < head_dim; i += 16) store(v + i, load_n(value + i, head_dim - i));
  }
}

}  // namespace thinfer::THINFER_ISA
