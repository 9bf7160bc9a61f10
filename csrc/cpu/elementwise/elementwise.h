// The elementwise kernels: norms and gated activations over rows of float32. What each instruction set provides.
#pragma once

#include <cstdint>

namespace octavo {

// Rows of x, and of residual where there is one, may lie apart; out and sum are contiguous [rows, width].
struct NormArgs {
    const float* x;
    int64_t x_stride;
    const float* residual;
    int64_t residual_stride;
    const float* weight;
    const float* bias;  // null: none
    float* out;
    float* sum;  // x + residual
    int64_t width;
    float eps;
};

// x: rows of 2 * width, gate then up; out: contiguous [rows, width].
struct GateArgs {
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t width;
};

// One function of simd.h over n elements (a multiple of 16), so that tests can reach it.
struct SimdProbe {
    const char* name;
    void (*run)(const void* in, void* out, int64_t n);
};

// Each works on the rows [first, last) alone; a row's result is one fixed sequence of operations.
struct ElementwiseKernels {
    void (*rms_norm)(const NormArgs& args, int64_t first, int64_t last);
    void (*add_rms_norm)(const NormArgs& args, int64_t first, int64_t last);
    void (*layer_norm)(const NormArgs& args, int64_t first, int64_t last);
    void (*silu_and_mul)(const GateArgs& args, int64_t first, int64_t last);
    void (*gelu_erf_and_mul)(const GateArgs& args, int64_t first, int64_t last);
    void (*gelu_tanh_and_mul)(const GateArgs& args, int64_t first, int64_t last);
    const SimdProbe* simd_probes;
    int num_simd_probes;
};

}  // namespace octavo
