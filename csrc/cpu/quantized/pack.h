// Brings rows of few bits into panels (the layout is described in quantized.h).
#pragma once

#include <cstdint>

#include "quantized/quantized.h"

namespace octavo {

// Rows as they come: 8 bits: int8 [n, k]; 4 bits: [n, k / 2] with the even k in the low half of a byte. Scales and
// minima are float16 [n, k / 32]; minima may be null.
struct QuantizedRows {
    const uint8_t* values;
    int64_t row_bytes;  // from one row to the next
    const uint16_t *scales, *minima;
    int64_t n, k, bits;
};

void pack_panel(const QuantizedRows& rows, int64_t panel, char* panels);

}  // namespace octavo
