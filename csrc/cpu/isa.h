// The instruction sets this build has kernels for, and the one in use. Chosen once, at start; never an instruction that
// the machine lacks. Every family of kernels contributes a table of functions, compiled once for each instruction set.
#pragma once

#include <string>
#include <vector>

namespace octavo {

struct LinearKernels;
struct AttentionKernels;
struct ElementwiseKernels;
struct SamplingKernels;

struct Isa {
    const char* name;
    int floats;  // float32 lanes of a vector
    bool (*is_supported)();
    const LinearKernels* linear;
    const AttentionKernels* attention;
    const ElementwiseKernels* elementwise;
    const SamplingKernels* sampling;
};

// The one in use: the widest that the machine supports, unless `use_isa` chose another.
const Isa& isa();

// Names of those that this build has and this machine supports, widest first.
std::vector<std::string> supported_isas();

// Throws std::invalid_argument if it is not among the supported ones. Weights packed before must not be used after.
void use_isa(const std::string& name);

}  // namespace octavo
