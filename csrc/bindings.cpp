// The Python module thinfer._core: argument checks and nothing of substance.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"

NB_MODULE(_core, module) {
  using namespace thinfer;
  module.doc() = "The native core of thinfer: a program of ops over float32 buffers, run in one call per step.";
  module.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Names of the instruction sets this machine can run, worst first.");
  module.def(
      "default_isa", [] { return std::string(isa_name(default_isa())); },
      "The instruction set used unless one is named: the best, or what THINFER_ISA says. Raises ValueError when that "
      "is "
      "unknown or not available.");
  module.attr("BLOCK_SIZE") = kBlock;
  python::bind_program(module);
  python::bind_ops(module);
  python::bind_sampling(module);
}
