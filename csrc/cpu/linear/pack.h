// Between a weight matrix and its panels (the layout is described in linear.h).
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace octavo {

struct PanelLayout {
    int64_t columns;  // of a panel
    int64_t k;
    Storage storage;
};

// Strides in elements.
struct Matrix {
    const void* data;
    int64_t n, n_stride, k_stride;
};

int64_t bytes_of(Storage storage);

void pack_panel(const PanelLayout& layout, const Matrix& weight, int64_t panel, void* panels);

// The `count` stored values from k = `begin` on of row n of the weight.
void unpack_row(const PanelLayout& layout, const void* panels, int64_t n, int64_t begin, int64_t count, void* row);

}  // namespace octavo
