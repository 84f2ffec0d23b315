#include "linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace thinfer {
namespace {

template <class T>
void grow(std::vector<T>& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

// Parts of a channel slice that are items of their own. A thread takes several at a time and reads them as one, because
// long slices are read faster; the last ones, taken one by one, go to whoever is done early.
constexpr int kSliceParts = 4;

// The first block of 64 outputs of a part of a chunk.
int part_begin(const Matrix& w, int chunk, int part) {
  const int blocks = w.chunk_width(chunk) / kOutBlock, fetches = (blocks + kFetchBlocks - 1) / kFetchBlocks;
  return std::min(fetches * part / kSliceParts * kFetchBlocks, blocks);
}

// y[o] = the sum of partial[s * stride + o] in the order of s. A few outputs at a time, which stay in registers.
void add_segments(const float* partial, int segments, ptrdiff_t stride, int outputs, float* y) {
  int o = 0;
  for (; o + kTile <= outputs; o += kTile) {
    float sum[kTile];
    std::memcpy(sum, partial + o, sizeof sum);
    for (int s = 1; s < segments; ++s) {
      for (int i = 0; i < kTile; ++i) sum[i] += partial[s * stride + o + i];
    }
    std::memcpy(y + o, sum, sizeof sum);
  }
  for (; o < outputs; ++o) {
    y[o] = partial[o];
    for (int s = 1; s < segments; ++s) y[o] += partial[s * stride + o];
  }
}

}  // namespace

LinearOp::LinearOp(Isa isa, int in, int out, std::vector<std::shared_ptr<const PackedMatrix>> parts,
                   std::vector<float> bias, Activations activations, std::shared_ptr<LinearStorage> storage)
    : kernels_(linear_kernels(isa)), unions_(union_kernels(isa)), in_(in), out_(out), bias_(std::move(bias)), storage_(std::move(storage)) {
  if (parts.empty()) throw std::invalid_argument("a linear op needs a matrix");
  inputs_ = parts.front()->width();
  floats_ = activations == Activations::f32 ||
            std::any_of(parts.begin(), parts.end(), [](const auto& matrix) { return is_float(matrix->matrix().codec); });
  for (auto& matrix : parts) {
    const Matrix& w = matrix->matrix();
    if (w.inputs != inputs_) throw std::invalid_argument("matrices of one linear op must have the same inputs");
    if (w.layout == Layout::neurons) throw std::invalid_argument("a matrix in the neurons layout needs a neurons op");
    parts_.push_back({std::move(matrix), outputs_, staging_width_});
    outputs_ += w.outputs;
    staging_width_ += w.padded_outputs * w.segments;
    columns_ = columns_ || w.layout == Layout::columns;
    halves_ = halves_ || traits(w.codec).scale == ScaleKind::k16;
  }
  for (Part& part : parts_) {
    const Matrix& w = part.matrix->matrix();
    const bool last = &part == &parts_.back();
    // Kernels write whole tiles: fine where the tile ends inside the part or the row's padding.
    part.staged = last ? padded(outputs_) < part.first_output + w.padded_outputs : w.padded_outputs != w.outputs;
    part.staged = part.staged || part.first_output % kTile != 0;
  }
  if (!bias_.empty() && static_cast<int>(bias_.size()) != outputs_) throw std::invalid_argument("bias needs one float an output");
}

Threshold Threshold::padded_to(int inputs) && {
  if (!channel_scale.empty()) {
    if (static_cast<int>(channel_scale.size()) != inputs) throw std::invalid_argument("channel_scale needs one float an input");
    channel_scale.resize(static_cast<size_t>(padded(inputs)), 0.0f);
  }
  return std::move(*this);
}

void prepare_inputs(const LinearKernels& kernels, const Threshold& threshold, bool sparse, const float* x, int from, int count,
                    float* masked, const QuantizedRows& q, int row) {
  const float* scale = threshold.scales() != nullptr ? threshold.scales() + from : nullptr;
  if (masked == nullptr) {
    kernels.quantize(x + from, count, sparse ? threshold.value : -1.0f, scale, q.from(from / kGroup), row);
  } else if (sparse) {
    kernels.mask(x + from, count, threshold.value, scale, masked + from);
  } else {
    std::memcpy(masked + from, x + from, static_cast<size_t>(count) * sizeof(float));
  }
}

void LinearOp::set_threshold(Threshold threshold) { threshold_ = std::move(threshold).padded_to(inputs_); }

bool LinearOp::is_sparse(const Batch& batch, int row) const {
  return threshold_.applies(batch, selected() ? batch.out_rows[row] : row);
}

QuantizedRows LinearOp::quantized(const Batch& batch) const {
  LinearStorage& s = *storage_;
  return {rows(batch), rows(batch), s.q.data(), s.scale.data(), s.bias.data(), s.sums.data()};
}
ActiveChannels LinearOp::active() const {
  return {storage_->quads.data(), storage_->channel.data(), storage_->active_q.data()};
}
UnionChannels LinearOp::channels() const { return {storage_->quads.data(), storage_->channel.data(), storage_->active_q.data()}; }

// Whether a few rows read the channels that any of them uses.
bool LinearOp::united(const Batch& batch) const {
  return !floats_ && columns_ && rows(batch) > 1 && rows(batch) <= kUnionRows;
}

bool LinearOp::staged(const Part& part, const Batch& batch) const {
  const Matrix& w = part.matrix->matrix();
  return part.staged || (!floats_ && rows(batch) <= kUnionRows && w.layout == Layout::columns && w.segments > 1);
}

void LinearOp::prepare(const Batch& batch) {
  const size_t n = static_cast<size_t>(rows(batch));
  const size_t groups = static_cast<size_t>((inputs_ + kGroup - 1) / kGroup);
  LinearStorage& s = *storage_;
  if (floats_) {
    if (threshold_.value >= 0.0f) grow(s.masked, n * static_cast<size_t>(padded(inputs_)));
  } else {
    grow(s.q, n * groups * kGroup);
    grow(s.scale, n * groups);
    grow(s.bias, n * groups);
    grow(s.sums, 2 * n * groups);
    grow(s.quads, 2 * groups);
    grow(s.channel, kGroup * groups);
    grow(s.active_q, kGroup * groups * (united(batch) ? n : 1));
  }
  for (const Part& part : parts_) {
    if (staged(part, batch)) grow(s.partial, n * static_cast<size_t>(staging_width_));
  }
}

int LinearOp::part_items(const Part& part, const Batch& batch) const {
  const Matrix& w = part.matrix->matrix();
  if (w.layout == Layout::rows) return w.tiles();
  if (rows(batch) > 1 && !united(batch)) return w.padded_outputs / kOutBlock;
  if (floats_) return w.chunks();
  return w.chunks() * w.segments * (rows(batch) == 1 ? kSliceParts : 1);
}

int LinearOp::items(int phase, const Batch& batch) const {
  const int n = rows(batch);
  if (n == 0) return 0;
  if (phase == 0) return floats_ && threshold_.value < 0.0f ? 0 : n * pieces(inputs_);
  if (phase == 1) return united(batch) ? inputs_ / kGroup : 0;
  if (phase == 2) {
    int total = 0;
    for (const Part& part : parts_) total += part_items(part, batch);
    return total;
  }
  const bool aside = std::any_of(parts_.begin(), parts_.end(), [&](const Part& p) { return staged(p, batch); });
  return aside || !bias_.empty() ? n * pieces(outputs_) : 0;
}

int LinearOp::chunk(int phase, const Batch& batch) const {
  // Column work that is not cut into parts comes in few, equal, large items.
  return phase == 2 && columns_ && (united(batch) || (floats_ && rows(batch) == 1)) ? 1 : 0;
}

size_t LinearOp::scratch_bytes(int max_rows) const { return linear_scratch_bytes(max_rows); }

void LinearOp::run(int phase, int begin, int end, int, Context& context) {
  if (phase == 0) {
    const int count = pieces(inputs_);
    for (int item = begin; item < end; ++item) prepare_piece(item / count, item % count, context);
  } else if (phase == 1) {
    unions_.find(quantized(context.batch), begin, end, halves_, channels());
  } else if (phase == 2) {
    // Without a phase 0 nobody has counted the rows, all of whose channels are used.
    const int64_t all = static_cast<int64_t>(inputs_) * rows(context.batch);
    if (begin == 0 && items(0, context.batch) == 0) count_channels(all, all, context);
    int first = 0;
    for (const Part& part : parts_) {
      const int count = part_items(part, context.batch);
      const int from = std::max(begin, first), to = std::min(end, first + count);
      if (from < to) run_part(part, from - first, to - first, context);
      first += count;
    }
  } else {
    const int count = pieces(outputs_);
    for (int item = begin; item < end; ++item) combine(item / count, item % count, context);
  }
}

// A piece of a row, ready for the kernels.
void LinearOp::prepare_piece(int row, int piece, Context& context) {
  const Batch& batch = context.batch;
  const int from = piece * kPiece, count = std::min(kPiece, inputs_ - from);
  const ptrdiff_t at = static_cast<ptrdiff_t>(row) * padded(inputs_);
  const bool sparse = is_sparse(batch, row);
  float* masked = floats_ ? storage_->masked.data() + at : nullptr;
  prepare_inputs(kernels_, threshold_, sparse, context.buffers[in_] + at, from, count, masked, quantized(batch), row);
  int active_channels = count;
  if (floats_) {
    active_channels = static_cast<int>(count - std::count(masked + from, masked + from + count, 0.0f));
  } else {
    const QuantizedRows q = quantized(batch).from(from / kGroup);
    if (columns_ && q.rows == 1) {
      active_channels = kernels_.find_active(q, row, count, halves_, active().from(from / kGroup));
    } else if (sparse || columns_) {
      active_channels = 0;
      for (int g = 0; g < count / kGroup; ++g) {
        const int8_t* group = q.q + (static_cast<ptrdiff_t>(g) * q.stride + row) * kGroup;
        active_channels += static_cast<int>(kGroup - std::count(group, group + kGroup, 0));
      }
    }
  }
  count_channels(active_channels, count, context);
}

void LinearOp::count_channels(int64_t active, int64_t total, Context& context) const {
  context.counters->channels_active += static_cast<uint64_t>(active);
  context.counters->channels_total += static_cast<uint64_t>(total);
}

void LinearOp::run_part(const Part& part, int begin, int end, Context& context) {
  const Batch& batch = context.batch;
  const Matrix& w = part.matrix->matrix();
  const int n = rows(batch);
  const bool aside = staged(part, batch);
  float* y = aside ? storage_->partial.data() + part.partial : context.buffers[out_] + part.first_output;
  const int ldy = aside ? staging_width_ : padded(outputs_);
  if (floats_) {
    const bool masked = threshold_.value >= 0.0f;
    const float* x = masked ? storage_->masked.data() : context.buffers[in_];
    const int tiles_per_item = w.layout == Layout::rows ? 1 : (n > 1 ? kOutBlock : w.chunk) / kTile;
    const int step = w.layout == Layout::rows ? end - begin : 1;  // a call stays inside one chunk
    for (int item = begin; item < end; item += step) {
      const int last = std::min((item + step) * tiles_per_item, w.tiles());
      context.counters->bytes_read += kernels_.float_linear(w, x, n, padded(inputs_), y, ldy, item * tiles_per_item, last,
                                                            masked, context.scratch);
    }
  } else if (n == 1) {
    run_gemv(part, begin, end, y, context);
  } else if (w.layout == Layout::rows) {
    kernels_.rows_gemm(w, quantized(batch), y, ldy, begin, end, context.scratch);
    context.counters->bytes_read += w.tile_bytes() * static_cast<size_t>(end - begin);
  } else if (united(batch)) {
    for (int item = begin; item < end; ++item) {
      const int segment = item / w.chunks(), c = item % w.chunks();
      float* to = y + static_cast<ptrdiff_t>(segment) * w.padded_outputs + c * w.chunk;
      context.counters->bytes_read += unions_.gemm(w, quantized(batch), channels(), to, ldy, segment, c, context.scratch);
    }
  } else {
    kernels_.columns_gemm(w, quantized(batch), y, ldy, begin, end, context.scratch);
    context.counters->bytes_read += w.chunk_bytes(kOutBlock) * static_cast<size_t>(end - begin);
  }
}

void LinearOp::run_gemv(const Part& part, int begin, int end, float* y, Context& context) {
  const Matrix& w = part.matrix->matrix();
  const QuantizedRows x = quantized(context.batch);
  if (w.layout == Layout::rows) {
    kernels_.rows_gemv(w, x, y, begin, end);
    context.counters->bytes_read += w.tile_bytes() * static_cast<size_t>(end - begin);
    return;
  }
  for (int item = begin; item < end;) {
    const int slice = item / kSliceParts, first = item % kSliceParts, last = std::min(first + end - item, kSliceParts);
    const int segment = slice / w.chunks(), c = slice % w.chunks();
    const int from = part_begin(w, c, first), until = part_begin(w, c, last);
    item += last - first;
    if (from == until) continue;  // the slice has fewer parts
    float* to = y + static_cast<ptrdiff_t>(segment) * w.padded_outputs + c * w.chunk;
    context.counters->bytes_read += kernels_.columns_gemv(w, x, active(), to, segment, c, from, until);
  }
}

// A piece of a row: adds the partial sums of staged parts in order, and the bias.
void LinearOp::combine(int row, int piece, Context& context) {
  float* y = context.buffers[out_] + static_cast<ptrdiff_t>(row) * padded(outputs_);
  const int begin = piece * kPiece, end = std::min(begin + kPiece, outputs_);
  for (const Part& part : parts_) {
    const Matrix& w = part.matrix->matrix();
    const int first = std::max(begin, part.first_output), last = std::min(end, part.first_output + w.outputs);
    if (first >= last || !staged(part, context.batch)) continue;
    const float* from = storage_->partial.data() + static_cast<ptrdiff_t>(row) * staging_width_ + part.partial +
                        (first - part.first_output);
    const bool segmented = !floats_ && rows(context.batch) <= kUnionRows && w.layout == Layout::columns;
    add_segments(from, segmented ? w.segments : 1, w.padded_outputs, last - first, y + first);
  }
  for (int o = begin; o < end && !bias_.empty(); ++o) y[o] += bias_[static_cast<size_t>(o)];
}

}  // namespace thinfer
