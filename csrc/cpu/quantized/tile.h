// The innermost part of the linear layer over few bits: a tile of ROWS rows of the input times some panels.
//
// Every output is one float32 sum over the groups of K in order: of each group its exact integer sum times the product
// of both scales, then with 4 bits the minimum times the scaled sum of the inputs. Neither the shape of the tile nor
// where the weights are read from changes a bit of it.
#pragma once

#include "quantized/dot.h"
#include "quantized/quantized.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPanelVectors = kPanelColumns / kFloats;
constexpr int kBytesOfVector = 4 * kFloats;
constexpr int kBytesAhead = 2048;  // of what is read in each stream
struct Tile {
    const InputGroup* x;  // [groups][ROWS]
    const char* panels;
    int num_panels;
    int64_t panel_stride;  // bytes from one panel to the next
    int64_t groups;
    const char* ahead;   // memory to bring close meanwhile; it may reach past the end of what there is
    int64_t ahead_step;  // bytes of it for one group
};

// total + a * b, in one operation where AMX has to give the same bits, and else as the compiler likes.
OCTAVO_INLINE F<kFloats> add_product(F<kFloats> total, F<kFloats> a, F<kFloats> b) {
#if defined(__AVX512F__)
    return (F<kFloats>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#else
    return total + a * b;
#endif
}

template <int ROWS>
struct PanelSums {
    F<kFloats> of[kPanelVectors][ROWS];
};

template <class D, int ROWS, int VECTORS>
struct IntegerSums {
    typename D::Sums of[ROWS][VECTORS];
};

// One step of k: the weights of each vector with each row.
template <class D, int ROWS, int VECTORS>
OCTAVO_INLINE void step(IntegerSums<D, ROWS, VECTORS>& sums, const InputGroup* x, int k, const Bytes (&bytes)[VECTORS]) {
    typename D::Weights w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) w[v] = D::weights(bytes[v]);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        typename D::Inputs inputs = D::inputs(repeat_4_bytes(x[r].values + 4 * k));
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) D::add(sums.of[r][v], w[v], inputs);
    }
}

template <int BITS, class D, int ROWS, int VECTORS>
OCTAVO_INLINE void all_steps(IntegerSums<D, ROWS, VECTORS>& sums, const InputGroup* x, const char* values) {
    Bytes bytes[VECTORS], odd[VECTORS];
#pragma GCC unroll 8
    for (int k = 0; k < kSteps; k += BITS == 4 ? 2 : 1) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            bytes[v] = load_bytes(values + v * kBytesOfVector);
            if constexpr (BITS == 4) {
                odd[v] = (Bytes)((U<kFloats>)bytes[v] >> 4) & uint8_t(15);
                bytes[v] = bytes[v] & uint8_t(15);
            }
        }
        step<D, ROWS, VECTORS>(sums, x, k, bytes);
        if constexpr (BITS == 4) step<D, ROWS, VECTORS>(sums, x, k + 1, odd);
        values += kBytesOfStep;
    }
}

// One group of a panel: VECTORS vectors of columns from `first` on.
template <int BITS, int ROWS, int VECTORS>
OCTAVO_INLINE void add_group(const InputGroup* x, const char* group, int first, F<kFloats> (*results)[ROWS]) {
    using D = Dot<BITS == 4>;
    asm("" : "+r"(x));  // or the compiler takes all it loads from x out of the loops, and has to keep it in memory
    IntegerSums<D, ROWS, VECTORS> sums;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums.of[r][v] = D::start(x[r].offset);
    all_steps<BITS, D, ROWS, VECTORS>(sums, x, group + bytes_before_values(BITS) + first * kBytesOfVector);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        const f16* scales = (const f16*)group + (first + v) * kFloats;
        F<kFloats> scale = load<kFloats>(scales), minimum{};
        if constexpr (BITS == 4) minimum = load<kFloats>(scales + kPanelColumns);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            F<kFloats> sum = __builtin_convertvector(D::finish(sums.of[r][v], x[r].offset), F<kFloats>);
            F<kFloats> result = add_product(results[v][r], sum, scale * x[r].scale);
            if constexpr (BITS == 4) result = add_product(result, minimum, splat<kFloats>(x[r].scaled_sum));
            results[v][r] = result;
        }
    }
}

// Several panels at once, each a stream from memory that is fetched ahead.
template <int BITS, int ROWS, int VECTORS>
OCTAVO_INLINE void run_streams(const Tile& t, PanelSums<ROWS>* results) {
    constexpr int64_t bytes = bytes_of_group(BITS);
    memset(results, 0, t.num_panels * sizeof *results);
    for (int64_t g = 0; g < t.groups; ++g) {
        const char* group = t.panels + g * bytes;
        for (int p = 0; p < t.num_panels; ++p) {
#pragma GCC unroll 32
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(group + kBytesAhead + line);
#pragma GCC unroll 1
            for (int first = 0; first < kPanelVectors; first += VECTORS)
                add_group<BITS, ROWS, VECTORS>(t.x + g * ROWS, group, first, results[p].of + first);
            group += t.panel_stride;
        }
    }
}

// One panel, which other tiles use as well; its sums stay in registers.
template <int BITS, int ROWS, int VECTORS>
OCTAVO_INLINE void run_shared(const Tile& t, PanelSums<ROWS>& results) {
    const char* ahead = t.ahead;
#pragma GCC unroll 1
    for (int first = 0; first < kPanelVectors; first += VECTORS) {
        F<kFloats> sums[VECTORS][ROWS] = {};
        for (int64_t g = 0; g < t.groups; ++g) {
            for (int64_t line = 0; line < t.ahead_step; line += 64) __builtin_prefetch(ahead + line, 0, 2);
            ahead += t.ahead_step;
            add_group<BITS, ROWS, VECTORS>(t.x + g * ROWS, t.panels + g * bytes_of_group(BITS), first, sums);
        }
        memcpy(results.of + first, sums, sizeof sums);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
