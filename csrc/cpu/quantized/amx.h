// The same product with AMX, whose one instruction multiplies 12 rows with 16 columns of a whole group of K.
//
// Only the integer sums come from it, and they are exact; what is done with them is what tile.h does, in its order. So
// these kernels have the bits of those with vectors, which take over where there are few rows.
#pragma once

#include "quantized/quantized.h"
#include "quantized/tile.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kAmxRows = 12;  // their sums of 32 columns are 24 of the 32 vector registers
static_assert(kPanelVectors == 2);

// A panel as the tiles take it: values in signed bytes and scales in float32.
struct OpenGroup {
    int8_t values[kPanelVectors][kSteps][kBytesOfVector];
    float scales[kPanelVectors][kFloats];
    float minima[kPanelVectors][kFloats];  // with 4 bits only
};

template <int BITS>
OCTAVO_INLINE void open_group(const char* group, OpenGroup& open) {
    const char* values = group + bytes_before_values(BITS);
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
        const f16* scales = (const f16*)group + v * kFloats;
        store<kFloats>(open.scales[v], load<kFloats>(scales));
        if constexpr (BITS == 4) store<kFloats>(open.minima[v], load<kFloats>(scales + kPanelColumns));
#pragma GCC unroll 8
        for (int k = 0; k < kSteps; k += BITS == 4 ? 2 : 1) {
            Bytes bytes = load_bytes(values + (BITS == 4 ? k / 2 : k) * kBytesOfStep + v * kBytesOfVector);
            if constexpr (BITS == 4) {
                Bytes even = bytes & uint8_t(15), odd = (Bytes)((U<kFloats>)bytes >> 4) & uint8_t(15);
                memcpy(open.values[v][k], &even, sizeof even);
                memcpy(open.values[v][k + 1], &odd, sizeof odd);
            } else {
                bytes ^= uint8_t(128);
                memcpy(open.values[v][k], &bytes, sizeof bytes);
            }
        }
    }
}

// Also brings the panel after it close.
template <int BITS>
void open_panel(const char* panel, int64_t groups, OpenGroup* open) {
    constexpr int64_t bytes = bytes_of_group(BITS);
    for (int64_t g = 0; g < groups; ++g, panel += bytes) {
#pragma GCC unroll 32
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + groups * bytes + line);
        open_group<BITS>(panel, open[g]);
    }
}

// Tile registers: 0 to 3 are sums, 4 and 5 the input, 6 and 7 weights. The compiler knows nothing of them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, kGroup, kGroup, 64, 64};
    uint8_t rows[16] = {kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kSteps, kSteps};
};

struct TilesInUse {
    TilesInUse() {
        TileShapes shapes;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~TilesInUse() { asm volatile("tilerelease" ::: "memory"); }
};

typedef int32_t TileSums[kPanelVectors][kAmxRows][kFloats];

// The integer sums of a group in tile registers SUMS and SUMS + 1.
template <int SUMS>
OCTAVO_INLINE void multiply_group(const InputGroup* x, const OpenGroup& w) {
    asm volatile(
        "tilezero %%tmm%c[first]\n\t"
        "tilezero %%tmm%c[second]\n\t"
        "tileloadd (%[x],%[step],1), %%tmm%c[input]\n\t"
        "tileloadd (%[w],%[line],1), %%tmm6\n\t"
        "tdpbssd %%tmm6, %%tmm%c[input], %%tmm%c[first]\n\t"
        "tileloadd %c[half](%[w],%[line],1), %%tmm7\n\t"
        "tdpbssd %%tmm7, %%tmm%c[input], %%tmm%c[second]" ::[x] "r"(x->values),
        [step] "r"(int64_t(sizeof(InputGroup))), [w] "r"(w.values), [line] "r"(int64_t(kBytesOfVector)),
        [half] "i"(kSteps * kBytesOfVector), [first] "i"(SUMS), [second] "i"(SUMS + 1), [input] "i"(4 + SUMS / 2)
        : "memory");
}

template <int SUMS>
OCTAVO_INLINE void store_sums(TileSums& sums) {
    asm volatile(
        "tilestored %%tmm%c[first], (%[to],%[line],1)\n\t"
        "tilestored %%tmm%c[second], %c[half](%[to],%[line],1)" ::[to] "r"(sums), [line] "r"(int64_t(4 * kFloats)),
        [half] "i"(sizeof sums[0]), [first] "i"(SUMS), [second] "i"(SUMS + 1)
        : "memory");
}

// result + sum * (scale * x.scale), with 4 bits + minimum * x.scaled_sum, rounded where tile.h rounds. By hand: compilers
// keep what two of these share, for which the registers do not suffice, and then write the totals to memory.
template <int BITS>
OCTAVO_INLINE F<kFloats> add_sum(F<kFloats> result, const int32_t* sum, F<kFloats> scale, F<kFloats> minimum,
                                 const InputGroup& x) {
    F<kFloats> value, factor;
    asm volatile(
        "vcvtdq2ps %[sum], %[value]\n\t"
        "vmulps %[x_scale]%{1to16%}, %[scale], %[factor]\n\t"
        "vfmadd231ps %[factor], %[value], %[result]"
        : [result] "+v"(result), [value] "=&v"(value), [factor] "=&v"(factor)
        : [sum] "m"(*(const int32_t(*)[kFloats])sum), [x_scale] "m"(x.scale), [scale] "v"(scale));
    if constexpr (BITS == 4)
        asm volatile("vfmadd231ps %[scaled_sum]%{1to16%}, %[minimum], %[result]"
                     : [result] "+v"(result)
                     : [scaled_sum] "m"(x.scaled_sum), [minimum] "v"(minimum));
    return result;
}

template <int VALUE>
struct Constant {
    constexpr operator int() const { return VALUE; }
};

// f(0), f(1), ... written out before the compiler decides what stays in registers.
template <int COUNT, int BEGIN = 0, class Function>
OCTAVO_INLINE void for_each(Function&& f) {
    if constexpr (BEGIN < COUNT) {
        f(Constant<BEGIN>());
        for_each<COUNT, BEGIN + 1>(f);
    }
}

template <int BITS, int ROWS>
OCTAVO_INLINE void add_sums(const InputGroup* x, const OpenGroup& w, const TileSums& sums, F<kFloats> (&totals)[2][ROWS]) {
    for_each<kPanelVectors>([&](auto v) __attribute__((always_inline)) {
        F<kFloats> scale = load<kFloats>(w.scales[v]), minimum{};
        if constexpr (BITS == 4) minimum = load<kFloats>(w.minima[v]);
        for_each<ROWS>([&](auto r) __attribute__((always_inline)) {
            totals[v][r] = add_sum<BITS>(totals[v][r], sums[v][r], scale, minimum, x[r]);
        });
    });
}

// ROWS rows of the input, of which kAmxRows can be read, times a panel. While the sums of one group are added, those of
// the next are multiplied.
template <int BITS, int ROWS>
OCTAVO_INLINE void run_open(const InputGroup* x, const OpenGroup* w, int64_t groups, PanelSums<ROWS>& results) {
    alignas(64) TileSums sums[2];
    F<kFloats> totals[kPanelVectors][ROWS] = {};
    multiply_group<0>(x, w[0]);
    store_sums<0>(sums[0]);
    if (groups > 1) multiply_group<2>(x + ROWS, w[1]);
    int64_t g = 0;
    for (; g + 3 < groups; g += 2) {
        store_sums<2>(sums[1]);
        multiply_group<0>(x + (g + 2) * ROWS, w[g + 2]);
        add_sums<BITS, ROWS>(x + g * ROWS, w[g], sums[0], totals);
        store_sums<0>(sums[0]);
        multiply_group<2>(x + (g + 3) * ROWS, w[g + 3]);
        add_sums<BITS, ROWS>(x + (g + 1) * ROWS, w[g + 1], sums[1], totals);
    }
    // up to three are left
    if (g + 1 < groups) store_sums<2>(sums[1]);
    if (g + 2 < groups) multiply_group<0>(x + (g + 2) * ROWS, w[g + 2]);
    add_sums<BITS, ROWS>(x + g * ROWS, w[g], sums[0], totals);
    if (g + 2 < groups) store_sums<0>(sums[0]);
    if (g + 1 < groups) add_sums<BITS, ROWS>(x + (g + 1) * ROWS, w[g + 1], sums[1], totals);
    if (g + 2 < groups) add_sums<BITS, ROWS>(x + (g + 2) * ROWS, w[g + 2], sums[0], totals);
    for_each<kPanelVectors>([&](auto v) __attribute__((always_inline)) {
        for_each<ROWS>([&](auto r) __attribute__((always_inline)) { results.of[v][r] = totals[v][r]; });
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
