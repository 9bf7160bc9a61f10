// The table of the sampling kernels: what each instruction set provides.
#pragma once

#include <cstdint>

namespace octavo {

struct SamplingKernels {
    int panel;
};

}  // namespace octavo
