#include "dispatch.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "kernels.h"

#if defined(THINFER_X86)
#include <cpuid.h>
#endif

namespace thinfer {

#define THINFER_DECLARE(isa)         \
  namespace isa {                    \
  extern const OpKernels op_kernels; \
  }
THINFER_FOR_EACH_ISA(THINFER_DECLARE)
#undef THINFER_DECLARE

namespace {

constexpr Isa kAll[] = {
#define THINFER_VALUE(isa) Isa::isa,
    THINFER_FOR_EACH_ISA(THINFER_VALUE)
#undef THINFER_VALUE
};

#if defined(THINFER_X86)
struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (leaf <= __get_cpuid_max(0, nullptr)) __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
  return r;
}

// Which register files the operating system saves: without its help the instructions fault.
uint64_t enabled_state() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool all(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

bool supports(Isa isa) {
  if (isa == Isa::scalar) return true;
  constexpr uint32_t fma = 1u << 12, popcnt = 1u << 23, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  if (!all(cpuid(1, 0).c, fma | popcnt | osxsave | avx | f16c)) return false;
  const uint64_t state = enabled_state();
  constexpr uint64_t ymm = 0x6, zmm = 0xe6;
  if ((state & ymm) != ymm) return false;
  const Registers seven = cpuid(7, 0);
  constexpr uint32_t bmi1 = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8;
  if (!all(seven.b, bmi1 | avx2 | bmi2)) return false;
  Registers extended;
  __get_cpuid(0x80000001u, &extended.a, &extended.b, &extended.c, &extended.d);
  constexpr uint32_t lzcnt = 1u << 5;
  if (!all(extended.c, lzcnt)) return false;
  switch (isa) {
    case Isa::avx2:
      return true;
    case Isa::avxvnni:
      return seven.a >= 1 && all(cpuid(7, 1).a, 1u << 4);
    case Isa::avx512: {
      constexpr uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
      return (state & zmm) == zmm && all(seven.b, f | dq | bw | vl) && all(seven.c, vnni);
    }
    default:
      return false;
  }
}
#else
bool supports(Isa) { return true; }
#endif

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
#define THINFER_NAME(isa) \
  case Isa::isa:          \
    return #isa;
    THINFER_FOR_EACH_ISA(THINFER_NAME)
#undef THINFER_NAME
  }
  return "";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  for (const Isa isa : kAll) {
    if (supports(isa)) found.push_back(isa);
  }
  return found;
}

Isa parse_isa(const std::string& name) {
  const std::vector<Isa> available = available_isas();
  std::string names;
  for (const Isa isa : available) {
    if (name == isa_name(isa)) return isa;
    names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is unknown or not available here; choose one of: " + names);
}

Isa default_isa() {
  const char* forced = std::getenv("THINFER_ISA");
  if (forced == nullptr || *forced == '\0') return available_isas().back();
  try {
    return parse_isa(forced);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("THINFER_ISA: " + std::string(error.what()));
  }
}

const OpKernels& op_kernels(Isa isa) {
  switch (isa) {
#define THINFER_TABLE(isa) \
  case Isa::isa:           \
    return isa::op_kernels;
    THINFER_FOR_EACH_ISA(THINFER_TABLE)
#undef THINFER_TABLE
  }
  return scalar::op_kernels;
}

}  // namespace thinfer
