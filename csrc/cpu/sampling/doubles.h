// Vectors of float64, half as many lanes as of float32, and the exponential that probabilities are made with.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kDoubles = kFloats / 2;
typedef double Doubles __attribute__((vector_size(kDoubles * 8)));
typedef int64_t Longs __attribute__((vector_size(kDoubles * 8)));

OCTAVO_INLINE Doubles splat_double(double x) { return Doubles{} + x; }

OCTAVO_INLINE Doubles load_doubles(const double* p) {
    Doubles result;
    memcpy(&result, p, sizeof result);
    return result;
}
OCTAVO_INLINE Doubles load_doubles(const float* p) {
#if defined(__AVX512F__)  // the compiler's own conversion takes two steps
    return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#else
    return __builtin_convertvector(load<kDoubles>(p), Doubles);
#endif
}
// The first `count` lanes from memory, `rest` in the others.
template <class T>
OCTAVO_INLINE Doubles load_some_doubles(const T* p, int64_t count, T rest) {
    if (count >= kDoubles) return load_doubles(p);
    T lanes[kDoubles];
    for (int i = 0; i < kDoubles; ++i) lanes[i] = i < count ? p[i] : rest;
    return load_doubles(lanes);
}

OCTAVO_INLINE void store_doubles(double* p, Doubles x) { memcpy(p, &x, sizeof x); }
OCTAVO_INLINE void store_doubles(float* p, Doubles x) {
    auto narrow = __builtin_convertvector(x, F<kDoubles>);
    memcpy(p, &narrow, sizeof narrow);
}
template <class T>
OCTAVO_INLINE void store_some_doubles(T* p, Doubles x, int64_t count) {
    if (count >= kDoubles) return store_doubles(p, x);
    T lanes[kDoubles];
    store_doubles(lanes, x);
    memcpy(p, lanes, size_t(count) * sizeof(T));
}

// Lanes added in one fixed order: halves, quarters, ...
OCTAVO_INLINE double sum_lanes(Doubles x) {
    double lanes[kDoubles];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = kDoubles / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// e^x for x <= 0, about 1 unit in the last place; exactly 1 at 0; 0 below -708 (-inf included); NaN for NaN.
// x = n ln 2 + r, and a minimax polynomial of relative error 3e-16 for (e^r - 1 - r) / r^2.
OCTAVO_INLINE Doubles exp_of_negative(Doubles x) {
    const double magic = 0x1.8p52;  // adding it rounds to an integer, kept in the lowest bits
    Doubles shifted = x * 1.4426950408889634 + magic;
    Doubles n = shifted - magic;
    Doubles r = x - n * 0x1.62e42feep-1;
    r = r - n * 0x1.a39ef35793c76p-33;
    Doubles q = splat_double(2.74767824658812710e-07);
    q = q * r + 2.76350056809258646e-06;
    q = q * r + 2.48019318455950702e-05;
    q = q * r + 1.98411852039560469e-04;
    q = q * r + 1.38888885160207533e-03;
    q = q * r + 8.33333337089140792e-03;
    q = q * r + 4.16666666681375503e-02;
    q = q * r + 1.66666666666115126e-01;
    q = q * r + 4.99999999999983236e-01;
    Doubles p = q * (r * r) + r + 1.0;
    Doubles result = p * (Doubles)(((Longs)shifted + 1023) << 52);
    return x < -708.0 ? Doubles{} : result;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
