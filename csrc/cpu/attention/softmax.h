// Softmax over one partition of one row, and the fold of partitions. Each is one function that every path calls.
#pragma once

#include "attention/attention.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kNarrow = kFloats < 8 ? kFloats : 8;  // head sizes are multiples of it
constexpr float kLowest = -3.40282347e38f;

// Maximum of the scores and sum of exp(score - maximum).
struct Stats {
    float maximum, sum;
};

// Near 0 an odd polynomial (Cephes' tanhf, Moshier 1989), beyond by the exponential.
template <int W>
OCTAVO_INLINE F<W> tanh(F<W> x) {
    F<W> magnitude = (F<W>)((U<W>)x & 0x7fffffffu);
    F<W> square = x * x;
    F<W> p = splat<W>(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square + -5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square + -3.33332819422e-1f;
    F<W> small = p * square * x + x;
    F<W> large = 1.0f - 2.0f / (exp<W>(magnitude + magnitude) + 1.0f);
    large = (F<W>)((U<W>)large | ((U<W>)x & 0x80000000u));
    return select<W>((I<W>)(magnitude < 0.625f), small, large);
}

// exp<W>(x) for x <= 0, in fewer operations. NaN for NaN.
template <int W>
OCTAVO_INLINE F<W> exp_of_negative(F<W> x) {
    const float lowest = -87.33654f;
    F<W> clamped = vmax<W>(splat<W>(lowest), x);
    auto [p, shifted] = scaled_exp<W>(clamped);
    F<W> result = p * (F<W>)(((U<W>)shifted << 23) + 0x3f800000u);  // kRounder's own bits leave by the shift
    return (F<W>)((I<W>)result & ~(I<W>)(x < lowest));
}

// Whole vectors that hold keys low .. high - 1 of a partition.
struct Lanes {
    int begin, end;
    Lanes(int low, int high) : begin(low / kFloats * kFloats), end((high + kFloats - 1) / kFloats * kFloats) {}
};

// The scales of 8-bit keys and the soft cap, for the scores of keys low .. high - 1.
void transform_scores(float* scores, int low, int high, const float* k_scales, float soft_cap) {
    Lanes lanes(low, high);
    for (int i = lanes.begin; i < lanes.end; i += kFloats) {
        F<kFloats> x = load<kFloats>(scores + i);
        if (k_scales) x = x * load<kFloats>(k_scales + i);
        if (soft_cap != 0.0f) x = tanh<kFloats>(x / soft_cap) * soft_cap;
        store<kFloats>(scores + i, x);
    }
}

// The maximum of the scores of keys low .. high - 1. Other keys in the same vectors get -inf, whatever was there.
float mask_and_maximum(float* scores, int low, int high) {
    Lanes lanes(low, high);
    for (int i = lanes.begin; i < low; ++i) scores[i] = -__builtin_inff();
    for (int i = high; i < lanes.end; ++i) scores[i] = -__builtin_inff();
    F<kFloats> highest = splat<kFloats>(kLowest);
    for (int i = lanes.begin; i < lanes.end; i += kFloats) highest = vmax<kFloats>(load<kFloats>(scores + i), highest);
    return hmax<kFloats>(highest);
}

// Turns the scores into exp(score - maximum), times v_scales if given. Returns the sum of the exponentials.
float exponentiate(float* scores, int low, int high, float maximum, const float* v_scales) {
    constexpr int W = kFloats;
    Lanes lanes(low, high);
    F<W> total = {};
    for (int i = lanes.begin; i < lanes.end; i += W) {
        F<W> p = exp_of_negative<W>(load<W>(scores + i) - maximum);
        total = total + p;
        if (v_scales) p = p * load<W>(v_scales + i);
        store<W>(scores + i, p);
    }
    return hsum<W>(total);
}

// x <= 0
OCTAVO_INLINE float exp_scalar(float x) { return exp_of_negative<4>(splat<4>(x))[0]; }

// Take in the next partition. One of the two exponentials is e^0, so a single multiplication is left to contract.
void fold(Stats& stats, float* out, const Stats& next, const float* next_out, int dims) {
    if (next.maximum > stats.maximum) {
        float factor = exp_scalar(stats.maximum - next.maximum);
        for (int i = 0; i < dims; i += kNarrow)
            store<kNarrow>(out + i, load<kNarrow>(out + i) * factor + load<kNarrow>(next_out + i));
        stats.sum = stats.sum * factor + next.sum;
        stats.maximum = next.maximum;
    } else {
        float factor = exp_scalar(next.maximum - stats.maximum);
        for (int i = 0; i < dims; i += kNarrow)
            store<kNarrow>(out + i, load<kNarrow>(next_out + i) * factor + load<kNarrow>(out + i));
        stats.sum = next.sum * factor + stats.sum;
    }
}

// Divide by the sum of the exponentials; a sink is one more of these.
void finish_row(Stats stats, const float* from, const float* sink, float* out, int dims) {
    float factor = 1.0f;
    if (sink && *sink > stats.maximum) {
        factor = exp_scalar(stats.maximum - *sink);
        stats.sum = stats.sum * factor + 1.0f;
    } else if (sink) {
        stats.sum = stats.sum + exp_scalar(*sink - stats.maximum);
    }
    float inverse = factor / stats.sum;
    for (int i = 0; i < dims; i += kNarrow) store<kNarrow>(out + i, load<kNarrow>(from + i) * inverse);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
