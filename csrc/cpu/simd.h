// Vectors of a fixed width for each instruction set, with GCC's vector extensions: what a kernel file is written in.
//
// Compiled once for each instruction set, so everything here has internal linkage: the linker must never be able to take
// another object's copy of a function. For the same reason kernel files include no header of the standard library with
// inline functions (<algorithm>, <vector>, <cmath>, ...); <cstdint>, <cstddef> and <cstring> are fine.
//
// A lane's result depends on that lane alone, whatever the width W: F<16>, F<8> and F<4> give equal bits within one
// object, so a tail may be computed in narrower vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined_*
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
struct fp8 {  // e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning"): up to 448, no infinity
    uint8_t bits;
};

namespace OCTAVO_ISA {
namespace {

constexpr int kFloats = OCTAVO_FLOATS;  // float32 lanes of the widest vector

template <int W>
struct Vector {
    typedef float f __attribute__((vector_size(W * 4)));
    typedef int32_t i __attribute__((vector_size(W * 4)));
    typedef uint32_t u __attribute__((vector_size(W * 4)));
    typedef uint16_t h __attribute__((vector_size(W * 2)));
};
template <int W>
using F = typename Vector<W>::f;
template <int W>
using I = typename Vector<W>::i;
template <int W>
using U = typename Vector<W>::u;
template <int W>
using H = typename Vector<W>::h;

template <int W>
OCTAVO_INLINE F<W> splat(float x) {
    return F<W>{} + x;
}

// ---- widening loads: the compiler's own conversion of short vectors is slow -------------------------------------------

template <int W>
OCTAVO_INLINE U<W> widen_u16(const void* p) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (U<W>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return (U<W>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#endif
#if defined(__SSE2__)
    if constexpr (W == 4) return (U<W>)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
#elif defined(__aarch64__)
    if constexpr (W == 4) return (U<W>)vmovl_u16(vld1_u16((const uint16_t*)p));
#endif
    U<W> result;
    uint16_t raw[W];
    memcpy(raw, p, sizeof raw);
    for (int i = 0; i < W; ++i) result[i] = raw[i];
    return result;
}

template <int W>
OCTAVO_INLINE I<W> widen_s8(const void* p) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (I<W>)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return (I<W>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#endif
#if defined(__SSE2__)
    if constexpr (W == 4) {
        int32_t raw;
        memcpy(&raw, p, 4);
        __m128i bytes = _mm_cvtsi32_si128(raw);
        bytes = _mm_unpacklo_epi8(bytes, bytes);
        return (I<W>)_mm_srai_epi32(_mm_unpacklo_epi16(bytes, bytes), 24);
    }
#elif defined(__aarch64__)
    if constexpr (W == 4) {
        int32_t raw;
        memcpy(&raw, p, 4);
        return (I<W>)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(raw)))));
    }
#endif
    I<W> result;
    int8_t raw[W];
    memcpy(raw, p, sizeof raw);
    for (int i = 0; i < W; ++i) result[i] = raw[i];
    return result;
}

// float16 bits (in the low half of each lane) to float32: exact, subnormals, infinities and NaN included.
template <int W>
OCTAVO_INLINE F<W> f16_bits_to_f32(U<W> bits) {
    U<W> sign = (bits & 0x8000u) << 16;
    U<W> magnitude = bits & 0x7fffu;
    F<W> scaled = (F<W>)(magnitude << 13) * 0x1p112f;  // moves the exponent's bias; normalises subnormals
    U<W> special = (U<W>)(magnitude > 0x7bffu);        // all ones for infinity and NaN
    return (F<W>)((U<W>)scaled | sign | (special & 0x7f800000u));
}

// bfloat16 bits (in the low half of each lane) to float32: exact.
template <int W>
OCTAVO_INLINE F<W> bf16_bits_to_f32(U<W> bits) {
    return (F<W>)(bits << 16);
}

template <int W>
OCTAVO_INLINE F<W> load(const float* p) {
    F<W> result;
    memcpy(&result, p, sizeof result);
    return result;
}
template <int W>
OCTAVO_INLINE F<W> load(const bf16* p) {
    return bf16_bits_to_f32<W>(widen_u16<W>(p));
}
template <int W>
OCTAVO_INLINE F<W> load(const f16* p) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F<W>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#endif
#if defined(__F16C__)
    if constexpr (W == 8) return (F<W>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
    return f16_bits_to_f32<W>(widen_u16<W>(p));
}
template <int W>
OCTAVO_INLINE F<W> load(const int8_t* p) {
    return __builtin_convertvector(widen_s8<W>(p), F<W>);
}

// Exact; the code of NaN, which is never stored, is read as 480.
template <int W>
OCTAVO_INLINE F<W> load(const fp8* p) {
    U<W> bits = (U<W>)widen_s8<W>(p);
    F<W> magnitude = (F<W>)((bits & 0x7fu) << 20) * 0x1p120f;  // moves the exponent's bias; normalises subnormals
    return (F<W>)((U<W>)magnitude | (bits & 0x80000000u));
}

template <int W>
OCTAVO_INLINE void store(float* p, F<W> x) {
    memcpy(p, &x, sizeof x);
}
// Rounds to nearest even; NaN stays NaN.
template <int W>
OCTAVO_INLINE void store(bf16* p, F<W> x) {
    U<W> bits = (U<W>)x;
    U<W> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    U<W> is_nan = (U<W>)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (is_nan & 0x7fc0u) | (~is_nan & rounded);
    H<W> narrow = __builtin_convertvector(rounded, H<W>);
    memcpy(p, &narrow, sizeof narrow);
}
// Rounds to nearest even, subnormals too; what is too large becomes infinity; NaN stays NaN.
template <int W>
OCTAVO_INLINE void store(f16* p, F<W> x) {
    U<W> bits = (U<W>)x;
    U<W> sign = (bits >> 16) & 0x8000u;
    U<W> magnitude = bits & 0x7fffffffu;
    // normal: add half a unit (ties to even), move the bias; subnormal: adding 0.5 leaves the rounded bits at the bottom
    U<W> normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    U<W> subnormal = (U<W>)((F<W>)magnitude + 0.5f) - 0x3f000000u;
    U<W> is_subnormal = (U<W>)(magnitude < 0x38800000u);
    U<W> is_large = (U<W>)(magnitude >= 0x477ff000u);
    U<W> is_nan = (U<W>)(magnitude > 0x7f800000u);
    U<W> result = (is_subnormal & subnormal) | (~is_subnormal & normal);
    result = (is_large & 0x7c00u) | (~is_large & result);
    result = (is_nan & 0x7e00u) | (~is_nan & result);
    H<W> narrow = __builtin_convertvector(result | sign, H<W>);
    memcpy(p, &narrow, sizeof narrow);
}

// Rounds to nearest even, subnormals too; for magnitudes up to 448, which is the largest there is.
template <int W>
OCTAVO_INLINE void store(fp8* p, F<W> x) {
    U<W> bits = (U<W>)x;
    U<W> magnitude = bits & 0x7fffffffu;
    // normal: add half a unit (ties to even), move the bias; subnormal: at 2^14 the last bit of a float is worth 2^-9
    U<W> normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
    U<W> subnormal = (U<W>)((F<W>)magnitude + 0x1p14f) - 0x46800000u;
    U<W> is_subnormal = (U<W>)(magnitude < 0x3c800000u);  // 2^-6
    U<W> result = (is_subnormal & subnormal) | (~is_subnormal & normal) | ((bits >> 24) & 0x80u);
    for (int i = 0; i < W; ++i) p[i].bits = uint8_t(result[i]);
}

template <int W>
OCTAVO_INLINE F<W> select(I<W> mask, F<W> where_true, F<W> where_false) {
    return (F<W>)((mask & (I<W>)where_true) | (~mask & (I<W>)where_false));
}
template <int W>
OCTAVO_INLINE F<W> vmax(F<W> a, F<W> b) {
    return select<W>((I<W>)(a > b), a, b);
}
template <int W>
OCTAVO_INLINE F<W> vmin(F<W> a, F<W> b) {
    return select<W>((I<W>)(a < b), a, b);
}

// Puts x into a register, with a value that the compiler knows nothing of: it cannot compute it in another order before,
// nor keep it in memory all the time for what comes after.
template <class T>
OCTAVO_INLINE void keep(T& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

// The lower and the upper half of the lanes.
template <int W>
OCTAVO_INLINE F<W / 2> low_half(F<W> x) {
    F<W / 2> half;
    memcpy(&half, &x, sizeof half);
    return half;
}
template <int W>
OCTAVO_INLINE F<W / 2> high_half(F<W> x) {
    F<W / 2> half;
    memcpy(&half, (const char*)&x + sizeof half, sizeof half);
    return half;
}

// Lanes added in one fixed order: halves, quarters, ...
template <int W>
OCTAVO_INLINE float hsum(F<W> x) {
    if constexpr (W > 2 && W <= kFloats) keep(x);
    if constexpr (W == 2)
        return x[0] + x[1];
    else
        return hsum<W / 2>(low_half<W>(x) + high_half<W>(x));
}
template <int W>
OCTAVO_INLINE float hmax(F<W> x) {
    if constexpr (W > 2 && W <= kFloats) keep(x);
    if constexpr (W == 2)
        return x[0] > x[1] ? x[0] : x[1];
    else
        return hmax<W / 2>(vmax<W / 2>(low_half<W>(x), high_half<W>(x)));
}

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits

// e^x = p * 2^n for x in the range where that is a number: p, and n + kRounder.
template <int W>
struct ScaledExp {
    F<W> p, n_shifted;
};

// Argument reduction by ln 2 in two parts and a minimax polynomial (Cephes' coefficients, Moshier 1989).
template <int W>
OCTAVO_INLINE ScaledExp<W> scaled_exp(F<W> x) {
    F<W> shifted = x * 1.44269504f + kRounder;
    F<W> n = shifted - kRounder;
    F<W> r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    F<W> p = splat<W>(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return {p * (r * r) + r + 1.0f, shifted};
}

// e^x, about 1 unit in the last place. 0 below -87.3 (-inf included), infinity above 88.7, NaN for NaN.
template <int W>
OCTAVO_INLINE F<W> exp(F<W> x) {
    I<W> is_low = (I<W>)(x < -87.33654f), is_high = (I<W>)(x > 88.72283f);
    F<W> clamped = select<W>(is_low, splat<W>(-87.33654f), select<W>(is_high, splat<W>(88.72283f), x));
    auto [p, shifted] = scaled_exp<W>(clamped);
    // 2^n in two factors, so that n = 128 does not overflow before p < 1 is taken in
    I<W> exponent = (I<W>)shifted - (I<W>)splat<W>(kRounder);
    I<W> half = exponent >> 1;
    F<W> result = p * (F<W>)((half + 127) << 23) * (F<W>)((exponent - half + 127) << 23);
    result = select<W>(is_high, splat<W>(__builtin_inff()), result);
    return select<W>(is_low, F<W>{}, result);
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
