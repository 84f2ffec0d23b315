// Linear ops over every stored type, layout and instruction set, on one and several rows, dense and with thresholds.
#include "linear.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "check.h"
#include "tests/stored.h"

namespace {

using namespace thinfer;
using namespace thinfer::testing;

constexpr int kInputs = 512;
constexpr int kRows = 3;

// Outputs of the matrices of one op, and of their channel slices.
struct Shape {
  std::vector<int> outputs;
  int chunk;
  int total() const { return std::accumulate(outputs.begin(), outputs.end(), 0); }
};

struct Weights {
  int outputs;
  std::vector<std::shared_ptr<const PackedMatrix>> parts;
};

Weights make_weights(const Type& type, Layout layout, const Shape& shape, ThreadPool& pool) {
  Random random{7};
  Weights weights{shape.total(), {}};
  for (const int outputs : shape.outputs) {
    weights.parts.push_back(random_matrix(type, outputs, kInputs, layout, shape.chunk, layout == Layout::rows ? 1 : 2, random, pool));
  }
  return weights;
}

// Outputs [rows, outputs] of `rows` rows from `first`.
std::vector<float> run(Isa isa, const Weights& weights, Activations activations, float threshold, int first, int rows) {
  auto pool = std::make_shared<ThreadPool>(2);
  Program program(isa, pool, rows);
  const int outputs = weights.outputs;
  const int x = program.add_buffer(kInputs);
  const int y = program.add_buffer(outputs);
  std::vector<float> bias(static_cast<size_t>(outputs), 0.5f);
  auto op = std::make_unique<LinearOp>(isa, x, y, weights.parts, bias, activations,
                                       std::make_shared<LinearStorage>());
  op->set_threshold({threshold, {}});
  program.add(std::move(op), {x}, y);
  return run_rows(program, x, kInputs, y, outputs, first, rows);
}

bool close(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
  float largest = 0;
  float difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return false;
    largest = std::fmax(largest, std::fabs(a[i]));
    difference = std::fmax(difference, std::fabs(a[i] - b[i]));
  }
  return difference <= tolerance * largest;
}

void test_type(const Type& type, Layout layout, const Shape& shape) {
  ThreadPool pool(2);
  const Weights weights = make_weights(type, layout, shape, pool);
  for (const float threshold : {-1.0f, 0.5f}) {
    const auto oracle = run(Isa::scalar, weights, Activations::f32, threshold, 0, kRows);
    for (const Activations activations : {Activations::int8, Activations::f32}) {
      const auto expected = run(Isa::scalar, weights, activations, threshold, 0, kRows);
      CHECK(close(oracle, expected, 0.02f));
      for (const Isa isa : available_isas()) {
        std::vector<float> single;
        for (int row = 0; row < kRows; ++row) {
          const auto one = run(isa, weights, activations, threshold, row, 1);
          single.insert(single.end(), one.begin(), one.end());
        }
        const auto together = run(isa, weights, activations, threshold, 0, kRows);
        CHECK(std::memcmp(single.data(), together.data(), single.size() * sizeof(float)) == 0);
        CHECK(close(expected, together, 1e-5f));
      }
    }
  }
}

}  // namespace

void test_linear() {
  for (const Type& type : kTypes) {
    test_type(type, Layout::columns, {{66, 17}, 64});
    if (!is_float(codec_of(parse_stored_type(type.name)))) test_type(type, Layout::rows, {{66, 17}, 64});
  }
  // Slices with an odd number of blocks, longer than what is fetched ahead, and channels of whole KiB.
  test_type(kTypes[1], Layout::columns, {{17 * kOutBlock}, 17 * kOutBlock});
  test_type(kTypes[1], Layout::columns, {{2048}, 2048});
  test_type(kTypes[0], Layout::columns, {{1024}, 1024});
}
