// Which thread does which rows of the elementwise kernels, and their binding to Python.
#include "elementwise/elementwise.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include <nanobind/stl/string.h>

#include "binding.h"
#include "isa.h"
#include "program.h"
#include "thread_pool.h"

namespace octavo {
namespace {

// Floats that one thread works off sooner than others would take them over.
constexpr int64_t kChunkFloats = 16384;

template <class Args>
void run_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows) {
    int64_t chunk_rows = std::max<int64_t>(kChunkFloats / std::max<int64_t>(args.width, 1), 1);
    int64_t num_chunks = (rows + chunk_rows - 1) / chunk_rows;
    ReleaseGil release(rows * args.width * 8);
    parallel_for(num_chunks, [&](int64_t chunk, int) {
        kernel(args, chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows));
    });
}

void rms_norm(uintptr_t x, int64_t x_stride, uintptr_t weight, float eps, uintptr_t out, int64_t rows, int64_t width) {
    NormArgs args{};
    args.x = at<const float>(x), args.x_stride = x_stride;
    args.weight = at<const float>(weight), args.eps = eps;
    args.out = at<float>(out), args.width = width;
    run_rows(isa().elementwise->rms_norm, args, rows);
}

void add_rms_norm(uintptr_t x, int64_t x_stride, uintptr_t residual, int64_t residual_stride, uintptr_t weight,
                  float eps, uintptr_t out, uintptr_t sum, int64_t rows, int64_t width) {
    NormArgs args{};
    args.x = at<const float>(x), args.x_stride = x_stride;
    args.residual = at<const float>(residual), args.residual_stride = residual_stride;
    args.weight = at<const float>(weight), args.eps = eps;
    args.out = at<float>(out), args.sum = at<float>(sum), args.width = width;
    run_rows(isa().elementwise->add_rms_norm, args, rows);
}

void layer_norm(uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias, float eps, uintptr_t out,
                int64_t rows, int64_t width) {
    NormArgs args{};
    args.x = at<const float>(x), args.x_stride = x_stride;
    args.weight = at<const float>(weight), args.bias = at<const float>(bias), args.eps = eps;
    args.out = at<float>(out), args.width = width;
    run_rows(isa().elementwise->layer_norm, args, rows);
}

void silu_and_mul(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows, int64_t width) {
    run_rows(isa().elementwise->silu_and_mul, GateArgs{at<const float>(x), x_stride, at<float>(out), width}, rows);
}

void gelu_and_mul(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows, int64_t width, bool by_tanh) {
    auto kernel = by_tanh ? isa().elementwise->gelu_tanh_and_mul : isa().elementwise->gelu_erf_and_mul;
    run_rows(kernel, GateArgs{at<const float>(x), x_stride, at<float>(out), width}, rows);
}

void simd_test(const std::string& name, uintptr_t in, uintptr_t out, int64_t n) {
    const ElementwiseKernels& kernels = *isa().elementwise;
    for (int i = 0; i < kernels.num_simd_probes; ++i)
        if (name == kernels.simd_probes[i].name) return kernels.simd_probes[i].run(at<void>(in), at<void>(out), n);
    throw std::invalid_argument("simd.h has no probe called " + name);
}

}  // namespace

void bind_elementwise(nanobind::module_& module) {
    define<&rms_norm>(module, "rms_norm");
    define<&add_rms_norm>(module, "add_rms_norm");
    define<&layer_norm>(module, "layer_norm");
    define<&silu_and_mul>(module, "silu_and_mul");
    define<&gelu_and_mul>(module, "gelu_and_mul");
    module.def("simd_test", &simd_test, "A function of simd.h over n elements, a multiple of 16; for tests.");
}

}  // namespace octavo
