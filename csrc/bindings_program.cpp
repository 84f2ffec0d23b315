#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "half.h"

namespace thinfer::python {

namespace {

std::string text(int value) { return std::to_string(value); }

int as_int(size_t size) {
  if (size > INT_MAX) throw std::invalid_argument("the array is too large");
  return static_cast<int>(size);
}

}  // namespace

CheckedProgram::CheckedProgram(const std::optional<std::string>& isa, std::shared_ptr<ThreadPool> pool, int max_rows,
                               std::shared_ptr<SharedCache> cache)
    : cache_(std::move(cache)),
      program_(isa ? parse_isa(*isa) : default_isa(), std::move(pool), max_rows),
      kernels_(op_kernels(program_.isa())) {
  if (cache_) program_.set_kv(std::shared_ptr<KvCache>(cache_, &cache_->cache));
}

int CheckedProgram::add_buffer(int width) {
  const std::lock_guard lock(mutex_);
  return program_.add_buffer(width);
}

void CheckedProgram::set_selected(int buffer, bool selected) {
  width(buffer);
  const std::lock_guard lock(mutex_);
  program_.set_selected(buffer, selected);
}

void CheckedProgram::set_profiling(bool on) {
  const std::lock_guard lock(mutex_);
  program_.set_profiling(on);
}

std::vector<Counters> CheckedProgram::take_counters() {
  const std::lock_guard lock(mutex_);
  return program_.take_counters();
}

int CheckedProgram::width(int buffer) const {
  if (buffer < 0 || buffer >= program_.buffers()) {
    throw std::invalid_argument("buffer " + text(buffer) + " is none of the program's " + text(program_.buffers()));
  }
  return program_.width(buffer);
}

void CheckedProgram::expect_width(int buffer, int wanted, const char* role) const {
  if (width(buffer) != wanted) {
    throw std::invalid_argument(std::string(role) + ": buffer " + text(buffer) + " is " + text(width(buffer)) +
                                " wide and must be " + text(wanted));
  }
}

int CheckedProgram::add(std::unique_ptr<Op> op, const std::vector<int>& inputs, int output) {
  const std::lock_guard lock(mutex_);
  return program_.add(std::move(op), inputs, output);
}

void CheckedProgram::set_sparse_only(int op) {
  if (op < 0 || op >= program_.ops()) throw std::invalid_argument("op " + text(op) + " is none of the program's");
  exclusive([&] { program_.set_sparse_only(op); });
}

int CheckedProgram::add_embed(std::shared_ptr<const RowSource> source, int out) {
  expect_width(out, source->width(), "out");
  vocab_ = vocab_ > 0 ? std::min(vocab_, source->rows()) : source->rows();
  return add(make_embed(std::move(source), out), {}, out);
}

int CheckedProgram::add_positions(std::shared_ptr<const RowSource> source, int x, int out, int offset) {
  expect_width(x, source->width(), "x");
  expect_width(out, source->width(), "out");
  if (offset < 0 || offset >= source->rows()) throw std::invalid_argument("offset must lie inside the table");
  if (program_.selected(x)) throw std::invalid_argument("positions cannot follow select: it reads batch rows");
  const int count = source->rows() - offset;
  positions_ = positions_ > 0 ? std::min(positions_, count) : count;
  return add(make_positions(kernels_, std::move(source), x, out, offset), {x}, out);
}

int CheckedProgram::add_attention(int x, int out, Heads heads, int layer, float scale, int window,
                                  std::vector<float> slopes, std::shared_ptr<NeuronLists> lists) {
  if (!cache_) throw std::invalid_argument("attention needs a KV cache: give the Program one");
  const KvCache& cache = cache_->cache;
  if (cache.kv_heads() != heads.kv_heads || cache.head_dim() != heads.head_dim) {
    throw std::invalid_argument("the KV cache has " + text(cache.kv_heads()) + " kv heads of " +
                                text(cache.head_dim()) + ", attention " + text(heads.kv_heads) + " of " +
                                text(heads.head_dim));
  }
  if (layer < 0 || layer >= cache.layers()) {
    throw std::invalid_argument("layer " + text(layer) + " is none of the KV cache's " + text(cache.layers()));
  }
  expect_width(x, heads.width(), "x");
  expect_width(out, heads.heads * heads.head_dim, "out");
  if (x == out) throw std::invalid_argument("attention cannot write the buffer it reads");
  if (!slopes.empty() && slopes.size() != static_cast<size_t>(heads.heads)) {
    throw std::invalid_argument("slopes must have one entry a head, or be None");
  }
  if (program_.selected(x)) throw std::invalid_argument("attention cannot follow select: it needs every row");
  attends_ = true;
  window_ = window_ < 0 ? window : window == 0 ? 0 : window_ == 0 ? 0 : std::max(window_, window);
  return add(make_attention(kernels_, x, out, heads, layer, scale, window, std::move(slopes), std::move(lists)), {x},
             out);
}

std::shared_ptr<RopeTable> CheckedProgram::rope_table(std::vector<float> inv_freq, float attention_factor) {
  for (const auto& table : ropes_) {
    if (table->equals(inv_freq, attention_factor)) return table;
  }
  ropes_.push_back(std::make_shared<RopeTable>(std::move(inv_freq), attention_factor));
  return ropes_.back();
}

void CheckedProgram::run(int first, int last, const OwnedBatch& owned) {
  if (first < 0 || last < first || last > program_.ops()) {
    throw std::invalid_argument("ops [" + text(first) + ", " + text(last) + ") are not among the program's " +
                                text(program_.ops()));
  }
  const Batch batch = owned.view();
  const nb::gil_scoped_release release;
  const std::lock_guard lock(mutex_);
  std::unique_lock<std::mutex> cache_lock;
  if (cache_) cache_lock = std::unique_lock(cache_->mutex);
  BatchLimits limits;
  limits.max_rows = program_.max_rows();
  limits.vocab = vocab_;
  limits.positions = positions_;
  limits.attends = attends_;
  limits.cache_blocks = cache_ ? cache_->cache.blocks() : 0;
  limits.window = std::max(window_, 0);
  check_batch(batch, limits);
  program_.run(first, last, batch);
}

namespace {

struct OpCounters {
  std::string name;
  Counters counters;
};

void run(CheckedProgram& self, int first, int last, const In<int32_t, 1>& tokens, const In<int32_t, 1>& positions,
         const In<int32_t, 1>& sequence, const In<uint8_t, 1>& sparse, const In<int32_t, 1>& out_rows,
         const In<int32_t, 2>& block_table) {
  OwnedBatch batch;
  batch.tokens = copied<int32_t, 1>(tokens);
  batch.positions = copied<int32_t, 1>(positions);
  batch.sequence = copied<int32_t, 1>(sequence);
  batch.sparse = copied<uint8_t, 1>(sparse);
  batch.out_rows = copied<int32_t, 1>(out_rows);
  batch.block_table = copied<int32_t, 2>(block_table);
  batch.sequences = as_int(block_table.shape(0));
  batch.max_blocks = as_int(block_table.shape(1));
  self.run(first, last, batch);
}

nb::ndarray<nb::numpy, float> buffer_view(CheckedProgram& self, int id) {
  const auto width = static_cast<size_t>(self.width(id));
  const size_t shape[2] = {static_cast<size_t>(self.program().max_rows()), width};
  const int64_t strides[2] = {padded(static_cast<int>(width)), 1};
  return nb::ndarray<nb::numpy, float>(self.program().buffer(id), 2, shape, nb::find(self), strides);
}

std::vector<OpCounters> take_counters(CheckedProgram& self) {
  const std::vector<Counters> counters = self.take_counters();
  std::vector<OpCounters> result;
  for (int i = 0; i < static_cast<int>(counters.size()); ++i) {
    result.push_back({self.program().op(i).name(), counters[static_cast<size_t>(i)]});
  }
  return result;
}

void check_block(const SharedCache& shared, int layer, int block) {
  if (block < 0 || block >= shared.cache.blocks()) {
    throw std::invalid_argument("block " + text(block) + " is none of the cache's " + text(shared.cache.blocks()));
  }
  if (layer < 0 || layer >= shared.cache.layers()) {
    throw std::invalid_argument("layer " + text(layer) + " is none of the cache's " + text(shared.cache.layers()));
  }
}

// Walks keys and values of one layer of a block as [position][kv_head][head_dim].
template <typename Visit>
void visit_block(SharedCache& shared, int layer, int block, Visit&& visit) {
  const KvCache& cache = shared.cache;
  const size_t element = cache.half() ? 2 : 4;
  const auto width = static_cast<size_t>(padded(cache.head_dim()));
  size_t index = 0;
  for (size_t position = 0; position < static_cast<size_t>(kBlock); ++position) {
    for (int head = 0; head < cache.kv_heads(); ++head) {
      uint8_t* keys = cache.block(block) + cache.key_offset(layer, head);
      uint8_t* values = cache.block(block) + cache.value_offset(layer, head);
      for (size_t i = 0; i < static_cast<size_t>(cache.head_dim()); ++i, ++index) {
        visit(index, keys + (i * kBlock + position) * element, values + (position * width + i) * element);
      }
    }
  }
}

float load_element(const uint8_t* from, bool half) {
  float value = 0;
  if (half) {
    uint16_t bits = 0;
    std::memcpy(&bits, from, 2);
    value = half_to_float(bits);
  } else {
    std::memcpy(&value, from, 4);
  }
  return value;
}

void store_element(uint8_t* to, float value, bool half) {
  if (half) {
    const uint16_t bits = float_to_half(value);
    std::memcpy(to, &bits, 2);
  } else {
    std::memcpy(to, &value, 4);
  }
}

FloatArray make_planes(const KvCache& cache, float*& data) {
  const size_t shape[3] = {kBlock, static_cast<size_t>(cache.kv_heads()), static_cast<size_t>(cache.head_dim())};
  auto* memory = new std::vector<float>(shape[0] * shape[1] * shape[2]);
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  data = memory->data();
  return FloatArray(data, 3, shape, owner);
}

std::pair<FloatArray, FloatArray> read(SharedCache& self, int layer, int block) {
  float* keys = nullptr;
  float* values = nullptr;
  FloatArray k = make_planes(self.cache, keys);
  FloatArray v = make_planes(self.cache, values);
  read_block(self, layer, block, keys, values);
  return {std::move(k), std::move(v)};
}

void write(SharedCache& self, int layer, int block, const In<float, 3>& keys, const In<float, 3>& values) {
  for (const auto* array : {&keys, &values}) {
    if (array->shape(0) != static_cast<size_t>(kBlock) ||
        array->shape(1) != static_cast<size_t>(self.cache.kv_heads()) ||
        array->shape(2) != static_cast<size_t>(self.cache.head_dim())) {
      throw std::invalid_argument("keys and values must be [64, kv_heads, head_dim]");
    }
  }
  write_block(self, layer, block, keys.data(), values.data());
}

void bind_cache(nb::module_& module) {
  nb::class_<SharedCache>(module, "KvCache",
                          "Keys and values of all layers, in blocks of BLOCK_SIZE positions, as \"f16\" or \"f32\".\n\n"
                          "Memory becomes resident as it is written. Example: KvCache(30, 3, 64, \"f16\").")
      .def(
          "__init__",
          [](SharedCache* self, int layers, int kv_heads, int head_dim, const std::string& type) {
            new (self) SharedCache(layers, kv_heads, head_dim, parse_kv_type(type));
          },
          nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("type") = "f16")
      .def_prop_ro(
          "blocks",
          [](SharedCache& self) {
            const std::lock_guard lock(self.mutex);
            return self.cache.blocks();
          },
          "Blocks allocated so far.")
      .def_prop_ro(
          "block_bytes", [](const SharedCache& self) { return self.cache.block_bytes(); },
          "Bytes of one block over all layers.")
      .def_prop_ro(
          "type", [](const SharedCache& self) { return self.cache.half() ? "f16" : "f32"; }, "\"f16\" or \"f32\".")
      .def(
          "ensure_blocks",
          [](SharedCache& self, int count) {
            const std::lock_guard lock(self.mutex);
            self.cache.ensure_blocks(count);
          },
          nb::arg("count"), "Grow to at least `count` blocks; raises MemoryError.")
      .def(
          "copy_block",
          [](SharedCache& self, int source, int target) {
            const std::lock_guard lock(self.mutex);
            check_block(self, 0, source);
            check_block(self, 0, target);
            self.cache.copy_block(source, target);
          },
          nb::arg("source"), nb::arg("target"), "Copy a block over all layers; ValueError when there is no such block.")
      .def("read", read, nb::arg("layer"), nb::arg("block"),
           "Keys and values of one layer of a block, float32 [BLOCK_SIZE, kv_heads, head_dim] each.")
      .def("write", write, nb::arg("layer"), nb::arg("block"), nb::arg("keys").noconvert(),
           nb::arg("values").noconvert(),
           "Set keys and values of one layer of a block, float32 [BLOCK_SIZE, kv_heads, head_dim] each.");
}

void bind_pool(nb::module_& module) {
  nb::class_<ThreadPool>(module, "ThreadPool",
                         "Worker threads that sleep between steps; the calling thread is one of them.\n\n"
                         "Example: ThreadPool(2). ValueError unless 1 to 1024.")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_rw(
          "threads", &ThreadPool::threads,
          [](ThreadPool& self, int threads) {
            const nb::gil_scoped_release release;
            self.resize(threads);
          },
          "Number of threads, the caller's included.");
}

void bind_counters(nb::module_& module) {
  nb::class_<OpCounters>(module, "OpCounters", "What one op did since the counters were last taken.")
      .def_ro("name", &OpCounters::name, "Name of the op.")
      .def_prop_ro(
          "calls", [](const OpCounters& c) { return c.counters.calls; }, "Times it ran.")
      .def_prop_ro(
          "nanoseconds", [](const OpCounters& c) { return c.counters.nanoseconds; }, "Wall time, while profiling.")
      .def_prop_ro(
          "bytes_read", [](const OpCounters& c) { return c.counters.bytes_read; },
          "Bytes of weights, or of cached keys and values.")
      .def_prop_ro(
          "channels_active", [](const OpCounters& c) { return c.counters.channels_active; },
          "Input channels used, summed over rows.")
      .def_prop_ro(
          "channels_total", [](const OpCounters& c) { return c.counters.channels_total; },
          "Input channels there were, summed over rows.")
      .def_prop_ro(
          "needed", [](const OpCounters& c) { return c.counters.needed; },
          "Neurons that fired in the rows where lists were checked.")
      .def_prop_ro(
          "found", [](const OpCounters& c) { return c.counters.found; }, "Of them those that were listed.");
}

}  // namespace

void read_block(SharedCache& shared, int layer, int block, float* keys, float* values) {
  const std::lock_guard lock(shared.mutex);
  check_block(shared, layer, block);
  visit_block(shared, layer, block, [&](size_t i, const uint8_t* key, const uint8_t* value) {
    keys[i] = load_element(key, shared.cache.half());
    values[i] = load_element(value, shared.cache.half());
  });
}

void write_block(SharedCache& shared, int layer, int block, const float* keys, const float* values) {
  const std::lock_guard lock(shared.mutex);
  check_block(shared, layer, block);
  visit_block(shared, layer, block, [&](size_t i, uint8_t* key, uint8_t* value) {
    store_element(key, keys[i], shared.cache.half());
    store_element(value, values[i], shared.cache.half());
  });
}

bool parse_kv_type(const std::string& type) {
  if (type != "f16" && type != "f32") throw std::invalid_argument("KV type '" + type + "' is unknown: f16 or f32");
  return type == "f16";
}

void bind_program(nb::module_& module) {
  bind_pool(module);
  bind_cache(module);
  bind_counters(module);
  nb::class_<RowSource>(module, "RowSource", "Rows of a matrix as float32: what op_embed reads.")
      .def_prop_ro("rows", &RowSource::rows, "Number of rows.")
      .def_prop_ro("width", &RowSource::width, "Floats in a row.");
  nb::class_<Float32Rows, RowSource>(module, "Float32Rows", "A copy of a float32 matrix [rows, width].")
      .def(
          "__init__",
          [](Float32Rows* self, const In<float, 2>& values) {
            new (self) Float32Rows(copied<float, 2>(values), as_int(values.shape(0)), as_int(values.shape(1)));
          },
          nb::arg("values").noconvert());

  auto program = nb::class_<CheckedProgram>(
      module, "Program",
      "Ops over numbered float32 buffers [max_rows, width], run in one call per step without the GIL.\n\n"
      "isa None: the default. Ops that fit may write the buffer they read. ValueError names whatever does not fit.\n"
      "Example: p = Program(None, ThreadPool(2), 64, cache); x = p.add_buffer(576); p.op_embed(rows, x).");
  program
      .def(
          nb::init<const std::optional<std::string>&, std::shared_ptr<ThreadPool>, int, std::shared_ptr<SharedCache>>(),
          nb::arg("isa").none(), nb::arg("pool"), nb::arg("max_rows"), nb::arg("cache").none() = nb::none())
      .def_prop_ro(
          "isa", [](CheckedProgram& self) { return isa_name(self.program().isa()); },
          "Name of the instruction set in use.")
      .def_prop_ro(
          "max_rows", [](CheckedProgram& self) { return self.program().max_rows(); }, "Rows a buffer has room for.")
      .def_prop_ro(
          "ops", [](CheckedProgram& self) { return self.program().ops(); }, "Number of ops.")
      .def("add_buffer", &CheckedProgram::add_buffer, nb::arg("width"), "Add a buffer and return its id.")
      .def("buffer", buffer_view, nb::arg("id"),
           "A writable view float32 [max_rows, width] of a buffer; rows a step did not write hold no meaning.")
      .def("set_selected", &CheckedProgram::set_selected, nb::arg("buffer"), nb::arg("selected"),
           "Say of a buffer written from outside whether it holds only the rows of out_rows; for ops added later.")
      .def("set_sparse_only", &CheckedProgram::set_sparse_only, nb::arg("op"),
           "Run this op only in steps that have a sparse row.")
      .def("run", run, nb::arg("first"), nb::arg("last"), nb::arg("tokens").noconvert(),
           nb::arg("positions").noconvert(), nb::arg("sequence").noconvert(), nb::arg("sparse").noconvert(),
           nb::arg("out_rows").noconvert(), nb::arg("block_table").noconvert(),
           "Run ops [first, last) on a batch.\n\n"
           "tokens, positions, sequence int32 [M], sparse uint8 [M], out_rows int32 [L], block_table int32 [S, "
           "max_blocks].\n"
           "Every index is checked first: ValueError names the row. Calls from several threads take turns.")
      .def("set_profiling", &CheckedProgram::set_profiling, nb::arg("on"), "Whether to time every op.")
      .def("take_counters", take_counters, "The counters of every op in order; taking them resets them.");
  bind_linear(module, program);
  bind_neurons(module, program);
  bind_program_ops(program);
}

}  // namespace thinfer::python
