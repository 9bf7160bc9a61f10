// The innermost part of the linear layer over few bits: a tile of ROWS rows of the input times VECTORS vectors of the
// columns of a panel.
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
constexpr int kBytesOfStep = 4 * kPanelColumns;

// How the values of a panel are read.
enum class Form {
    bytes,    // 8 bits
    nibbles,  // 4 bits, as stored
    opened,   // 4 bits, a byte each in memory of their own
};

struct Tile {
    const InputGroup* x;  // [groups][ROWS]
    const char* scales;   // of the first group of the panel, the minima behind them
    const char* values;
    int64_t scales_step, values_step;  // bytes from one group to the next
    int64_t groups;
    const char* ahead;   // memory to bring close meanwhile; it may reach past the end of what there is
    int64_t ahead_step;  // bytes of it for one group
};

template <int ROWS, int VECTORS>
struct Results {
    F<kFloats> of[ROWS][VECTORS];
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

template <Form FORM, class D, int ROWS, int VECTORS>
OCTAVO_INLINE void all_steps(IntegerSums<D, ROWS, VECTORS>& sums, const InputGroup* x, const char* values) {
    Bytes bytes[VECTORS];
    if constexpr (FORM == Form::nibbles) {
#pragma GCC unroll 8
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            Bytes odd[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                Bytes both = load_bytes(values + pair * kBytesOfStep + v * kBytesOfVector);
                bytes[v] = both & uint8_t(15);
                odd[v] = (Bytes)((U<kFloats>)both >> 4) & uint8_t(15);
            }
            step<D, ROWS, VECTORS>(sums, x, 2 * pair, bytes);
            step<D, ROWS, VECTORS>(sums, x, 2 * pair + 1, odd);
        }
    } else {
#pragma GCC unroll 8
        for (int k = 0; k < kSteps; ++k) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) bytes[v] = load_bytes(values + k * kBytesOfStep + v * kBytesOfVector);
            step<D, ROWS, VECTORS>(sums, x, k, bytes);
        }
    }
}

template <Form FORM, int ROWS, int VECTORS>
OCTAVO_INLINE void run_tile(Tile t, Results<ROWS, VECTORS>& results) {
    using D = Dot<FORM != Form::bytes>;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) results.of[r][v] = F<kFloats>{};
    for (int64_t g = 0; g < t.groups; ++g) {
        for (int64_t line = 0; line < t.ahead_step; line += 64) __builtin_prefetch(t.ahead + line);
        t.ahead += t.ahead_step;
        IntegerSums<D, ROWS, VECTORS> sums;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums.of[r][v] = D::start(t.x[r].offset);
        all_steps<FORM, D, ROWS, VECTORS>(sums, t.x, t.values);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            const f16* scales = (const f16*)t.scales + v * kFloats;
            F<kFloats> scale = load<kFloats>(scales), minimum{};
            if constexpr (FORM != Form::bytes) minimum = load<kFloats>(scales + kPanelColumns);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                F<kFloats> sum = __builtin_convertvector(D::finish(sums.of[r][v], t.x[r].offset), F<kFloats>);
                F<kFloats> result = results.of[r][v] + sum * (scale * t.x[r].scale);
                if constexpr (FORM != Form::bytes) result = result + minimum * t.x[r].scaled_sum;
                results.of[r][v] = result;
            }
        }
        t.x += ROWS;
        t.scales += t.scales_step;
        t.values += t.values_step;
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
