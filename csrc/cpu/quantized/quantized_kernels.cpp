// The linear layer over few bits for one instruction set: the input to 8 bits, which tiles cover a range of panels, and
// rows of a weight back in float32.
#include "quantized/quantized.h"

#include "quantized/tile.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

#ifndef TILE_ROWS
#if defined(__AVX512VNNI__)
#define TILE_ROWS 6
#define TILE_VECTORS 2
#elif defined(__AVX2__)
#define TILE_ROWS 4
#define TILE_VECTORS 2
#elif defined(__aarch64__)
#define TILE_ROWS 4
#define TILE_VECTORS 4
#else
#define TILE_ROWS 3
#define TILE_VECTORS 1
#endif
#endif
constexpr int kTileRows = TILE_ROWS;
constexpr int kTileVectors = TILE_VECTORS;

constexpr int64_t kTilesAsStored = 2;  // so many tiles open nibbles on their own; for more a panel is opened before

// ---- the input ---------------------------------------------------------------------------------------------------------

constexpr int kVectorsOfGroup = kGroup / kFloats;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kTinyBits = 0x03800000u;  // 2^-120: 127 divided by less could be infinite

template <int W>
OCTAVO_INLINE int32_t largest_lane(I<W> x) {
    int32_t lanes[W];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

template <int W>
OCTAVO_INLINE int32_t sum_of_lanes(I<W> x) {
    int32_t lanes[W];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// Keeps a product from being contracted with a sum: then every instruction set rounds it the same.
OCTAVO_INLINE F<kFloats> rounded(F<kFloats> x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

OCTAVO_INLINE void quantize_group(const float* x, InputGroup& group) {
    F<kFloats> values[kVectorsOfGroup];
    I<kFloats> largest{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfGroup; ++v) {
        values[v] = load<kFloats>(x + v * kFloats);
        I<kFloats> bits = (I<kFloats>)values[v] & 0x7fffffff;  // in the order of the magnitudes, then infinity, then NaN
        I<kFloats> is_larger = bits > largest;
        largest = (is_larger & bits) | (~is_larger & largest);
    }
    uint32_t bits = uint32_t(largest_lane<kFloats>(largest));
    bool is_finite = bits < kInfinityBits;
    float magnitude = 0.0f, factor = 0.0f;
    if (is_finite && bits >= kTinyBits) {
        memcpy(&magnitude, &bits, sizeof bits);
        factor = 127.0f / magnitude;
    }
    I<kFloats> sums{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfGroup; ++v) {
        F<kFloats> shifted = rounded(values[v] * factor) + kRounder;
        I<kFloats> integers = (I<kFloats>)shifted - (I<kFloats>)splat<kFloats>(kRounder);
        if (!is_finite) integers = I<kFloats>{};
        sums += integers;
        typedef int8_t Narrow __attribute__((vector_size(kFloats)));
        Narrow narrow = __builtin_convertvector(integers, Narrow);
        memcpy(group.values + v * kFloats, &narrow, sizeof narrow);
    }
    int32_t sum = sum_of_lanes<kFloats>(sums);
    group.scale = is_finite ? magnitude * (1.0f / 127.0f) : __builtin_nanf("");  // a row's result is then NaN as well
    group.scaled_sum = group.scale * float(sum);
    group.offset = -128 * sum;
    group.unused = 0;
}

void quantize(const float* x, int64_t k, InputGroup* groups, int64_t stride) {
    for (int64_t g = 0; g < k / kGroup; ++g) quantize_group(x + g * kGroup, groups[g * stride]);
}

// ---- the product -------------------------------------------------------------------------------------------------------

// The panel of a tile and where its results go.
struct Target {
    Tile tile;
    const QuantizedJob& job;
    float* y;
    int64_t column, columns;  // of the segment: the first of the panel, and how many of it exist
};

template <int ROWS, int VECTORS>
OCTAVO_INLINE void store_results(const Target& t, int first_vector, const Results<ROWS, VECTORS>& results) {
    const QuantizedSegment& segment = *t.job.segment;
    float factor;
    uint32_t bits = uint32_t(segment.exponent + 127) << 23;
    memcpy(&factor, &bits, sizeof bits);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            int64_t column = (first_vector + v) * kFloats;
            F<kFloats> result = results.of[r][v] * factor;  // a power of two: exact
            if (segment.bias) result = result + load<kFloats>(segment.bias + t.column + column);
            float* y = t.y + r * t.job.y_stride + column;
            if (column + kFloats <= t.columns) store<kFloats>(y, result);
            else if (column < t.columns) memcpy(y, &result, (t.columns - column) * sizeof(float));
        }
    }
}

using RunPanel = void (*)(const Target&);

// A tile of rows with all columns of a panel.
template <Form FORM, int ROWS>
void run_panel(const Target& target) {
    constexpr int vectors = ROWS == 1 ? kPanelVectors : kTileVectors;
#pragma GCC unroll 1
    for (int v = 0; v < kPanelVectors; v += vectors) {
        Tile tile = target.tile;
        tile.scales += v * kFloats * 2;
        tile.values += v * kBytesOfVector;
        Results<ROWS, vectors> results;
        run_tile<FORM, ROWS, vectors>(tile, results);
        store_results<ROWS, vectors>(target, v, results);
    }
}

template <Form FORM, int ROWS>
RunPanel run_panel_of(int rows) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return run_panel_of<FORM, ROWS - 1>(rows);
    }
    return run_panel<FORM, ROWS>;
}

// The nibbles of a panel, a byte each.
void open_panel(const char* values, int64_t groups, char* opened) {
    for (int64_t g = 0; g < groups; ++g) {
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            for (int v = 0; v < kPanelVectors; ++v) {
                Bytes both = load_bytes(values + pair * kBytesOfStep + v * kBytesOfVector);
                Bytes even = both & uint8_t(15), odd = (Bytes)((U<kFloats>)both >> 4) & uint8_t(15);
                memcpy(opened + 2 * pair * kBytesOfStep + v * kBytesOfVector, &even, sizeof even);
                memcpy(opened + (2 * pair + 1) * kBytesOfStep + v * kBytesOfVector, &odd, sizeof odd);
            }
        }
        values += bytes_of_group(4);
        opened += kGroup * kPanelColumns;
    }
}

template <Form FORM>
void run_tiles(const QuantizedJob& job, int64_t panel, Tile tile, int64_t bytes) {
    int64_t column = panel * kPanelColumns;
    Target target{tile, job, nullptr, column, job.segment->n - column};
    int64_t step = (bytes / job.num_tiles / tile.groups + 63) / 64 * 64;
    for (int64_t i = 0; i < job.num_tiles; ++i) {
        const InputTile& rows = job.tiles[i];
        target.tile.x = rows.groups;
        target.tile.ahead = tile.ahead + bytes * i / job.num_tiles;
        target.tile.ahead_step = step;
        target.y = rows.y + job.segment->column + column;
        run_panel_of<FORM, kTileRows>(rows.rows)(target);
    }
}

void multiply(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end, char* scratch) {
    const QuantizedSegment& segment = *job.segment;
    int64_t groups = job.k / kGroup, step = bytes_of_group(segment.bits), bytes = groups * step;
    bool is_opened = segment.bits == 4 && job.num_tiles > kTilesAsStored;
    for (int64_t p = panel_begin; p < panel_end; ++p) {
        const char* panel = segment.panels + p * bytes;
        const char* values = panel + (segment.bits == 8 ? 1 : 2) * kBytesOfScales;
        Tile tile{nullptr, panel, values, step, step, groups, panel + bytes, 0};
        if (segment.bits == 8) {
            run_tiles<Form::bytes>(job, p, tile, bytes);
        } else if (is_opened) {
            open_panel(values, groups, scratch);
            tile.values = scratch;
            tile.values_step = kGroup * kPanelColumns;
            run_tiles<Form::opened>(job, p, tile, bytes);
        } else {
            run_tiles<Form::nibbles>(job, p, tile, bytes);
        }
    }
}

// ---- a row of a weight -------------------------------------------------------------------------------------------------

OCTAVO_INLINE float f16_at(const char* p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return f16_bits_to_f32<4>(U<4>{bits})[0];
}

void dequantize(const QuantizedSegment& segment, int64_t k, int64_t n, float* row) {
    int64_t step = bytes_of_group(segment.bits), column = n % kPanelColumns;
    const char* group = segment.panels + n / kPanelColumns * (k / kGroup) * step;
    bool is_bytes = segment.bits == 8;
    float factor;
    uint32_t bits = uint32_t(segment.exponent + 127) << 23;
    memcpy(&factor, &bits, sizeof bits);
    for (int64_t g = 0; g < k / kGroup; ++g, group += step, row += kGroup) {
        float scale = f16_at(group + 2 * column);
        float minimum = is_bytes ? 0.0f : f16_at(group + kBytesOfScales + 2 * column);
        const char* values = group + (is_bytes ? 1 : 2) * kBytesOfScales + 4 * column;
        for (int i = 0; i < kGroup; ++i) {
            int s = i / 4;
            uint8_t byte = uint8_t(values[(is_bytes ? s : s / 2) * kBytesOfStep + i % 4]);
            int value = is_bytes ? byte - 128 : s % 2 ? byte >> 4 : byte & 15;
            row[i] = (float(value) * scale + minimum) * factor;  // the product is exact, fused or not
        }
    }
}

#define OCTAVO_NAME_OF(name) #name
#define OCTAVO_NAME(name) OCTAVO_NAME_OF(name)

}  // namespace

extern const QuantizedKernels quantized_kernels;
const QuantizedKernels quantized_kernels{OCTAVO_NAME(OCTAVO_ISA), kTileRows, quantize, multiply, dequantize};

}  // namespace octavo::OCTAVO_ISA
