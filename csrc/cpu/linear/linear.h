// The linear layer's weights in memory, and the table of functions that each instruction set provides for them.
//
// A weight [N, K] is kept in panels of `panel_columns` rows of it, the columns of x * weight^T; the last one is filled
// up with zeros. Inside a panel k is the outer dimension: for each k one value a column, two vectors of the instruction
// set. float32 and float16 columns are in order. bfloat16 is woven: each 32-bit word holds a column of the first vector
// in its low half and the same lane of the second vector in its high half, so that one load, a shift and a mask give
// both.
#pragma once

#include <cstdint>

namespace octavo {

enum class Storage : int { f32, bf16, f16 };
constexpr int kStorages = 3;

// y = x * weight^T + bias. x [rows, k] with a stride between its rows, y [rows, n]; bias is filled up with zeros to
// whole panels, or null. Strides are in elements.
struct LinearJob {
    const float* x;
    int64_t x_stride;
    const void* panels;
    const float* bias;
    float* y;
    int64_t rows, n, k;
};

struct LinearKernels {
    int panel_columns;
    int tile_rows;  // rows of the largest tile: blocks of rows are best multiples of it
    // The rows [row_begin, row_end) of the columns of panels [panel_begin, panel_end). One function a Storage.
    void (*linear[kStorages])(const LinearJob&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                              int64_t panel_end);
    // `count` stored values to float32, exactly. One function a Storage.
    void (*widen[kStorages])(const void* source, float* target, int64_t count);
};

}  // namespace octavo
