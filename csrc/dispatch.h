// Which instruction set to run: found at start, forced by THINFER_ISA.
#pragma once

#include <string>
#include <vector>

#include "isa.h"

namespace thinfer {

const char* isa_name(Isa isa);
// What this machine and its operating system can run, worst first; scalar always.
std::vector<Isa> available_isas();
// The best available, or the one the environment variable THINFER_ISA names. Throws std::invalid_argument.
Isa default_isa();
// Throws std::invalid_argument naming the alternatives when the name is unknown or the machine lacks it.
Isa parse_isa(const std::string& name);

}  // namespace thinfer
