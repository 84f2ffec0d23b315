#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <cstring>
#include <stdexcept>

#include "bindings.h"

namespace thinfer::python {

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  if (name == "fatrelu") return Activation::fatrelu;
  if (name == "drelu") return Activation::drelu;
  throw std::invalid_argument("activation '" + name +
                              "' is unknown: silu, gelu, gelu_tanh, relu, relu2, fatrelu or drelu");
}

namespace {

int as_int(size_t size) {
  if (size > INT_MAX / 16) throw std::invalid_argument("the array is too large");
  return static_cast<int>(size);
}

Heads check_heads(int heads, int kv_heads, int head_dim) {
  constexpr int limit = 1 << 16;
  if (heads < 1 || kv_heads < 1 || head_dim < 1 || heads > limit || kv_heads > heads || head_dim > 1024 ||
      heads % kv_heads != 0) {
    throw std::invalid_argument("heads must be a positive multiple of kv_heads and head_dim 1 to 1024, not " +
                                std::to_string(heads) + ", " + std::to_string(kv_heads) + ", " +
                                std::to_string(head_dim));
  }
  return {heads, kv_heads, head_dim};
}

std::vector<int> check_ids(std::vector<int> ids, int neurons, int width) {
  if (static_cast<int>(ids.size()) != neurons) {
    throw std::invalid_argument("ids has " + std::to_string(ids.size()) + " entries for " + std::to_string(neurons) +
                                " neurons");
  }
  int before = -1;
  for (const int id : ids) {
    if (id <= before || id >= width) {
      throw std::invalid_argument("ids must ascend inside [0, " + std::to_string(width) + "); " + std::to_string(id) +
                                  " comes after " + std::to_string(before));
    }
    before = id;
  }
  return ids;
}

std::vector<float> to_vector(const In<float, 1>& array, int size, const char* name) {
  if (array.size() != static_cast<size_t>(size)) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.size()) + " entries and needs " +
                                std::to_string(size));
  }
  return std::vector<float>(array.data(), array.data() + array.size());
}

int op_embed(CheckedProgram& self, std::shared_ptr<RowSource> source, int out) {
  return self.add_embed(std::move(source), out);
}

int op_rms_norm(CheckedProgram& self, int x, int out, const In<float, 1>& weight, float eps) {
  self.expect_width(out, self.width(x), "out");
  return self.add(make_rms_norm(self.kernels(), x, out, to_vector(weight, self.width(x), "weight"), eps), {x}, out);
}

int op_layer_norm(CheckedProgram& self, int x, int out, const In<float, 1>& weight, const In<float, 1>& bias,
                  float eps) {
  const int width = self.width(x);
  self.expect_width(out, width, "out");
  return self.add(
      make_layer_norm(self.kernels(), x, out, to_vector(weight, width, "weight"), to_vector(bias, width, "bias"), eps),
      {x}, out);
}

int op_positions(CheckedProgram& self, std::shared_ptr<RowSource> source, int x, int out, int offset) {
  return self.add_positions(std::move(source), x, out, offset);
}

int op_head_norm(CheckedProgram& self, int x, int out, const In<float, 1>& q_norm, const In<float, 1>& k_norm,
                 float eps, int heads, int kv_heads, int head_dim) {
  const Heads h = check_heads(heads, kv_heads, head_dim);
  self.expect_width(x, h.width(), "x");
  self.expect_width(out, h.width(), "out");
  return self.add(make_head_norm(self.kernels(), x, out, h, to_vector(q_norm, head_dim, "q_norm"),
                                 to_vector(k_norm, head_dim, "k_norm"), eps),
                  {x}, out);
}

int op_rope(CheckedProgram& self, int x, int out, std::vector<float> inv_freq, float attention_factor, int heads,
            int kv_heads, int head_dim) {
  const Heads h = check_heads(heads, kv_heads, head_dim);
  self.expect_width(x, h.width(), "x");
  self.expect_width(out, h.width(), "out");
  if (inv_freq.empty() || inv_freq.size() > static_cast<size_t>(head_dim / 2)) {
    throw std::invalid_argument("inv_freq must have 1 to head_dim / 2 entries");
  }
  if (self.program().selected(x)) throw std::invalid_argument("rope cannot follow select: it rotates by batch row");
  auto table = self.rope_table(std::move(inv_freq), attention_factor);
  return self.add(make_rope(self.kernels(), x, out, h, std::move(table)), {x}, out);
}

int op_attention(CheckedProgram& self, int x, int out, int layer, int heads, int kv_heads, int head_dim, float scale,
                 std::optional<int> window, std::optional<std::vector<float>> slopes,
                 std::shared_ptr<NeuronLists> lists) {
  if (window && *window < 1) throw std::invalid_argument("window must be at least 1, or None for all positions");
  return self.add_attention(x, out, check_heads(heads, kv_heads, head_dim), layer, scale, window.value_or(0),
                            slopes ? std::move(*slopes) : std::vector<float>(), std::move(lists));
}

int add_act(CheckedProgram& self, int x, int out, int neurons, Act act, std::optional<std::vector<int>> ids) {
  if (x == out) throw std::invalid_argument("an activation cannot write the buffer it reads");
  const int width = self.width(out);
  if (!ids) self.expect_width(out, neurons, "out");
  auto own = ids ? check_ids(std::move(*ids), neurons, width) : std::vector<int>();
  return self.add(make_act(self.kernels(), x, out, neurons, act, std::move(own), width), {x}, out);
}

int op_gated_act(CheckedProgram& self, int x, int out, const std::string& act, std::optional<std::vector<int>> ids,
                 float threshold) {
  const int both = self.width(x);
  if (both % 2 != 0) throw std::invalid_argument("x: gate | up must have an even width");
  return add_act(self, x, out, both / 2, {parse_activation(act), threshold, true}, std::move(ids));
}

int op_act(CheckedProgram& self, int x, int out, const std::string& act, std::optional<std::vector<int>> ids,
           float threshold) {
  const Activation activation = parse_activation(act);
  if (activation == Activation::drelu) throw std::invalid_argument("drelu needs a gate and what it gates");
  return add_act(self, x, out, self.width(x), {activation, threshold, false}, std::move(ids));
}

int op_add(CheckedProgram& self, int a, int b, int out) {
  const int width = self.width(a);
  self.expect_width(b, width, "b");
  self.expect_width(out, width, "out");
  if (self.program().selected(a) != self.program().selected(b)) {
    throw std::invalid_argument("add: one input holds selected rows and the other all of them");
  }
  return self.add(make_add(self.kernels(), a, b, out, width), {a, b}, out);
}

int op_select(CheckedProgram& self, int x, int out) {
  self.expect_width(out, self.width(x), "out");
  if (x == out) throw std::invalid_argument("select cannot write the buffer it reads");
  if (self.program().selected(x)) throw std::invalid_argument("select: the rows of x are selected already");
  return self.add(make_select(x, out, self.width(x)), {x}, out);
}

// ---- The ops as functions: a program of one op, one thread, for tests against the NumPy references.

struct Single {
  CheckedProgram program;
  int rows;

  Single(const std::string& isa, int row_count, std::shared_ptr<SharedCache> cache = nullptr)
      : program(isa, std::make_shared<ThreadPool>(1), row_count > 0 ? row_count : 1, std::move(cache)),
        rows(row_count) {}

  int input(const In<float, 2>& x) {
    const int id = program.add_buffer(as_int(x.shape(1)));
    for (size_t row = 0; row < x.shape(0); ++row) {
      float* to = program.program().buffer(id) + row * static_cast<size_t>(padded(as_int(x.shape(1))));
      std::memcpy(to, x.data() + row * x.shape(1), x.shape(1) * sizeof(float));
    }
    return id;
  }

  // Rows of token, position and sequence 0, but for what the caller puts in before run().
  OwnedBatch batch() const {
    const std::vector<int32_t> zeros(static_cast<size_t>(rows), 0);
    return {.tokens = zeros,
            .positions = zeros,
            .sequence = zeros,
            .sparse = std::vector<uint8_t>(zeros.size(), 0),
            .out_rows = {},
            .block_table = {0},
            .sequences = 1,
            .max_blocks = 1};
  }
  void run(const OwnedBatch& batch) {
    if (rows > 0) program.run(0, program.program().ops(), batch);
  }

  FloatArray output(int id, size_t row_count) {
    const size_t shape[2] = {row_count, static_cast<size_t>(program.width(id))};
    auto* memory = new std::vector<float>(shape[0] * shape[1]);
    const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    for (size_t row = 0; row < shape[0]; ++row) {
      const float* from = program.program().buffer(id) + row * static_cast<size_t>(padded(program.width(id)));
      std::memcpy(memory->data() + row * shape[1], from, shape[1] * sizeof(float));
    }
    return FloatArray(memory->data(), 2, shape, owner);
  }
  FloatArray output(int id) { return output(id, static_cast<size_t>(rows)); }
};

FloatArray embed(const std::string& isa, const In<float, 2>& table, const In<int32_t, 1>& tokens) {
  Single single(isa, as_int(tokens.size()));
  std::vector<float> values(table.data(), table.data() + table.size());
  const int out = single.program.add_buffer(as_int(table.shape(1)));
  single.program.add_embed(
      std::make_shared<Float32Rows>(std::move(values), as_int(table.shape(0)), as_int(table.shape(1))), out);
  OwnedBatch batch = single.batch();
  batch.tokens = copied<int32_t, 1>(tokens);
  single.run(batch);
  return single.output(out);
}

FloatArray rms_norm(const std::string& isa, const In<float, 2>& x, const In<float, 1>& weight, float eps) {
  Single single(isa, as_int(x.shape(0)));
  const int in = single.input(x);
  op_rms_norm(single.program, in, in, weight, eps);
  single.run(single.batch());
  return single.output(in);
}

FloatArray layer_norm(const std::string& isa, const In<float, 2>& x, const In<float, 1>& weight,
                      const In<float, 1>& bias, float eps) {
  Single single(isa, as_int(x.shape(0)));
  const int in = single.input(x);
  op_layer_norm(single.program, in, in, weight, bias, eps);
  single.run(single.batch());
  return single.output(in);
}

FloatArray add_positions(const std::string& isa, const In<float, 2>& x, const In<float, 2>& table,
                         const In<int32_t, 1>& positions, int offset) {
  Single single(isa, as_int(x.shape(0)));
  const int in = single.input(x);
  std::vector<float> values(table.data(), table.data() + table.size());
  auto source = std::make_shared<Float32Rows>(std::move(values), as_int(table.shape(0)), as_int(table.shape(1)));
  op_positions(single.program, std::move(source), in, in, offset);
  OwnedBatch batch = single.batch();
  batch.positions = copied<int32_t, 1>(positions);
  single.run(batch);
  return single.output(in);
}

FloatArray head_norm(const std::string& isa, const In<float, 2>& qkv, const In<float, 1>& q_norm,
                     const In<float, 1>& k_norm, float eps, int heads, int kv_heads, int head_dim) {
  Single single(isa, as_int(qkv.shape(0)));
  const int in = single.input(qkv);
  const int out = single.program.add_buffer(single.program.width(in));
  op_head_norm(single.program, in, out, q_norm, k_norm, eps, heads, kv_heads, head_dim);
  single.run(single.batch());
  return single.output(out);
}

FloatArray rope(const std::string& isa, const In<float, 2>& qkv, const In<int32_t, 1>& positions,
                std::vector<float> inv_freq, float attention_factor, int heads, int kv_heads, int head_dim) {
  Single single(isa, as_int(qkv.shape(0)));
  const int in = single.input(qkv);
  const int out = single.program.add_buffer(single.program.width(in));
  op_rope(single.program, in, out, std::move(inv_freq), attention_factor, heads, kv_heads, head_dim);
  OwnedBatch batch = single.batch();
  batch.positions = copied<int32_t, 1>(positions);
  single.run(batch);
  return single.output(out);
}

FloatArray attention(const std::string& isa, const In<float, 2>& qkv,
                     nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu> keys,
                     nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu> values,
                     const In<int32_t, 2>& block_table, const In<int32_t, 1>& positions, const In<int32_t, 1>& sequence,
                     int heads, int kv_heads, int head_dim, float scale, std::optional<int> window,
                     std::optional<std::vector<float>> slopes, const std::string& kv_type) {
  if (kv_heads < 1 || head_dim < 1) throw std::invalid_argument("kv_heads and head_dim must be at least 1");
  const size_t block = static_cast<size_t>(kBlock) * static_cast<size_t>(kv_heads) * static_cast<size_t>(head_dim);
  for (const auto* planes : {&keys, &values}) {
    if (planes->shape(0) != keys.shape(0) || planes->shape(1) != kBlock ||
        planes->shape(2) != static_cast<size_t>(kv_heads) || planes->shape(3) != static_cast<size_t>(head_dim)) {
      throw std::invalid_argument("keys and values must be [blocks, 64, kv_heads, head_dim]");
    }
  }
  auto cache = std::make_shared<SharedCache>(1, kv_heads, head_dim, parse_kv_type(kv_type));
  const int blocks = as_int(keys.shape(0));
  cache->cache.ensure_blocks(blocks);
  for (int i = 0; i < blocks; ++i) {
    const size_t at = static_cast<size_t>(i) * block;
    write_block(*cache, 0, i, keys.data() + at, values.data() + at);
  }
  Single single(isa, as_int(qkv.shape(0)), cache);
  const int in = single.input(qkv);
  const int out = single.program.add_buffer(
      as_int(static_cast<size_t>(check_heads(heads, kv_heads, head_dim).heads) * static_cast<size_t>(head_dim)));
  op_attention(single.program, in, out, 0, heads, kv_heads, head_dim, scale, window, std::move(slopes), nullptr);
  OwnedBatch batch = single.batch();
  batch.positions = copied<int32_t, 1>(positions);
  batch.sequence = copied<int32_t, 1>(sequence);
  batch.block_table = copied<int32_t, 2>(block_table);
  batch.sequences = as_int(block_table.shape(0));
  batch.max_blocks = as_int(block_table.shape(1));
  single.run(batch);
  for (int i = 0; i < blocks; ++i) {
    const size_t at = static_cast<size_t>(i) * block;
    read_block(*cache, 0, i, keys.data() + at, values.data() + at);
  }
  return single.output(out);
}

FloatArray gated_act(const std::string& isa, const In<float, 2>& gate_up, const std::string& act,
                     std::optional<std::vector<int>> ids, std::optional<int> width, float threshold) {
  Single single(isa, as_int(gate_up.shape(0)));
  const int in = single.input(gate_up);
  const int out = single.program.add_buffer(width.value_or(single.program.width(in) / 2));
  op_gated_act(single.program, in, out, act, std::move(ids), threshold);
  single.run(single.batch());
  return single.output(out);
}

FloatArray act(const std::string& isa, const In<float, 2>& x, const std::string& act,
               std::optional<std::vector<int>> ids, std::optional<int> width, float threshold) {
  Single single(isa, as_int(x.shape(0)));
  const int in = single.input(x);
  const int out = single.program.add_buffer(width.value_or(single.program.width(in)));
  op_act(single.program, in, out, act, std::move(ids), threshold);
  single.run(single.batch());
  return single.output(out);
}

FloatArray add(const std::string& isa, const In<float, 2>& a, const In<float, 2>& b) {
  if (a.shape(0) != b.shape(0)) throw std::invalid_argument("a and b must have the same number of rows");
  Single single(isa, as_int(a.shape(0)));
  const int left = single.input(a);
  const int right = single.input(b);
  op_add(single.program, left, right, left);
  single.run(single.batch());
  return single.output(left);
}

FloatArray select(const std::string& isa, const In<float, 2>& x, const In<int32_t, 1>& rows) {
  Single single(isa, as_int(x.shape(0)));
  const int in = single.input(x);
  const int out = single.program.add_buffer(single.program.width(in));
  op_select(single.program, in, out);
  OwnedBatch batch = single.batch();
  batch.out_rows = copied<int32_t, 1>(rows);
  single.run(batch);
  return single.output(out, rows.size());
}

}  // namespace

void bind_program_ops(nb::class_<CheckedProgram>& program) {
  program
      .def("op_embed", op_embed, nb::arg("source"), nb::arg("out"),
           "out[r] = source row tokens[r]. Returns the op's index.")
      .def("op_rms_norm", op_rms_norm, nb::arg("x"), nb::arg("out"), nb::arg("weight").noconvert(), nb::arg("eps"),
           "out = x / rms(x) * weight [width]; out may be x.")
      .def("op_layer_norm", op_layer_norm, nb::arg("x"), nb::arg("out"), nb::arg("weight").noconvert(),
           nb::arg("bias").noconvert(), nb::arg("eps"),
           "out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias [width]; out may be x.")
      .def("op_positions", op_positions, nb::arg("source"), nb::arg("x"), nb::arg("out"), nb::arg("offset"),
           "out[r] = x[r] + source row positions[r] + offset; out may be x.")
      .def("op_head_norm", op_head_norm, nb::arg("x"), nb::arg("out"), nb::arg("q_norm").noconvert(),
           nb::arg("k_norm").noconvert(), nb::arg("eps"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           "rms_norm of every query head by q_norm and key head by k_norm [head_dim] of q|k|v; out may be x.")
      .def("op_rope", op_rope, nb::arg("x"), nb::arg("out"), nb::arg("inv_freq"), nb::arg("attention_factor"),
           nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           "Rotate the query and key heads of q|k|v by position times inv_freq; out may be x.\n\n"
           "inv_freq has up to head_dim / 2 entries: twice as many channels of a head turn, the rest pass.")
      .def("op_attention", op_attention, nb::arg("x"), nb::arg("out"), nb::arg("layer"), nb::arg("heads"),
           nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("scale"), nb::arg("window").none() = nb::none(),
           nb::arg("slopes").none() = nb::none(), nb::arg("lists").none() = nb::none(),
           "Write the rows' keys and values of q|k|v to the cache, then causal attention: out is heads * head_dim wide."
           "\n\nslopes: per head, times the distance to a key, is what its score loses (ALiBi). lists: heads that a row "
           "computes; the others are 0.")
      .def("op_gated_act", op_gated_act, nb::arg("x"), nb::arg("out"), nb::arg("act"),
           nb::arg("ids").none() = nb::none(), nb::arg("threshold") = 0.0f,
           "out = act(gate) * up for x = gate|up; with ids (ascending) neuron j goes to column ids[j], the rest is "
           "0.\n\n"
           "act: silu, gelu, gelu_tanh, relu, relu2, fatrelu (0 up to the threshold) or drelu (relu of both).")
      .def("op_act", op_act, nb::arg("x"), nb::arg("out"), nb::arg("act"), nb::arg("ids").none() = nb::none(),
           nb::arg("threshold") = 0.0f, "out = act(x); act, ids and threshold as in op_gated_act, but for drelu.")
      .def("op_add", op_add, nb::arg("a"), nb::arg("b"), nb::arg("out"), "out = a + b; out may be either.")
      .def("op_select", op_select, nb::arg("x"), nb::arg("out"),
           "out[i] = x[out_rows[i]]; later ops work on those rows.");
}

void bind_ops(nb::module_& module) {
  module.def("embed", embed, nb::arg("isa"), nb::arg("table").noconvert(), nb::arg("tokens").noconvert(),
             "The op embed of kernels/embed.py on the named instruction set.");
  module.def("rms_norm", rms_norm, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
             nb::arg("eps"), "The op rms_norm of kernels/rms_norm.py on the named instruction set.");
  module.def("layer_norm", layer_norm, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
             nb::arg("bias").noconvert(), nb::arg("eps"),
             "The op layer_norm of kernels/layer_norm.py on the named instruction set.");
  module.def("positions", add_positions, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("table").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("offset"),
             "The op positions of kernels/positions.py on the named instruction set.");
  module.def("head_norm", head_norm, nb::arg("isa"), nb::arg("qkv").noconvert(), nb::arg("q_norm").noconvert(),
             nb::arg("k_norm").noconvert(), nb::arg("eps"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
             "The op head_norm of kernels/head_norm.py on the named instruction set.");
  module.def("rope", rope, nb::arg("isa"), nb::arg("qkv").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("inv_freq"), nb::arg("attention_factor"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), "The op rope of kernels/rope.py on the named instruction set.");
  module.def("attention", attention, nb::arg("isa"), nb::arg("qkv").noconvert(), nb::arg("keys").noconvert(),
             nb::arg("values").noconvert(), nb::arg("block_table").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("sequence").noconvert(), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
             nb::arg("scale"), nb::arg("window").none() = nb::none(), nb::arg("slopes").none() = nb::none(),
             nb::arg("kv_type") = "f32",
             "The op attention of kernels/attention.py on the named instruction set.\n\n"
             "keys and values [blocks, BLOCK_SIZE, kv_heads, head_dim] go through a cache of kv_type and are updated.");
  module.def("gated_act", gated_act, nb::arg("isa"), nb::arg("gate_up").noconvert(), nb::arg("act"),
             nb::arg("ids").none() = nb::none(), nb::arg("width").none() = nb::none(), nb::arg("threshold") = 0.0f,
             "The op gated_act of kernels/gated_act.py on the named instruction set.");
  module.def("act", act, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("act"), nb::arg("ids").none() = nb::none(),
             nb::arg("width").none() = nb::none(), nb::arg("threshold") = 0.0f,
             "The op act of kernels/act.py on the named instruction set.");
  module.def("add", add, nb::arg("isa"), nb::arg("a").noconvert(), nb::arg("b").noconvert(),
             "The op add of kernels/add.py on the named instruction set.");
  module.def("select", select, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("rows").noconvert(),
             "The op select of kernels/select.py on the named instruction set.");
}

}  // namespace thinfer::python
