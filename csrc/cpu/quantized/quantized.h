// Linear layers over weights of 8 and 4 bits: the weights and the input in memory, and the table of functions that each
// instruction set provides for them.
//
// A weight [N, K] comes in segments of rows, each in 8 or 4 bits. Rows share a scale (and with 4 bits a minimum) in
// groups of 32 neighbours along K. A segment is kept in panels of 32 of its rows, the last one filled up with zeros; the
// layout is the same for every instruction set. A panel has for each group of K:
//     scales    [32 columns] float16
//     minima    [32 columns] float16, with 4 bits only
//     8 bits:   [8 steps][32 columns][4 k] uint8, the value plus 128
//     4 bits:   [4 pairs of steps][32 columns][4 k] uint8, the even step in the low half, the odd one in the high half
// so that one vector holds 4 k of several columns: what an instruction for dot products of bytes takes.
//
// The input is brought to 8 bits too, each row and group of 32 with its own scale; sums over a group are exact integers.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int kGroup = 32;         // neighbours along K that share a scale
constexpr int kPanelColumns = 32;  // of a panel
constexpr int kSteps = kGroup / 4;

constexpr int kBytesOfScales = 2 * kPanelColumns;
constexpr int kBytesOfStep = 4 * kPanelColumns;  // with 4 bits: of two steps

// In a group of a panel: where the values begin, and all of it.
constexpr int bytes_before_values(int64_t bits) { return bits == 8 ? kBytesOfScales : 2 * kBytesOfScales; }
constexpr int bytes_of_group(int64_t bits) { return bytes_before_values(bits) + kSteps * kBytesOfStep * int(bits) / 8; }

// Rows of a weight with the same number of bits. octavo/ops/cpu/quantized.py writes these in memory, 8 bytes a field.
struct QuantizedSegment {
    const char* panels;
    const float* bias;  // filled up with zeros to whole panels, or null
    int64_t n;          // rows of it, which are columns of y
    int64_t column;     // the first of them
    int64_t bits;
    int64_t exponent;  // scales and minima are stored times 2^-exponent
};

// Followed in memory by its segments.
struct QuantizedWeight {
    int64_t n, k, num_segments;

    const QuantizedSegment* segments() const { return reinterpret_cast<const QuantizedSegment*>(this + 1); }
};

// 32 values of a row of the input.
struct alignas(16) InputGroup {
    int8_t values[kGroup];
    float scale;
    float scaled_sum;  // scale times the sum of the values
    int32_t offset;    // -128 times the sum of the values: takes back what was added to weights of 8 bits
    int32_t unused;
};

// Rows of the input that are multiplied together.
struct InputTile {
    const InputGroup* groups;  // [k / 32][rows]
    float* y;                  // its first row, column 0
    int rows;
};

struct QuantizedJob {
    const QuantizedSegment* segment;
    const InputTile* tiles;
    int64_t num_tiles, k, y_stride;
    char* scratch;  // for tiles larger than those of one row: scratch_of_group bytes a group of K, at a cache line
};

struct QuantizedKernels {
    const char* name;
    // The most rows of each tile of a product with so many; as many may be read of each, whether it has them or not.
    int (*tile_rows)(int64_t rows);
    int64_t scratch_of_group;
    // x [k] into every `stride`-th group.
    void (*quantize)(const float* x, int64_t k, InputGroup* groups, int64_t stride);
    // All tiles times the panels [panel_begin, panel_end).
    void (*multiply)(const QuantizedJob&, int64_t panel_begin, int64_t panel_end);
    // Row n of the segment in float32.
    void (*dequantize)(const QuantizedSegment&, int64_t k, int64_t n, float* row);
};

}  // namespace octavo
