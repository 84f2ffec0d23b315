// Which instruction set to run: found at start, forced by THINFER_ISA.
#pragma once

#include <string>
#include <vector>

// Every instruction set compiled in, worst first: X(name). Each name is a namespace thinfer::<name> with the tables of
// csrc/cpu. THINFER_X86 is set by CMake.
#if defined(THINFER_X86)
#define THINFER_FOR_EACH_ISA(X) X(scalar) X(avx2) X(avxvnni) X(avx512)
#else
#define THINFER_FOR_EACH_ISA(X) X(scalar)
#endif

namespace thinfer {

#define THINFER_ENUMERATOR(name) name,
enum class Isa { THINFER_FOR_EACH_ISA(THINFER_ENUMERATOR) };
#undef THINFER_ENUMERATOR

const char* isa_name(Isa isa);
// What this machine and its operating system can run, worst first; scalar always.
std::vector<Isa> available_isas();
// The best available, or the one the environment variable THINFER_ISA names. Throws std::invalid_argument.
Isa default_isa();
// Throws std::invalid_argument naming the alternatives when the name is unknown or the machine lacks it.
Isa parse_isa(const std::string& name);

}  // namespace thinfer
