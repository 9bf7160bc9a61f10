// The table of the linear layer's kernels: what each instruction set provides.
#pragma once

#include <cstdint>

namespace octavo {

struct LinearKernels {
    int panel;
};

}  // namespace octavo
