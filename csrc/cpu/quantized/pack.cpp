#include "quantized/pack.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

// The 32 values of a group, one a byte, as the kernels want them.
void read_group(const QuantizedRows& rows, int64_t row, int64_t group, uint8_t* values) {
    const uint8_t* source = rows.values + row * rows.row_bytes + group * kGroup * rows.bits / 8;
    if (rows.bits == 8) {
        for (int i = 0; i < kGroup; ++i) values[i] = uint8_t(source[i] + 128);
    } else {
        for (int i = 0; i < kGroup / 2; ++i) {
            values[2 * i] = source[i] & 15;
            values[2 * i + 1] = source[i] >> 4;
        }
    }
}

void pack_group(const QuantizedRows& rows, int64_t first, int64_t columns, int64_t group, char* target) {
    int64_t groups = rows.k / kGroup;
    char* packed = target + bytes_before_values(rows.bits);
    for (int64_t column = 0; column < columns; ++column) {
        int64_t row = first + column, at = row * groups + group;
        std::memcpy(target + 2 * column, rows.scales + at, 2);
        if (rows.minima) std::memcpy(target + kBytesOfScales + 2 * column, rows.minima + at, 2);
        uint8_t values[kGroup];
        read_group(rows, row, group, values);
        for (int step = 0; step < kSteps; ++step) {
            const uint8_t* source = values + 4 * step;
            if (rows.bits == 8) {
                std::memcpy(packed + step * kBytesOfStep + 4 * column, source, 4);
            } else if (step % 2 == 0) {
                uint8_t both[4];
                for (int i = 0; i < 4; ++i) both[i] = uint8_t(source[i] | source[i + 4] << 4);
                std::memcpy(packed + step / 2 * kBytesOfStep + 4 * column, both, 4);
            }
        }
    }
}

}  // namespace

void pack_panel(const QuantizedRows& rows, int64_t panel, char* panels) {
    int64_t first = panel * kPanelColumns, columns = std::min<int64_t>(kPanelColumns, rows.n - first);
    int64_t groups = rows.k / kGroup, step = bytes_of_group(rows.bits);
    char* target = panels + panel * groups * step;
    if (columns < kPanelColumns) std::memset(target, 0, groups * step);
    for (int64_t group = 0; group < groups; ++group, target += step) {
        if (rows.bits == 4 && !rows.minima) std::memset(target + kBytesOfScales, 0, kBytesOfScales);
        pack_group(rows, first, columns, group, target);
    }
}

}  // namespace octavo
