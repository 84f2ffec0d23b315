// Lists of neurons, Program.op_neurons and Program.op_pick_neurons.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "bindings.h"
#include "neurons.h"

namespace thinfer::python {

namespace {

void set_lists(NeuronLists& self, const In<int32_t, 1>& ids, const In<int32_t, 1>& offsets) {
  const int32_t* at = offsets.data();
  const size_t rows = offsets.size();
  if (rows == 0 || at[0] != 0 || static_cast<size_t>(at[rows - 1]) != ids.size()) {
    throw std::invalid_argument("offsets must begin with 0 and end with the number of ids");
  }
  for (size_t row = 0; row + 1 < rows; ++row) {
    if (at[row + 1] < at[row]) throw std::invalid_argument("offsets must not fall");
    for (int32_t i = at[row]; i < at[row + 1]; ++i) {
      const bool falls = i > at[row] && ids.data()[i] <= ids.data()[i - 1];
      if (falls || ids.data()[i] < 0) throw std::invalid_argument("the ids of row " + std::to_string(row) + " must ascend from 0");
    }
  }
  self.ids = copied<int32_t, 1>(ids);
  self.offsets = copied<int32_t, 1>(offsets);
  self.given = true;
}

std::vector<float> floats(const std::optional<In<float, 1>>& values) {
  return values ? copied<float, 1>(*values) : std::vector<float>();
}

int op_neurons(CheckedProgram& self, int x, int out, const std::string& act, float threshold, const std::string& activations, std::optional<int> gate_buffer,
               std::shared_ptr<PackedMatrix> gate, std::shared_ptr<PackedMatrix> up, const std::optional<In<float, 1>>& gate_bias,
               const std::optional<In<float, 1>>& up_bias, std::shared_ptr<NeuronLists> lists) {
  if (activations != "int8" && activations != "f32") throw std::invalid_argument("activations are 'int8' or 'f32', not '" + activations + "'");
  if (x == out || gate_buffer == out) throw std::invalid_argument("neurons cannot write a buffer it reads");
  if (!self.linear_storage()) self.linear_storage() = std::make_shared<LinearStorage>();
  if (!self.neuron_storage()) self.neuron_storage() = std::make_shared<NeuronStorage>();
  NeuronParts parts;
  parts.x = x;
  parts.gate_buffer = gate_buffer.value_or(-1);
  parts.gate = std::move(gate);
  parts.up = std::move(up);
  parts.gate_bias = floats(gate_bias);
  parts.up_bias = floats(up_bias);
  parts.lists = std::move(lists);
  const bool gated = parts.up != nullptr;
  auto op = std::make_unique<NeuronsOp>(self.program().isa(), std::move(parts), out, Act{parse_activation(act), threshold, gated},
                                        activations == "int8" ? Activations::int8 : Activations::f32, self.linear_storage(), self.neuron_storage());
  self.expect_width(x, op->inputs(), "x");
  self.expect_width(out, op->neurons(), "out");
  if (!gate_buffer) return self.add(std::move(op), {x}, out);
  self.expect_width(*gate_buffer, op->neurons(), "gate_buffer");
  if (self.program().selected(x) != self.program().selected(*gate_buffer)) {
    throw std::invalid_argument("neurons: x and gate_buffer must hold the same rows");
  }
  return self.add(std::move(op), {x, *gate_buffer}, out);
}

int op_pick_neurons(CheckedProgram& self, int scores, float threshold, std::shared_ptr<NeuronLists> lists) {
  const int neurons = self.width(scores);
  auto op = make_pick_neurons(neuron_kernels(self.program().isa()), scores, neurons, threshold, std::move(lists));
  return self.add(std::move(op), {scores}, scores);
}

void check_lists(CheckedProgram& self, int op, int every, int turn) {
  if (op < 0 || op >= self.program().ops()) throw std::invalid_argument("op " + std::to_string(op) + " is none of the program's");
  auto* neurons = dynamic_cast<NeuronsOp*>(&self.program().op(op));
  if (!neurons) throw std::invalid_argument("op " + std::to_string(op) + " is no neurons op");
  if (every < 0 || turn < 0) throw std::invalid_argument("every and turn must be 0 or more");
  self.exclusive([&] { neurons->check_lists(static_cast<uint64_t>(every), static_cast<uint64_t>(turn)); });
}

}  // namespace

void bind_neurons(nb::module_& module, nb::class_<CheckedProgram>& program) {
  nb::class_<NeuronLists>(module, "NeuronLists", "Neurons that a neurons op is asked for, by row of the batch; empty: all of them.")
      .def(nb::init<>())
      .def("set", &set_lists, nb::arg("ids").noconvert(), nb::arg("offsets").noconvert(),
           "Row r asks for ids[offsets[r]:offsets[r + 1]], ascending. ValueError when they are not. Not while a step runs.")
      .def("clear", [](NeuronLists& self) { self = NeuronLists(); }, "Ask for all neurons again. Not while a step runs.")
      .def_prop_ro("given", [](const NeuronLists& self) { return self.given; }, "Whether neurons are listed.")
      .def_prop_ro("count", [](const NeuronLists& self) { return self.ids.size(); }, "Neurons listed, summed over rows.");
  program
      .def("op_neurons", &op_neurons, nb::arg("x"), nb::arg("out"), nb::arg("act"), nb::arg("threshold"), nb::arg("activations"), nb::arg("gate_buffer").none(),
           nb::arg("gate").none(), nb::arg("up").none(), nb::arg("gate_bias").none(), nb::arg("up_bias").none(), nb::arg("lists").none(),
           "out = act(gate x) * (up x) for the neurons listed whose act(gate x) is not 0, 0 elsewhere; without up act(gate x).\n\n"
           "act and threshold as in op_gated_act. The gate is a buffer computed before, or a matrix; matrices are in the neurons layout, or in rows, which are read whole. Returns the op's index.")
      .def("op_pick_neurons", &op_pick_neurons, nb::arg("scores"), nb::arg("threshold"), nb::arg("lists"),
           "List the neurons whose score is above the threshold (all of them in rows that are not sparse) for the ops after this "
           "one. Returns the op's index.")
      .def("check_lists", &check_lists, nb::arg("op"), nb::arg("every"), nb::arg("turn"),
           "In one run of `every` (0: none), those whose number is `turn` modulo it, compute all neurons of this neurons op, and count of "
           "those that fire in sparse rows how many were listed; the others are left out all the same.");
}

}  // namespace thinfer::python
