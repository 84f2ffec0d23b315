// Packed weights and Program.op_linear.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "linear.h"
#include "neurons.h"
#include "pack.h"

namespace thinfer::python {

namespace {

// A stored tensor's raw rows [rows, row_bytes], its type, and the order in which to take the rows.
using Part = std::tuple<In<uint8_t, 2>, std::string, std::optional<In<int32_t, 1>>>;

Layout parse_layout(const std::string& name) {
  if (name == "rows") return Layout::rows;
  if (name == "columns") return Layout::columns;
  if (name == "neurons") return Layout::neurons;
  throw std::invalid_argument("layout is 'rows', 'columns' or 'neurons', not '" + name + "'");
}
const char* layout_name(const PackedMatrix& matrix) {
  switch (matrix.matrix().layout) {
    case Layout::rows: return "rows";
    case Layout::columns: return "columns";
    case Layout::neurons: return "neurons";
  }
  return "";
}

StoredRows check_part(const Part& part, int inputs) {
  const auto& [raw, type_name, index] = part;
  StoredRows rows;
  rows.type = parse_stored_type(type_name);
  rows.data = raw.data();
  rows.row_bytes = stored_row_bytes(rows.type, inputs);
  const CodecTraits t = traits(codec_of(rows.type));
  if (!is_float(codec_of(rows.type)) && inputs % t.block != 0) {
    throw std::invalid_argument(type_name + " rows hold blocks of " + std::to_string(t.block) + ": " + std::to_string(inputs) + " inputs do not fit");
  }
  if (raw.shape(1) != rows.row_bytes) {
    throw std::invalid_argument(type_name + " rows of " + std::to_string(inputs) + " inputs have " + std::to_string(rows.row_bytes) + " bytes, not " +
                                std::to_string(raw.shape(1)));
  }
  const size_t count = index ? index->size() : raw.shape(0);
  if (count == 0 || count > INT_MAX / 2) throw std::invalid_argument("a matrix needs 1 to 2^30 rows");
  rows.rows = static_cast<int>(count);
  if (index) {
    rows.row_index = index->data();
    for (size_t i = 0; i < count; ++i) {
      const int32_t row = index->data()[i];
      if (row < 0 || static_cast<size_t>(row) >= raw.shape(0)) throw std::invalid_argument("row_index " + std::to_string(row) + " is outside the tensor");
    }
  }
  return rows;
}

std::shared_ptr<PackedMatrix> pack(const std::vector<Part>& parts, int inputs, const std::optional<std::string>& codec, const std::string& layout, int chunk,
                                   int segments, ThreadPool& pool, std::shared_ptr<Arena> arena) {
  const Layout where = parse_layout(layout);
  if (inputs < 1 || inputs > (1 << 24)) throw std::invalid_argument("inputs must be between 1 and 2^24");
  std::vector<StoredRows> rows;
  for (const Part& part : parts) rows.push_back(check_part(part, inputs));
  if (rows.empty()) throw std::invalid_argument("a packed matrix needs a part");
  const Codec target = codec ? parse_codec(*codec) : codec_of(rows.front().type);
  const nb::gil_scoped_release release;
  return std::make_shared<PackedMatrix>(rows, inputs, target, where, chunk, segments, pool, std::move(arena));
}

// Decodes rows from the caller's memory, which it keeps alive.
class SharedRows : public RowSource {
 public:
  SharedRows(Part part, int inputs) : part_(std::move(part)), source_(check_part(part_, inputs), inputs) {}
  int rows() const override { return source_.rows(); }
  int width() const override { return source_.width(); }
  void row(int index, float* out) const override { source_.row(index, out); }

 private:
  Part part_;
  StoredRowSource source_;
};

nb::object read_row(const RowSource& source, int index) {
  if (index < 0 || index >= source.rows()) throw std::out_of_range("row " + std::to_string(index) + " of " + std::to_string(source.rows()));
  auto* memory = new std::vector<float>(static_cast<size_t>(source.width()));
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  source.row(index, memory->data());
  const size_t shape[1] = {memory->size()};
  return nb::cast(FloatArray(memory->data(), 1, shape, owner));
}

int op_linear(CheckedProgram& self, int x, int out, const std::vector<std::shared_ptr<PackedMatrix>>& parts, const std::optional<In<float, 1>>& bias,
              const std::string& activations) {
  if (activations != "int8" && activations != "f32") throw std::invalid_argument("activations are 'int8' or 'f32', not '" + activations + "'");
  if (x == out) throw std::invalid_argument("linear cannot write the buffer it reads");
  std::vector<float> b;
  if (bias) b.assign(bias->data(), bias->data() + bias->size());
  if (!self.linear_storage()) self.linear_storage() = std::make_shared<LinearStorage>();
  std::vector<std::shared_ptr<const PackedMatrix>> matrices(parts.begin(), parts.end());
  auto op = std::make_unique<LinearOp>(self.program().isa(), x, out, std::move(matrices), std::move(b),
                                       activations == "int8" ? Activations::int8 : Activations::f32, self.linear_storage());
  self.expect_width(x, op->inputs(), "x");
  self.expect_width(out, op->outputs(), "out");
  return self.add(std::move(op), {x}, out);
}

void set_threshold(CheckedProgram& self, int op, float threshold, const std::optional<In<float, 1>>& channel_scale) {
  if (op < 0 || op >= self.program().ops()) throw std::invalid_argument("op " + std::to_string(op) + " is none of the program's");
  auto* linear = dynamic_cast<LinearOp*>(&self.program().op(op));
  auto* neurons = dynamic_cast<NeuronsOp*>(&self.program().op(op));
  if (!linear && !neurons) throw std::invalid_argument("op " + std::to_string(op) + " is neither linear nor neurons");
  Threshold t;
  t.value = threshold;
  if (channel_scale) t.channel_scale.assign(channel_scale->data(), channel_scale->data() + channel_scale->size());
  self.exclusive([&] { linear ? linear->set_threshold(std::move(t)) : neurons->set_threshold(std::move(t)); });
}

void set_beside(CheckedProgram& self, int first, int last, int until) {
  self.exclusive([&] {
    Program& program = self.program();
    program.set_beside(first, last, until);
    if (!self.beside_storage()) self.beside_storage() = std::make_shared<LinearStorage>();
    for (int index = first; index < last; ++index) {
      if (auto* linear = dynamic_cast<LinearOp*>(&program.op(index))) linear->use_storage(self.beside_storage());
    }
  });
}

}  // namespace

void bind_linear(nb::module_& module, nb::class_<CheckedProgram>& program) {
  nb::class_<Arena>(module, "Arena", "Memory on huge pages that packed matrices share; freed with the last of them.").def(nb::init<>());
  nb::class_<PackedMatrix, RowSource>(module, "PackedMatrix", "Weights packed for the kernels; also a source of rows.")
      .def_static("pack", &pack, nb::arg("parts"), nb::arg("inputs"), nb::arg("codec"), nb::arg("layout"), nb::arg("chunk"), nb::arg("segments"),
                  nb::arg("pool"), nb::arg("arena"),
                  "Packs stored tensors, stacked along the outputs. parts: (raw uint8 [rows, row_bytes], type, row order int32 or None); codec: None "
                  "keeps the type's, 'i8_d', 'u4_dm' or 'f16' re-quantise float types. Raises ValueError.")
      .def_prop_ro("codec", [](const PackedMatrix& m) { return codec_name(m.matrix().codec); }, "In-memory codec.")
      .def_prop_ro("layout", &layout_name, "'rows', 'columns' or 'neurons'.")
      .def_prop_ro("chunk", [](const PackedMatrix& m) { return m.matrix().chunk; }, "Outputs per channel slice (columns).")
      .def_prop_ro("segments", [](const PackedMatrix& m) { return m.matrix().segments; }, "Partial sums over the input.")
      .def("copy", [](const PackedMatrix& m) { return m.copy(); }, "The same weights at other addresses.")
      .def("evict", &PackedMatrix::evict, "Drop the weights from the processor's caches where it can.")
      .def_prop_ro("nbytes", &PackedMatrix::bytes, "Bytes of packed weights.");
  nb::class_<SharedRows, RowSource>(module, "StoredRows", "Rows decoded from a stored tensor on each read; nothing is copied.")
      .def(nb::init<Part, int>(), nb::arg("part"), nb::arg("inputs"));
  module.def("read_row", &read_row, nb::arg("source"), nb::arg("index"), "One row of a RowSource as float32 [width].");
  program
      .def("op_linear", &op_linear, nb::arg("x"), nb::arg("out"), nb::arg("parts"), nb::arg("bias"), nb::arg("activations"),
           "out = W x + bias over packed matrices stacked along the outputs; activations 'int8' or 'f32'. Returns the op's index.")
      .def("set_threshold", &set_threshold, nb::arg("op"), nb::arg("threshold"), nb::arg("channel_scale"),
           "Inputs with |x| * channel_scale <= threshold count as 0 in sparse rows of this linear or neurons op; below 0: none.")
      .def("set_beside", &set_beside, nb::arg("first"), nb::arg("last"), nb::arg("until"),
           "Run ops [first, last) beside those that follow, done when op `until` begins. Until then nothing may change what "
           "they read. ValueError when they are not in front of `until`, or run beside something already.");
}

}  // namespace thinfer::python
