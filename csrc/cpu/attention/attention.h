// The table of the attention kernels: what each instruction set provides.
#pragma once

#include <cstdint>

namespace octavo {

struct AttentionKernels {
    int panel;
};

}  // namespace octavo
