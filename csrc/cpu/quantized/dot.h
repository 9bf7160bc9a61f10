// Dot products of bytes, four at a time: what each instruction set has for them. The sums are exact, so every variant
// gives the same integers.
//
// Dot<true> takes weights of 4 bits, 0 to 15; Dot<false> takes weights of 8 bits plus 128. Inputs are -127 to 127.
//     Sums start(offset)            offset: -128 times the sum of the inputs, of use with 8 bits
//     Weights weights(Bytes)        what is needed of kFloats columns of 4 k
//     Inputs inputs(Bytes)          the same of 4 k of an input, repeated for every column
//     void add(Sums&, Weights, Inputs)
//     I<kFloats> finish(Sums, offset)
// At most the 8 steps of one group are added to a Sums.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(kFloats * 4)));

OCTAVO_INLINE Bytes load_bytes(const void* p) {
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

// The four bytes at p, repeated.
OCTAVO_INLINE Bytes repeat_4_bytes(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    return (Bytes)(I<kFloats>{} + word);
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

template <bool NIBBLES>
struct Dot {
    typedef I<kFloats> Sums;
    typedef Bytes Weights;
    typedef Bytes Inputs;

    static OCTAVO_INLINE Sums start(int32_t offset) { return NIBBLES ? Sums{} : Sums{} + offset; }
    static OCTAVO_INLINE Weights weights(Bytes bytes) { return bytes; }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) { return bytes; }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
#if defined(__AVX512VNNI__)
        sums = (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
        sums = (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#endif
        keep(sums);
    }
    static OCTAVO_INLINE I<kFloats> finish(Sums sums, int32_t) { return sums; }
};

#elif defined(__AVX2__)

OCTAVO_INLINE __m256i add_pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// 8 bits: a product of two bytes and its neighbour's fit 16 bits if the weight gives its sign to the input.
template <bool NIBBLES>
struct Dot {
    typedef __m256i Sums;
    struct Weights {
        __m256i value, magnitude;
    };
    typedef __m256i Inputs;

    static OCTAVO_INLINE Sums start(int32_t) { return _mm256_setzero_si256(); }
    static OCTAVO_INLINE Weights weights(Bytes bytes) {
        __m256i value = _mm256_xor_si256((__m256i)bytes, _mm256_set1_epi8(-128));
        return {value, _mm256_abs_epi8(value)};
    }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) { return (__m256i)bytes; }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
        __m256i words = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(x, w.value));
        sums = _mm256_add_epi32(sums, add_pairs(words));
        keep(sums);
    }
    static OCTAVO_INLINE I<8> finish(Sums sums, int32_t) { return (I<8>)sums; }
};

// 4 bits: 16 products of at most 15 * 127 fit 16 bits.
template <>
struct Dot<true> {
    typedef __m256i Sums;
    typedef __m256i Weights;
    typedef __m256i Inputs;

    static OCTAVO_INLINE Sums start(int32_t) { return _mm256_setzero_si256(); }
    static OCTAVO_INLINE Weights weights(Bytes bytes) { return (__m256i)bytes; }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) { return (__m256i)bytes; }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
        keep(sums);
    }
    static OCTAVO_INLINE I<8> finish(Sums sums, int32_t) { return (I<8>)add_pairs(sums); }
};

#elif defined(__SSE2__)

template <bool NIBBLES>
struct Dot {
    struct Sums {
        __m128i low, high;  // two columns each: (k 0 and 1, k 2 and 3) of one, then of the next
    };
    struct Weights {
        __m128i low, high;
    };
    typedef __m128i Inputs;

    static OCTAVO_INLINE Sums start(int32_t) { return {_mm_setzero_si128(), _mm_setzero_si128()}; }
    static OCTAVO_INLINE Weights weights(Bytes bytes) {
        return {_mm_unpacklo_epi8((__m128i)bytes, _mm_setzero_si128()),
                _mm_unpackhi_epi8((__m128i)bytes, _mm_setzero_si128())};
    }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) {
        return _mm_srai_epi16(_mm_unpacklo_epi8((__m128i)bytes, (__m128i)bytes), 8);
    }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
        sums.low = _mm_add_epi32(sums.low, _mm_madd_epi16(w.low, x));
        sums.high = _mm_add_epi32(sums.high, _mm_madd_epi16(w.high, x));
        keep(sums.low);
        keep(sums.high);
    }
    static OCTAVO_INLINE I<4> finish(Sums sums, int32_t offset) {
        __m128 low = _mm_castsi128_ps(sums.low), high = _mm_castsi128_ps(sums.high);
        I<4> even = (I<4>)_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0));
        I<4> odd = (I<4>)_mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
        return even + odd + (NIBBLES ? 0 : offset);
    }
};

#elif defined(__aarch64__)

OCTAVO_INLINE int8x16_t as_signed(Bytes bytes) { return vreinterpretq_s8_u8((uint8x16_t)bytes); }

#if defined(__ARM_FEATURE_DOTPROD)

template <bool NIBBLES>
struct Dot {
    typedef int32x4_t Sums;
    typedef int8x16_t Weights;
    typedef int8x16_t Inputs;

    static OCTAVO_INLINE Sums start(int32_t) { return vdupq_n_s32(0); }
    static OCTAVO_INLINE Weights weights(Bytes bytes) { return as_signed(NIBBLES ? bytes : bytes ^ uint8_t(128)); }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) { return as_signed(bytes); }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
        sums = vdotq_s32(sums, w, x);
        keep(sums);
    }
    static OCTAVO_INLINE I<4> finish(Sums sums, int32_t) { return (I<4>)sums; }
};

#else

template <bool NIBBLES>
struct Dot {
    struct Sums {
        int32x4_t low, high;  // two columns each: (k 0 and 1, k 2 and 3) of one, then of the next
    };
    typedef int8x16_t Weights;
    typedef int8x16_t Inputs;

    static OCTAVO_INLINE Sums start(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
    static OCTAVO_INLINE Weights weights(Bytes bytes) { return as_signed(NIBBLES ? bytes : bytes ^ uint8_t(128)); }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) { return as_signed(bytes); }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
        sums.low = vpadalq_s16(sums.low, vmull_s8(vget_low_s8(w), vget_low_s8(x)));
        sums.high = vpadalq_s16(sums.high, vmull_high_s8(w, x));
        keep(sums.low);
        keep(sums.high);
    }
    static OCTAVO_INLINE I<4> finish(Sums sums, int32_t) { return (I<4>)vpaddq_s32(sums.low, sums.high); }
};

#endif

#else

template <bool NIBBLES>
struct Dot {
    typedef I<kFloats> Sums;
    typedef Bytes Weights;
    typedef Bytes Inputs;

    static OCTAVO_INLINE Sums start(int32_t offset) { return NIBBLES ? Sums{} : Sums{} + offset; }
    static OCTAVO_INLINE Weights weights(Bytes bytes) { return bytes; }
    static OCTAVO_INLINE Inputs inputs(Bytes bytes) { return bytes; }
    static OCTAVO_INLINE void add(Sums& sums, Weights w, Inputs x) {
        for (int i = 0; i < 4 * kFloats; ++i) sums[i / 4] += int32_t(w[i]) * int8_t(x[i]);
    }
    static OCTAVO_INLINE I<kFloats> finish(Sums sums, int32_t) { return sums; }
};

#endif

}  // namespace
}  // namespace octavo::OCTAVO_ISA
