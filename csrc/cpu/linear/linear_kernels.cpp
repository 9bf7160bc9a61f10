#include "linear/linear.h"

#include "simd.h"

namespace octavo::OCTAVO_ISA {

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels{kFloats};

}  // namespace octavo::OCTAVO_ISA
