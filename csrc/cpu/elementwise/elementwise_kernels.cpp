#include "elementwise/elementwise.h"

#include "simd.h"

namespace octavo::OCTAVO_ISA {

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels{kFloats};

}  // namespace octavo::OCTAVO_ISA
