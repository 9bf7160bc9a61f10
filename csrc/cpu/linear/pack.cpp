#include "linear/pack.h"

#include <algorithm>

namespace octavo {
namespace {

constexpr int64_t kBlock = 16;  // steps of k transposed at a time: the lines read and written stay in the first cache

// Where column j of a panel lies in its row of values.
int64_t place_of(const PanelLayout& layout, int64_t j) {
    int64_t lanes = layout.columns / 2;
    return layout.storage == Storage::bf16 ? 2 * (j % lanes) + j / lanes : j;
}

template <class T>
void pack_values(const PanelLayout& layout, const Matrix& weight, int64_t panel, T* to) {
    const T* from = static_cast<const T*>(weight.data) + panel * layout.columns * weight.n_stride;
    int64_t columns = std::min(layout.columns, weight.n - panel * layout.columns);
    for (int64_t begin = 0; begin < layout.k; begin += kBlock) {
        int64_t end = std::min(begin + kBlock, layout.k);
        for (int64_t j = 0; j < layout.columns; ++j) {
            T* target = to + place_of(layout, j);
            const T* source = from + j * weight.n_stride;
            if (j >= columns) {
                for (int64_t k = begin; k < end; ++k) target[k * layout.columns] = 0;
            } else if (weight.k_stride == 1 && end - begin == kBlock) {
                for (int64_t k = 0; k < kBlock; ++k) target[(begin + k) * layout.columns] = source[begin + k];
            } else {
                for (int64_t k = begin; k < end; ++k) target[k * layout.columns] = source[k * weight.k_stride];
            }
        }
    }
}

template <class T>
void unpack_values(const T* from, int64_t stride, int64_t count, T* row) {
    for (int64_t i = 0; i < count; ++i) row[i] = from[i * stride];
}

}  // namespace

int64_t bytes_of(Storage storage) { return storage == Storage::f32 ? 4 : 2; }

void pack_panel(const PanelLayout& layout, const Matrix& weight, int64_t panel, void* panels) {
    int64_t first = panel * layout.columns * layout.k;
    if (layout.storage == Storage::f32)
        pack_values(layout, weight, panel, static_cast<uint32_t*>(panels) + first);
    else
        pack_values(layout, weight, panel, static_cast<uint16_t*>(panels) + first);
}

void unpack_row(const PanelLayout& layout, const void* panels, int64_t n, int64_t begin, int64_t count, void* row) {
    int64_t first = (n / layout.columns * layout.k + begin) * layout.columns + place_of(layout, n % layout.columns);
    if (layout.storage == Storage::f32)
        unpack_values(static_cast<const uint32_t*>(panels) + first, layout.columns, count, static_cast<uint32_t*>(row));
    else
        unpack_values(static_cast<const uint16_t*>(panels) + first, layout.columns, count, static_cast<uint16_t*>(row));
}

}  // namespace octavo
