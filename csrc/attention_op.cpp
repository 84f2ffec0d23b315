#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kv_cache.h"
#include "ops.h"

namespace thinfer {

namespace {

// Rows taken together, so that a block of keys and values is widened once for all of them.
constexpr int kGroupRows = 16;
// With fewer pairs of row group and kv head than this, pairs are cut into segments to occupy the threads.
constexpr int kEnoughItems = 32;
constexpr int kRowsPerWrite = 8;

// Consecutive rows of one sequence at consecutive positions.
struct Group {
  int row;
  int rows;
};

struct Item {
  int group;
  int kv_head;
  int first_segment;
  int last_segment;
  int partial;  // index of its partial result, or -1: it writes the output itself
};

// Partial results of one group and kv head, to be joined in order.
struct Joined {
  int item;  // the first of `count` items
  int count;
};

class Attention final : public Op {
 public:
  Attention(const OpKernels& kernels, int x, int out, Heads heads, int layer, float scale, int window,
            std::vector<float> slopes, std::shared_ptr<const NeuronLists> lists)
      : kernels_(kernels),
        x_(x),
        out_(out),
        heads_(heads),
        layer_(layer),
        scale_(scale),
        window_(window),
        slopes_(std::move(slopes)),
        lists_(std::move(lists)) {}

  const char* name() const override { return "attention"; }

  void prepare(const Batch& batch) override {
    find_groups(batch);
    find_wanted(batch);
    items_.clear();
    joined_.clear();
    int partials = 0;
    const bool split = static_cast<int>(groups_.size()) * heads_.kv_heads < kEnoughItems;
    for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
      const Group& group = groups_[static_cast<size_t>(g)];
      const int position = batch.positions[group.row];
      const int low = window_ > 0 && position >= window_ ? position - window_ + 1 : 0;
      const int first = low / kSegment;
      const int last = (position + group.rows - 1) / kSegment + 1;
      for (int kv_head = 0; kv_head < heads_.kv_heads; ++kv_head) {
        if (!wants_any(group, kv_head)) continue;
        if (!split || last - first == 1) {
          items_.push_back({g, kv_head, first, last, -1});
          continue;
        }
        joined_.push_back({static_cast<int>(items_.size()), last - first});
        for (int segment = first; segment < last; ++segment) {
          items_.push_back({g, kv_head, segment, segment + 1, partials++});
        }
      }
    }
    partials_.resize(static_cast<size_t>(partials) * state_floats());
  }

  // Write the rows' keys and values; attend; join what was cut into segments.
  int phases() const override { return joined_.empty() ? 2 : 3; }

  int items(int phase, const Batch& batch) const override {
    if (phase == 0) return (batch.rows + kRowsPerWrite - 1) / kRowsPerWrite * heads_.kv_heads;
    return static_cast<int>(phase == 1 ? items_.size() : joined_.size());
  }

  int chunk(int phase, const Batch&) const override {
    return phase == 2 ? std::max(1, 16 * 64 / (heads_.heads / heads_.kv_heads * heads_.head_dim)) : 1;
  }

  size_t scratch_bytes(int) const override {
    const size_t floats = state_floats() + attend_scratch_floats(max_queries(), heads_.head_dim);
    return floats * sizeof(float);
  }

  void run(int phase, int begin, int end, int, Context& context) override {
    for (int i = begin; i < end; ++i) {
      if (phase == 0) {
        write(i, context);
      } else if (phase == 1) {
        attend(items_[static_cast<size_t>(i)], context);
      } else {
        join(joined_[static_cast<size_t>(i)], context);
      }
    }
  }

 private:
  int group_heads() const { return heads_.heads / heads_.kv_heads; }
  int max_queries() const { return kGroupRows * group_heads(); }
  size_t state_floats() const {
    return static_cast<size_t>(max_queries()) * static_cast<size_t>(padded(heads_.head_dim) + 2);
  }
  AttendState state_at(float* memory) const {
    const auto queries = static_cast<size_t>(max_queries());
    const auto width = static_cast<size_t>(padded(heads_.head_dim));
    return {memory + queries * width, memory + queries * width + queries, memory};
  }

  void find_groups(const Batch& batch) {
    groups_.clear();
    for (int row = 0; row < batch.rows; ++row) {
      if (!groups_.empty()) {
        Group& group = groups_.back();
        const bool follows = batch.sequence[row] == batch.sequence[row - 1] &&
                             batch.positions[row] == batch.positions[row - 1] + 1 && group.rows < kGroupRows;
        if (follows) {
          ++group.rows;
          continue;
        }
      }
      groups_.push_back({row, 1});
    }
  }

  bool listed() const { return lists_ && lists_->given; }
  bool wants(int row, int head) const {
    return !listed() || wanted_[static_cast<size_t>(row * heads_.heads + head)] != 0;
  }
  bool wants_any(const Group& group, int kv_head) const {
    for (int row = group.row; row < group.row + group.rows; ++row) {
      for (int head = 0; head < group_heads(); ++head) {
        if (wants(row, kv_head * group_heads() + head)) return true;
      }
    }
    return false;
  }

  void find_wanted(const Batch& batch) {
    if (!listed()) return;
    if (lists_->rows() != batch.rows) {
      throw std::invalid_argument("heads are listed for " + std::to_string(lists_->rows()) + " rows, the batch has " +
                                  std::to_string(batch.rows));
    }
    wanted_.assign(static_cast<size_t>(batch.rows * heads_.heads), 0);
    for (int row = 0; row < batch.rows; ++row) {
      for (int i = lists_->offsets[static_cast<size_t>(row)]; i < lists_->offsets[static_cast<size_t>(row) + 1]; ++i) {
        const int head = lists_->ids[static_cast<size_t>(i)];
        if (head < 0 || head >= heads_.heads) {
          throw std::invalid_argument("head " + std::to_string(head) + " of " + std::to_string(heads_.heads));
        }
        wanted_[static_cast<size_t>(row * heads_.heads + head)] = 1;
      }
    }
  }

  const float* row_of(const Context& context, int row) const {
    return context.buffers[x_] + static_cast<ptrdiff_t>(row) * padded(heads_.width());
  }

  float* out_of(const Context& context, int row, int head) const {
    return context.buffers[out_] + static_cast<ptrdiff_t>(row) * padded(heads_.heads * heads_.head_dim) +
           head * heads_.head_dim;
  }

  // Some rows' keys and values of one head, whether it is computed or not: later rows may want them. Heads not wanted give 0.
  // Even a single row is cut by head: each of its keys lies on as many cache lines as it has numbers, and as a rule the thread
  // that writes them will read them.
  void write(int item, Context& context) const {
    const Batch& batch = context.batch;
    const KvCache& kv = *context.kv;
    const int kv_head = item % heads_.kv_heads, first = item / heads_.kv_heads * kRowsPerWrite;
    const int at = kv_head * heads_.head_dim;
    for (int row = first; row < std::min(first + kRowsPerWrite, batch.rows); ++row) {
      const int position = batch.positions[row];
      const ptrdiff_t table = static_cast<ptrdiff_t>(batch.sequence[row]) * batch.max_blocks;
      uint8_t* block = kv.block(batch.block_table[table + position / kBlock]);
      const float* keys = row_of(context, row) + heads_.heads * heads_.head_dim;
      const float* values = keys + heads_.kv_heads * heads_.head_dim;
      kernels_.write_kv(keys + at, values + at, block + kv.key_offset(layer_, kv_head), block + kv.value_offset(layer_, kv_head),
                        position % kBlock, heads_.head_dim, kv.half());
      for (int head = kv_head * group_heads(); head < (kv_head + 1) * group_heads(); ++head) {
        if (!wants(row, head)) std::memset(out_of(context, row, head), 0, sizeof(float) * static_cast<size_t>(heads_.head_dim));
      }
    }
  }

  void attend(const Item& item, Context& context) {
    const Batch& batch = context.batch;
    const KvCache& kv = *context.kv;
    const Group& group = groups_[static_cast<size_t>(item.group)];
    const int last_block = (batch.positions[group.row] + group.rows - 1) / kBlock + 1;
    const int32_t* table = batch.block_table + static_cast<ptrdiff_t>(batch.sequence[group.row]) * batch.max_blocks;
    const int first_block = item.first_segment * (kSegment / kBlock);
    const int end_block = std::min(item.last_segment * (kSegment / kBlock), last_block);
    const AttendJob job{
        .queries = row_of(context, group.row) + item.kv_head * group_heads() * heads_.head_dim,
        .row_stride = padded(heads_.width()),
        .rows = group.rows,
        .group = group_heads(),
        .head_dim = heads_.head_dim,
        .position = batch.positions[group.row],
        .window = window_,
        .scale = scale_,
        .slopes = slopes_.empty() ? nullptr : slopes_.data() + item.kv_head * group_heads(),
        .half = kv.half(),
        .table = table,
        .blocks = kv.bases(),
        .key_offset = kv.key_offset(layer_, item.kv_head),
        .value_offset = kv.value_offset(layer_, item.kv_head),
        .first_segment = item.first_segment,
        .last_segment = item.last_segment,
    };
    auto* scratch = reinterpret_cast<float*>(context.scratch);
    const bool whole = item.partial < 0;
    const AttendState state =
        state_at(whole ? scratch : partials_.data() + static_cast<size_t>(item.partial) * state_floats());
    kernels_.attend(job, state, scratch + state_floats());
    const auto element = static_cast<uint64_t>(kv.half() ? 2 : 4);
    context.counters->bytes_read += static_cast<uint64_t>(end_block - first_block) * kBlock * element *
                                    static_cast<uint64_t>(heads_.head_dim + padded(heads_.head_dim));
    if (whole) finish(item, state, context);
  }

  void join(const Joined& joined, Context& context) {
    const Item& item = items_[static_cast<size_t>(joined.item)];
    const int queries = groups_[static_cast<size_t>(item.group)].rows * group_heads();
    float* memory = partials_.data() + static_cast<size_t>(item.partial) * state_floats();
    for (int i = 1; i < joined.count; ++i) {
      const AttendState later = state_at(memory + static_cast<size_t>(i) * state_floats());
      kernels_.attend_join(state_at(memory), later, queries, heads_.head_dim);
    }
    finish(item, state_at(memory), context);
  }

  void finish(const Item& item, const AttendState& state, Context& context) const {
    const Group& group = groups_[static_cast<size_t>(item.group)];
    const int width = padded(heads_.head_dim);
    for (int row = 0; row < group.rows; ++row) {
      for (int head = 0; head < group_heads(); ++head) {
        const int query = row * group_heads() + head, own = item.kv_head * group_heads() + head;
        if (!wants(group.row + row, own)) continue;
        kernels_.attend_finish(state.output + static_cast<ptrdiff_t>(query) * width, state.sum[query],
                               out_of(context, group.row + row, own), heads_.head_dim);
      }
    }
  }

  const OpKernels& kernels_;
  int x_;
  int out_;
  Heads heads_;
  int layer_;
  float scale_;
  int window_;
  std::vector<float> slopes_;
  std::shared_ptr<const NeuronLists> lists_;
  std::vector<uint8_t> wanted_;  // [rows][heads] of this step, where heads are listed
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::vector<Joined> joined_;
  std::vector<float> partials_;
};

}  // namespace

std::unique_ptr<Op> make_attention(const OpKernels& kernels, int x, int out, Heads heads, int layer, float scale,
                                   int window, std::vector<float> slopes, std::shared_ptr<const NeuronLists> lists) {
  return std::make_unique<Attention>(kernels, x, out, heads, layer, scale, window, std::move(slopes), std::move(lists));
}

}  // namespace thinfer
