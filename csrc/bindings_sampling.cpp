#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <climits>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "dispatch.h"
#include "sampling.h"

namespace thinfer::python {

namespace {

// The kernels of one instruction set: finding it asks the processor, which takes longer than a draw.
class Softmax {
 public:
  explicit Softmax(const std::optional<std::string>& isa) : isa_(isa ? parse_isa(*isa) : default_isa()) {}

  std::string isa() const { return isa_name(isa_); }

  std::optional<int> draw(const In<float, 1>& scores, float top, float temperature, float least, double uniform) const {
    const SoftmaxScale scale{top, temperature, least};
    const int n = checked_size(scores, scale);
    if (!(uniform >= 0 && uniform < 1)) throw std::invalid_argument("uniform must be in [0, 1)");
    return thinfer::draw(op_kernels(isa_), scores.data(), n, scale, uniform);
  }

  double total(const In<float, 1>& scores, float top, float temperature) const {
    const SoftmaxScale scale{top, temperature, 0.0f};
    const int n = checked_size(scores, scale);
    return softmax_total(op_kernels(isa_), scores.data(), n, scale);
  }

 private:
  static int checked_size(const In<float, 1>& scores, const SoftmaxScale& scale) {
    if (scores.size() < 1 || scores.size() > INT_MAX) {
      throw std::invalid_argument("scores must hold at least one number");
    }
    if (!std::isfinite(scale.top) || !(scale.temperature > 0) || !(scale.least >= 0)) {
      throw std::invalid_argument("top must be finite, temperature above 0 and least not below");
    }
    return static_cast<int>(scores.size());
  }

  Isa isa_;
};

}  // namespace

void bind_sampling(nb::module_& module) {
  nb::class_<Softmax>(module, "Softmax",
                      "Weights e^((score - top) / temperature) over a vocabulary: top is the largest of scores [vocab].")
      .def(nb::init<const std::optional<std::string>&>(), nb::arg("isa").none() = nb::none(),
           "isa: an instruction set; None: the best of this machine.")
      .def_prop_ro("isa", &Softmax::isa)
      .def("draw", &Softmax::draw, nb::arg("scores").noconvert(), nb::arg("top"), nb::arg("temperature"),
           nb::arg("least"), nb::arg("uniform"),
           "The id whose share of the summed weights holds the point uniform in [0, 1), in order of ids.\n\n"
           "Weights below least count for nothing. None where another way of rounding weights and sums could give\n"
           "another id: that is for the caller to compute.")
      .def("total", &Softmax::total, nb::arg("scores").noconvert(), nb::arg("top"), nb::arg("temperature"),
           "The sum of the weights, within error of itself.")
      .def_prop_ro("error", [](const Softmax&) { return static_cast<double>(kSoftmaxError); });
}

}  // namespace thinfer::python
