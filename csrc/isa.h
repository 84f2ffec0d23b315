// The instruction sets compiled in. Free of library templates, so that kernel sources may include it.
#pragma once

// Every instruction set, worst first: X(name). Each name is a namespace thinfer::<name> with the tables of csrc/cpu.
// THINFER_X86 is set by CMake.
#if defined(THINFER_X86)
#define THINFER_FOR_EACH_ISA(X) X(scalar) X(avx2) X(avxvnni) X(avx512)
#else
#define THINFER_FOR_EACH_ISA(X) X(scalar)
#endif

namespace thinfer {

#define THINFER_ENUMERATOR(name) name,
enum class Isa { THINFER_FOR_EACH_ISA(THINFER_ENUMERATOR) };
#undef THINFER_ENUMERATOR

}  // namespace thinfer
