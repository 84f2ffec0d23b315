// A small model's ops on every instruction set: the same bits however the prompt is cut, on any number of threads.
#include "program.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch_check.h"
#include "check.h"
#include "kv_cache.h"
#include "ops.h"

namespace {

using namespace thinfer;

struct Shape {
  Heads heads;
  int window;
  bool half;
};

// Numbers in (-1, 1) that are the same everywhere.
std::vector<float> numbers(size_t count, uint32_t seed) {
  std::vector<float> values(count);
  uint32_t state = seed * 2654435761u + 1u;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 4.656612873e-10f;
  }
  return values;
}

constexpr int kVocab = 50;
constexpr int kTokens = 140;  // three cache blocks, two segments

// embed -> head_norm -> rope -> attention -> gated_act -> add -> select -> rms_norm, over kTokens tokens in chunks.
std::vector<float> run_chunks(Isa isa, const Shape& shape, int threads, int chunk) {
  const OpKernels& kernels = op_kernels(isa);
  const Heads heads = shape.heads;
  const int width = heads.width();
  const int attended = heads.heads * heads.head_dim;
  auto cache = std::make_shared<KvCache>(2, heads.kv_heads, heads.head_dim, shape.half);
  cache->ensure_blocks(1);
  cache->ensure_blocks((kTokens + kBlock - 1) / kBlock + 1);
  Program program(isa, std::make_shared<ThreadPool>(threads), chunk);
  program.set_kv(cache);
  const int x = program.add_buffer(width);
  const int y = program.add_buffer(width);
  const int z = program.add_buffer(attended);
  const int a = program.add_buffer(attended / 2);
  const int b = program.add_buffer(attended / 2);
  const auto dim = static_cast<size_t>(heads.head_dim);
  auto source = std::make_shared<Float32Rows>(numbers(static_cast<size_t>(kVocab * width), 1), kVocab, width);
  program.add(make_embed(source, x), {}, x);
  program.add(make_head_norm(kernels, x, y, heads, numbers(dim, 2), numbers(dim, 3), 1e-5f), {x}, y);
  const auto table = std::make_shared<RopeTable>(numbers(dim / 2, 4), 1.0f);
  program.add(make_rope(kernels, y, y, heads, table), {y}, y);
  program.add(make_attention(kernels, y, z, heads, 1, 0.3f, shape.window, {}), {y}, z);
  program.add(make_act(kernels, z, a, attended / 2, {Activation::silu, 0.0f, true}, {}, 0), {z}, a);
  program.add(make_add(kernels, a, a, b, attended / 2), {a, a}, b);
  program.add(make_select(b, a, attended / 2), {b}, a);
  const auto norm = numbers(static_cast<size_t>(attended / 2), 5);
  program.add(make_rms_norm(kernels, a, a, norm, 1e-5f), {a}, a);
  program.set_profiling(true);

  std::vector<float> outputs;
  for (int first = 0; first < kTokens; first += chunk) {
    const int last = std::min(first + chunk, kTokens);
    OwnedBatch batch;
    for (int position = first; position < last; ++position) {
      batch.tokens.push_back(position * 7 % kVocab);
      batch.positions.push_back(position);
      batch.sequence.push_back(0);
      batch.sparse.push_back(0);
      batch.out_rows.push_back(position - first);
    }
    batch.block_table = {3, 1, 0};
    batch.sequences = 1;
    batch.max_blocks = 3;
    program.run(0, program.ops(), batch.view());
    for (int row = 0; row < last - first; ++row) {
      const float* from = program.buffer(a) + static_cast<ptrdiff_t>(row) * padded(attended / 2);
      outputs.insert(outputs.end(), from, from + attended / 2);
    }
  }
  const std::vector<Counters> counters = program.take_counters();
  CHECK(counters.size() == 8 && counters[0].calls == static_cast<uint64_t>((kTokens + chunk - 1) / chunk));
  CHECK(counters[3].bytes_read > 0);
  CHECK(program.take_counters()[3].bytes_read == 0);
  return outputs;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_scatter(Isa isa) {
  Program program(isa, std::make_shared<ThreadPool>(2), 3);
  const int x = program.add_buffer(2 * 2100);
  const int out = program.add_buffer(5000);
  std::vector<int> ids;
  for (int j = 0; j < 2100; ++j) ids.push_back(2 * j + 3);
  program.add(make_act(op_kernels(isa), x, out, 2100, {Activation::relu, 0.0f, true}, ids, 5000), {x}, out);
  for (int row = 0; row < 3; ++row) {
    for (int i = 0; i < 2 * 2100; ++i) program.buffer(x)[row * padded(2 * 2100) + i] = 1.0f + static_cast<float>(i % 5);
    for (int i = 0; i < 5000; ++i) program.buffer(out)[row * padded(5000) + i] = 99.0f;
  }
  OwnedBatch batch{.tokens = {0, 0, 0},
                   .positions = {0, 1, 2},
                   .sequence = {0, 0, 0},
                   .sparse = {0, 0, 0},
                   .out_rows = {},
                   .block_table = {0},
                   .sequences = 1,
                   .max_blocks = 1};
  program.run(0, 1, batch.view());
  for (int row = 0; row < 3; ++row) {
    const float* values = program.buffer(out) + row * padded(5000);
    for (int i = 0; i < 5000; ++i) {
      const int j = (i - 3) / 2;
      const bool hit = i >= 3 && i % 2 == 1 && j < 2100;
      CHECK(values[i] == (hit ? static_cast<float>((1 + j % 5) * (1 + (j + 2100) % 5)) : 0.0f));
    }
  }
}

// Loops of so many items a phase, which check that they run one after another.
class Steps final : public Op {
 public:
  Steps(std::vector<int> items, std::vector<std::string>& log, std::string name)
      : items_(std::move(items)), log_(log), name_(std::move(name)) {}
  const char* name() const override { return name_.c_str(); }
  void prepare(const Batch&) override {
    CHECK(before_ == nullptr || before_->whole());
    log_.push_back(name_);
  }
  int phases() const override { return static_cast<int>(items_.size()); }
  int items(int phase, const Batch&) const override { return items_[static_cast<size_t>(phase)]; }
  void run(int phase, int begin, int end, int, Context& context) override {
    // Of an earlier phase all items are done.
    for (int before = 0; before < phase; ++before) CHECK(done_[before].load() == items_[static_cast<size_t>(before)]);
    done_[phase] += end - begin;
    context.counters->bytes_read += static_cast<uint64_t>(end - begin);
  }
  // The op that must be done when this one begins.
  void follows(const Steps& before) { before_ = &before; }
  bool whole() const {
    for (size_t phase = 0; phase < items_.size(); ++phase) {
      if (done_[phase].load() != items_[phase]) return false;
    }
    return true;
  }

 private:
  std::vector<int> items_;
  std::atomic<int> done_[4] = {};
  std::vector<std::string>& log_;
  std::string name_;
  const Steps* before_ = nullptr;
};

OwnedBatch one_row() {
  return {.tokens = {0}, .positions = {0}, .sequence = {0}, .sparse = {0}, .out_rows = {}, .block_table = {0}, .sequences = 1,
          .max_blocks = 1};
}

// What the log says of ops a, b (a chain) and c, d, e, of which e waits for the chain.
std::vector<std::string> run_beside(int threads, const std::vector<int>& c_items, int last, int until) {
  std::vector<std::string> log;
  Program program(Isa::scalar, std::make_shared<ThreadPool>(threads), 1);
  const int x = program.add_buffer(1);
  std::vector<Steps*> steps;
  const std::vector<std::pair<std::string, std::vector<int>>> ops = {
      {"a", {3, 0, 40}}, {"b", {1}}, {"c", c_items}, {"d", {1, 64, 0}}, {"e", {2}}};
  for (const auto& [name, items] : ops) {
    auto op = std::make_unique<Steps>(items, log, name);
    steps.push_back(op.get());
    program.add(std::move(op), {x}, x);
  }
  program.set_beside(0, 2, until);
  CHECK_THROWS(std::invalid_argument, program.set_beside(1, 3, 4));
  CHECK_THROWS(std::invalid_argument, program.set_beside(2, 3, 5));
  CHECK_THROWS(std::invalid_argument, program.set_beside(3, 3, 4));
  const OwnedBatch batch = one_row();
  program.run(0, last, batch.view());
  const std::vector<Counters> counters = program.take_counters();
  for (int op = 0; op < last; ++op) {
    CHECK(steps[static_cast<size_t>(op)]->whole());
    CHECK(counters[static_cast<size_t>(op)].calls == 1);
  }
  return log;
}

// Chains a and b, of which each waits its turn: they share storage. c runs beside both; d and e wait for them.
void run_two_chains(int threads, const std::vector<int>& until, int last) {
  std::vector<std::string> log;
  Program program(Isa::scalar, std::make_shared<ThreadPool>(threads), 1);
  const int x = program.add_buffer(1);
  std::vector<Steps*> steps;
  for (const auto& [name, items] : std::vector<std::pair<std::string, std::vector<int>>>{
           {"a", {30, 30, 30}}, {"b", {64, 2}}, {"c", {40}}, {"d", {8, 8}}, {"e", {5}}}) {
    auto op = std::make_unique<Steps>(items, log, name);
    steps.push_back(op.get());
    program.add(std::move(op), {x}, x);
  }
  program.set_beside(1, 2, until[1]);
  program.set_beside(0, 1, until[0]);
  steps[1]->follows(*steps[0]);
  for (size_t chain = 0; chain < 2; ++chain) steps[static_cast<size_t>(until[chain])]->follows(*steps[chain]);
  const OwnedBatch batch = one_row();
  program.run(0, last, batch.view());
  for (int op = 0; op < last; ++op) CHECK(steps[static_cast<size_t>(op)]->whole());
}

void test_beside() {
  for (const int threads : {1, 2, 5}) {
    run_two_chains(threads, {3, 4}, 5);
    run_two_chains(threads, {4, 3}, 5);
    run_two_chains(threads, {3, 4}, 4);  // b is run in order, as the run ends before e
  }
  using Log = std::vector<std::string>;
  for (const int threads : {1, 2, 5}) {
    // The chain's phases join those of c and d; b begins when a's two loops have been joined.
    CHECK(run_beside(threads, {2, 7}, 5, 4) == (Log{"a", "c", "b", "d", "e"}));
    CHECK(run_beside(threads, {9}, 5, 4) == (Log{"a", "c", "d", "b", "e"}));
    // Loops of one item are left alone.
    CHECK(run_beside(threads, {1, 1}, 5, 4) == (Log{"a", "c", "d", "b", "e"}));
    // Nothing to join, or an op that waits at once: the chain runs alone, before it.
    CHECK(run_beside(threads, {0}, 5, 3) == (Log{"a", "c", "b", "d", "e"}));
    CHECK(run_beside(threads, {9}, 5, 2) == (Log{"a", "b", "c", "d", "e"}));
    // A run that ends before the op that waits takes the ops in order.
    CHECK(run_beside(threads, {9}, 4, 4) == (Log{"a", "b", "c", "d"}));
  }
}

}  // namespace

void test_program() {
  test_beside();
  const Shape shapes[] = {
      {{3, 1, 6}, 0, true}, {{4, 2, 16}, 20, false}, {{6, 2, 32}, 0, true}, {{2, 2, 24}, 100, true}};
  for (const Shape& shape : shapes) {
    const std::vector<float> expected = run_chunks(Isa::scalar, shape, 1, kTokens);
    for (const Isa isa : available_isas()) {
      for (const int chunk : {1, 33, kTokens}) CHECK(same_bits(expected, run_chunks(isa, shape, 1 + chunk % 3, chunk)));
    }
  }
  for (const Isa isa : available_isas()) test_scatter(isa);
  CHECK_THROWS(std::invalid_argument, Program(Isa::scalar, std::make_shared<ThreadPool>(1), 0));
  CHECK_THROWS(std::invalid_argument, parse_isa("mmx"));
}
