// Which kernels for few bits are in use: instructions for dot products of bytes come apart from the instruction sets.
// All of them read the same panels and give the same integers.
#pragma once

#include <string>
#include <vector>

#include "quantized/quantized.h"

namespace octavo {

// The best for the instruction set in use (isa.h), unless `use_quantized_kernels` named others.
const QuantizedKernels& quantized_kernels();

// Those that this build has and this machine supports, best first.
std::vector<std::string> supported_quantized_kernels();

// Throws std::invalid_argument if they are not among the supported ones. Empty: the best again.
void use_quantized_kernels(const std::string& name);

}  // namespace octavo
