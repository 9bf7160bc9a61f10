// Norms and gated activations. A row is read in whole vectors and one padded one, always in the same order.
#include "elementwise/elementwise.h"

#include "elementwise/simd_probes.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

using Floats = F<kFloats>;

// The first `count` lanes from memory, 0 in the others.
OCTAVO_INLINE Floats load_some(const float* p, int64_t count) {
    if (count == kFloats) return load<kFloats>(p);
    float lanes[kFloats] = {};
    memcpy(lanes, p, size_t(count) * sizeof(float));
    return load<kFloats>(lanes);
}

OCTAVO_INLINE void store_some(float* p, Floats x, int64_t count) {
    if (count == kFloats) return store<kFloats>(p, x);
    float lanes[kFloats];
    store<kFloats>(lanes, x);
    memcpy(p, lanes, size_t(count) * sizeof(float));
}

// f(offset, count) for every vector of a row.
template <class Function>
OCTAVO_INLINE void for_vectors(int64_t width, Function f) {
    int64_t i = 0;
    for (; i + kFloats <= width; i += kFloats) f(i, int64_t(kFloats));
    if (i < width) f(i, width - i);
}

// Sum of the lanes of f(offset, count) over a row; f gives 0 in lanes beyond count. Four sums hide the latency.
template <class Function>
OCTAVO_INLINE float row_sum(int64_t width, Function f) {
    Floats sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kFloats <= width; i += 4 * kFloats)
        for (int j = 0; j < 4; ++j) sums[j] += f(i + j * kFloats, int64_t(kFloats));
    for (int j = 0; i < width; i += kFloats, ++j) sums[j] += f(i, width - i < kFloats ? width - i : kFloats);
    return hsum<kFloats>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

OCTAVO_INLINE void rms_norm_row(const float* x, const NormArgs& args, float* out) {
    float squares = row_sum(args.width, [=](int64_t i, int64_t count) {
        Floats v = load_some(x + i, count);
        return v * v;
    });
    float inverse = 1.0f / __builtin_sqrtf(squares / float(args.width) + args.eps);
    for_vectors(args.width, [&](int64_t i, int64_t count) {
        store_some(out + i, load_some(x + i, count) * inverse * load_some(args.weight + i, count), count);
    });
}

void rms_norm(const NormArgs& args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
        rms_norm_row(args.x + row * args.x_stride, args, args.out + row * args.width);
}

void add_rms_norm(const NormArgs& args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float* x = args.x + row * args.x_stride;
        const float* residual = args.residual + row * args.residual_stride;
        float* sum = args.sum + row * args.width;
        for_vectors(args.width, [=](int64_t i, int64_t count) {
            store_some(sum + i, load_some(x + i, count) + load_some(residual + i, count), count);
        });
        rms_norm_row(sum, args, args.out + row * args.width);
    }
}

void layer_norm(const NormArgs& args, int64_t first, int64_t last) {
    const int64_t width = args.width;
    for (int64_t row = first; row < last; ++row) {
        const float* x = args.x + row * args.x_stride;
        float* out = args.out + row * width;
        float mean = row_sum(width, [=](int64_t i, int64_t count) { return load_some(x + i, count); }) / float(width);
        float squares = row_sum(width, [=](int64_t i, int64_t count) {
            float lanes[kFloats] = {};
            store_some(lanes, load_some(x + i, count) - mean, count);
            Floats centred = load<kFloats>(lanes);
            return centred * centred;
        });
        float inverse = 1.0f / __builtin_sqrtf(squares / float(width) + args.eps);
        for_vectors(width, [&](int64_t i, int64_t count) {
            Floats scaled = (load_some(x + i, count) - mean) * inverse * load_some(args.weight + i, count);
            if (args.bias) scaled = scaled + load_some(args.bias + i, count);
            store_some(out + i, scaled, count);
        });
    }
}

OCTAVO_INLINE Floats silu(Floats x) { return x / (1.0f + exp<kFloats>(-x)); }

// x * Phi(x), by the tail Q(z) = erfc(z / sqrt 2) / 2 of z = |x|, so that negative x keep their relative precision.
// erfc(y) = t * P(t) * e^(-y^2) with t = 1 / (1 + 0.4 y); P is a minimax polynomial of relative error 6e-9.
OCTAVO_INLINE Floats gelu_erf(Floats x) {
    Floats magnitude = (Floats)((I<kFloats>)x & 0x7fffffff);
    Floats y = magnitude * 0.70710678f;
    Floats t = 1.0f / (1.0f + y * 0.4f);
    Floats p = splat<kFloats>(-2.903151788e-02f);
    p = p * t + 1.394483438e-01f;
    p = p * t - 2.331799409e-01f;
    p = p * t + 1.344357934e-01f;
    p = p * t - 4.430141981e-02f;
    p = p * t + 8.252550983e-02f;
    p = p * t + 1.194919460e-01f;
    p = p * t + 1.716327749e-01f;
    p = p * t + 2.076277694e-01f;
    p = p * t + 2.256748725e-01f;
    p = p * t + 2.256758627e-01f;
    Floats tail = 0.5f * t * p * exp<kFloats>(-0.5f * magnitude * magnitude);
    return x * select<kFloats>((I<kFloats>)(x < 0.0f), tail, 1.0f - tail);
}

// x * (1 + tanh u) / 2 = x / (1 + e^(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
OCTAVO_INLINE Floats gelu_tanh(Floats x) {
    Floats u = x * (x * x * 0.0713548162726f + 1.59576912161f);
    return x / (1.0f + exp<kFloats>(-u));
}

template <Floats (*activate)(Floats)>
void gate(const GateArgs& args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float* x = args.x + row * args.x_stride;
        const float* up = x + args.width;
        float* out = args.out + row * args.width;
        for_vectors(args.width, [=](int64_t i, int64_t count) {
            store_some(out + i, activate(load_some(x + i, count)) * load_some(up + i, count), count);
        });
    }
}

}  // namespace

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels{rms_norm,       add_rms_norm,   layer_norm,   gate<silu>,
                                             gate<gelu_erf>, gate<gelu_tanh>, kSimdProbes, kNumSimdProbes};

}  // namespace octavo::OCTAVO_ISA
