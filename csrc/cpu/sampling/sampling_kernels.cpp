#include "sampling/sampling.h"

#include "simd.h"

namespace octavo::OCTAVO_ISA {

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels{kFloats};

}  // namespace octavo::OCTAVO_ISA
