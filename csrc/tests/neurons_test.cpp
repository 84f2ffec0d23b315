// Neurons ops over every stored type and instruction set, on one and several rows, with and without lists: in the neurons
// layout and in rows the same bits, and a list leaves what it names as it was.
#include "neurons.h"

#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "tests/stored.h"

namespace {

using namespace thinfer;
using namespace thinfer::testing;

constexpr int kNeurons = 66;  // four tiles of sixteen and a rest
constexpr int kRows = 3;

struct Ffn {
  int inputs;
  std::shared_ptr<const PackedMatrix> gate, up;
};

Ffn make_ffn(const Type& type, int inputs, Layout layout, ThreadPool& pool) {
  Random random{11};
  auto gate = random_matrix(type, kNeurons, inputs, layout, 64, 1, random, pool);
  return {inputs, std::move(gate), random_matrix(type, kNeurons, inputs, layout, 64, 1, random, pool)};
}

// Outputs [rows, neurons] of `rows` rows from `first`; `listed`: the same neurons for each of them, empty: none are listed.
std::vector<float> run(Isa isa, const Ffn& ffn, const std::vector<int32_t>& listed, int first, int rows) {
  auto pool = std::make_shared<ThreadPool>(2);
  Program program(isa, pool, rows);
  NeuronParts parts;
  parts.x = program.add_buffer(ffn.inputs);
  parts.gate = ffn.gate;
  parts.up = ffn.up;
  parts.lists = std::make_shared<NeuronLists>();
  parts.lists->offsets.assign(1, 0);
  for (int row = 0; row < rows && !listed.empty(); ++row) {
    parts.lists->given = true;
    parts.lists->ids.insert(parts.lists->ids.end(), listed.begin(), listed.end());
    parts.lists->offsets.push_back(static_cast<int32_t>(parts.lists->ids.size()));
  }
  const int x = parts.x, y = program.add_buffer(kNeurons);
  program.add(std::make_unique<NeuronsOp>(isa, parts, y, Act{Activation::relu, 0.0f, true}, Activations::int8,
                                          std::make_shared<LinearStorage>(), std::make_shared<NeuronStorage>()),
              {x}, y);
  return run_rows(program, x, ffn.inputs, y, kNeurons, first, rows);
}

// One by one, then together; the same bits.
std::vector<float> run_both(Isa isa, const Ffn& ffn, const std::vector<int32_t>& listed) {
  std::vector<float> single;
  for (int row = 0; row < kRows; ++row) {
    const auto one = run(isa, ffn, listed, row, 1);
    single.insert(single.end(), one.begin(), one.end());
  }
  CHECK(single == run(isa, ffn, listed, 0, kRows));
  return single;
}

void test_type(const Type& type, int inputs) {
  ThreadPool pool(2);
  const std::vector<int32_t> some = {0, 5, 17, 63, 65};
  const Ffn scattered = make_ffn(type, inputs, Layout::neurons, pool);
  const auto expected = run_both(Isa::scalar, scattered, {});
  CHECK(expected != std::vector<float>(expected.size(), 0.0f));
  std::vector<float> named(expected.size(), 0.0f);
  for (int row = 0; row < kRows; ++row) {
    for (const int32_t id : some) named[static_cast<size_t>(row * kNeurons + id)] = expected[static_cast<size_t>(row * kNeurons + id)];
  }
  std::vector<const Ffn*> layouts = {&scattered};
  Ffn in_order;
  if (!is_float(scattered.gate->matrix().codec)) {
    in_order = make_ffn(type, inputs, Layout::rows, pool);
    layouts.push_back(&in_order);
  }
  for (const Ffn* ffn : layouts) {
    for (const Isa isa : available_isas()) {
      CHECK(run_both(isa, *ffn, {}) == expected);
      CHECK(run_both(isa, *ffn, some) == named);
    }
  }
}

}  // namespace

void test_neurons() {
  for (const Type& type : kTypes) {
    const int block = traits(codec_of(parse_stored_type(type.name))).block;
    test_type(type, block == 256 ? 768 : 288);  // 288: nine groups, so the last record of a row has one
  }
}
