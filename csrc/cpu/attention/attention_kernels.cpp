#include "attention/attention.h"

#include "simd.h"

namespace octavo::OCTAVO_ISA {

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{kFloats};

}  // namespace octavo::OCTAVO_ISA
