// The vector type of the instruction set this file is being compiled for.
//
// CMake compiles every csrc/cpu/*.cpp once per instruction set and defines THINFER_ISA (the namespace) and one of
// THINFER_ISA_AVX512, THINFER_ISA_AVX2 (also for avxvnni, which adds THINFER_ISA_AVXVNNI) or neither (scalar).
// All headers offer the same `f32x16` operations with the same rounding, so kernels written over them agree to the bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"

#ifndef THINFER_ISA
#error "csrc/cpu files are compiled per instruction set: define THINFER_ISA"
#endif

#if defined(THINFER_ISA_AVX512)
#include "cpu/isa/avx512.h"
#elif defined(THINFER_ISA_AVX2)
#include "cpu/isa/avx2.h"
#else
#include "cpu/isa/scalar.h"
#endif

#include "cpu/isa/math.h"
