// The table of the elementwise kernels: what each instruction set provides.
#pragma once

#include <cstdint>

namespace octavo {

struct ElementwiseKernels {
    int panel;
};

}  // namespace octavo
