// The linear layer over few bits for one instruction set: the input to 8 bits, which tiles cover a range of panels, and
// rows of a weight back in float32.
#include "quantized/quantized.h"

#include "quantized/tile.h"
#include "simd.h"
#if defined(__AMX_INT8__)
#include "quantized/amx.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kTileRows = 8;
constexpr int tile_vectors(int) { return 2; }
#elif defined(__AVX2__) && !defined(__AVXVNNI__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int bits) { return bits == 8 ? 1 : 2; }
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int) { return 2; }
#elif defined(__aarch64__)
constexpr int kTileRows = 4;
constexpr int tile_vectors(int) { return 4; }
#else
constexpr int kTileRows = 3;
constexpr int tile_vectors(int) { return 1; }
#endif

constexpr int kStreams = 4;  // panels that one tile reads at a time

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

OCTAVO_INLINE float power_of_two(int64_t exponent) {
    uint32_t bits = uint32_t(exponent + 127) << 23;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// ---- the input ---------------------------------------------------------------------------------------------------------

constexpr int kVectorsOfGroup = kGroup / kFloats;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kTinyBits = 0x03800000u;  // 2^-120: 127 divided by less could be infinite

#if defined(__AVX512F__)
OCTAVO_INLINE int32_t largest_lane(I<16> x) { return _mm512_reduce_max_epi32((__m512i)x); }
OCTAVO_INLINE int32_t sum_of_lanes(I<16> x) { return _mm512_reduce_add_epi32((__m512i)x); }
#elif defined(__AVX2__)
template <class Combine>
OCTAVO_INLINE int32_t combine_lanes(I<8> x, Combine&& combine) {
    __m128i four = combine(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    __m128i two = combine(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(combine(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}
OCTAVO_INLINE int32_t largest_lane(I<8> x) {
    return combine_lanes(x, [](__m128i a, __m128i b) __attribute__((always_inline)) { return _mm_max_epi32(a, b); });
}
OCTAVO_INLINE int32_t sum_of_lanes(I<8> x) {
    return combine_lanes(x, [](__m128i a, __m128i b) __attribute__((always_inline)) { return _mm_add_epi32(a, b); });
}
#else
OCTAVO_INLINE int32_t largest_lane(I<kFloats> x) {
    int32_t largest = x[0];
    for (int i = 1; i < kFloats; ++i) largest = x[i] > largest ? x[i] : largest;
    return largest;
}
OCTAVO_INLINE int32_t sum_of_lanes(I<kFloats> x) {
    int32_t sum = x[0];
    for (int i = 1; i < kFloats; ++i) sum += x[i];
    return sum;
}
#endif

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
    uint32_t bits = uint32_t(largest_lane(largest));
    bool is_finite = bits < kInfinityBits;
    float magnitude = 0.0f, factor = 0.0f;
    if (is_finite && bits >= kTinyBits) {
        memcpy(&magnitude, &bits, sizeof bits);
        factor = 127.0f / magnitude;
    }
    I<kFloats> sums{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfGroup; ++v) {
        F<kFloats> scaled = values[v] * factor;
        keep(scaled);  // not contracted with the sum: every instruction set rounds it the same
        F<kFloats> shifted = scaled + kRounder;
        I<kFloats> integers = (I<kFloats>)shifted - (I<kFloats>)splat<kFloats>(kRounder);
        if (!is_finite) integers = I<kFloats>{};
        sums += integers;
        typedef int8_t Narrow __attribute__((vector_size(kFloats)));
        Narrow narrow = __builtin_convertvector(integers, Narrow);
        memcpy(group.values + v * kFloats, &narrow, sizeof narrow);
    }
    int32_t sum = sum_of_lanes(sums);
    group.scale = is_finite ? magnitude * (1.0f / 127.0f) : __builtin_nanf("");  // a row's result is then NaN as well
    group.scaled_sum = group.scale * float(sum);
    group.offset = -128 * sum;
    group.unused = 0;
}

void quantize(const float* x, int64_t k, InputGroup* groups, int64_t stride) {
    for (int64_t g = 0; g < k / kGroup; ++g) quantize_group(x + g * kGroup, groups[g * stride]);
}

// ---- the product -------------------------------------------------------------------------------------------------------

template <int ROWS>
OCTAVO_INLINE void store_panel(const QuantizedJob& job, int64_t panel, float* y, const PanelSums<ROWS>& results) {
    const QuantizedSegment& segment = *job.segment;
    float factor = power_of_two(segment.exponent);
    int64_t begin = panel * kPanelColumns, columns = segment.n - begin;  // of the panel; if it has fewer, it is padded
    y += segment.column + begin;
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
        int64_t column = v * kFloats;
        F<kFloats> bias = segment.bias ? load<kFloats>(segment.bias + begin + column) : F<kFloats>{};
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            F<kFloats> result = results.of[v][r] * factor + bias;  // the product is exact
            float* target = y + r * job.y_stride + column;
            if (column + kFloats <= columns) store<kFloats>(target, result);
            else if (column < columns) memcpy(target, &result, (columns - column) * sizeof(float));
        }
    }
}

template <int BITS, int ROWS, bool IS_STREAM>
void run_panels(const QuantizedJob& job, const InputTile& rows, const Tile& tile, int64_t panel) {
    PanelSums<ROWS> results[IS_STREAM ? kStreams : 1];
    constexpr int vectors = IS_STREAM && ROWS == 1 ? kPanelVectors : tile_vectors(BITS);
    if constexpr (IS_STREAM) run_streams<BITS, ROWS, vectors>(tile, results);
    else run_shared<BITS, ROWS, vectors>(tile, *results);
    for (int p = 0; p < tile.num_panels; ++p) store_panel<ROWS>(job, panel + p, rows.y, results[p]);
}

using RunPanels = void (*)(const QuantizedJob&, const InputTile&, const Tile&, int64_t panel);

// Of several tiles, which are balanced, none is smaller than half of the largest.
template <int BITS, int ROWS, bool IS_STREAM>
RunPanels run_panels_of(int rows) {
    if constexpr (ROWS > (IS_STREAM ? 1 : kTileRows / 2)) {
        if (rows < ROWS) return run_panels_of<BITS, ROWS - 1, IS_STREAM>(rows);
    }
    return run_panels<BITS, ROWS, IS_STREAM>;
}

template <int BITS>
void stream_panels(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    int64_t groups = job.k / kGroup, bytes = groups * bytes_of_group(BITS), panels = panel_end - panel_begin;
    const InputTile& rows = *job.tiles;
    RunPanels run = run_panels_of<BITS, kTileRows, true>(rows.rows);
    int64_t rounds = divide_up(panels, kStreams);
    for (int64_t round = 0; round < rounds; ++round) {
        int64_t p = panel_begin + panels * round / rounds, next = panel_begin + panels * (round + 1) / rounds;
        run(job, rows, {rows.groups, job.segment->panels + p * bytes, int(next - p), bytes, groups, nullptr, 0}, p);
    }
}

// Each panel is used by all tiles before the next one, of which each of them brings a part close.
template <int BITS>
void share_panels(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    int64_t groups = job.k / kGroup, bytes = groups * bytes_of_group(BITS);
    int64_t rounds = groups * (kPanelVectors / tile_vectors(BITS));  // of a tile, each with a prefetch
    for (int64_t p = panel_begin; p < panel_end; ++p) {
        const char* panel = job.segment->panels + p * bytes;
        for (int64_t i = 0; i < job.num_tiles; ++i) {
            const InputTile& rows = job.tiles[i];
            const char* ahead = panel + bytes + bytes * i / job.num_tiles;
            Tile tile{rows.groups, panel, 1, 0, groups, ahead, divide_up(bytes, job.num_tiles * rounds)};
            run_panels_of<BITS, kTileRows, false>(rows.rows)(job, rows, tile, p);
        }
    }
}

template <int BITS>
void run_vectors(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    auto run = job.num_tiles == 1 ? stream_panels<BITS> : share_panels<BITS>;
    run(job, panel_begin, panel_end);
}

#if defined(__AMX_INT8__)

constexpr int64_t kScratchOfGroup = sizeof(OpenGroup);

// With fewer rows, to open the panels costs more than AMX saves.
int tile_rows(int64_t rows) { return rows < 8 * kAmxRows ? kTileRows : kAmxRows; }

template <int BITS, int ROWS>
void run_open_tile(const QuantizedJob& job, const InputTile& rows, const OpenGroup* open, int64_t panel) {
    if constexpr (ROWS > kAmxRows / 2) {
        if (rows.rows < ROWS) return run_open_tile<BITS, ROWS - 1>(job, rows, open, panel);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kPanelVectors; ++v)
            __builtin_prefetch(rows.y + r * job.y_stride + job.segment->column + panel * kPanelColumns + v * kFloats, 1);
    PanelSums<ROWS> results;
    run_open<BITS, ROWS>(rows.groups, open, job.k / kGroup, results);
    store_panel<ROWS>(job, panel, rows.y, results);
}

template <int BITS>
void open_panels(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    int64_t groups = job.k / kGroup, bytes = groups * bytes_of_group(BITS);
    auto* open = (OpenGroup*)job.scratch;
    TilesInUse tiles;
    for (int64_t p = panel_begin; p < panel_end; ++p) {
        open_panel<BITS>(job.segment->panels + p * bytes, groups, open);
        for (int64_t i = 0; i < job.num_tiles; ++i)
            run_open_tile<BITS, kAmxRows>(job, job.tiles[i], open, p);
    }
}

template <int BITS>
void multiply_panels(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    auto run = job.tiles->rows > kTileRows ? open_panels<BITS> : run_vectors<BITS>;
    run(job, panel_begin, panel_end);
}

#else

constexpr int64_t kScratchOfGroup = 0;

int tile_rows(int64_t) { return kTileRows; }

template <int BITS>
void multiply_panels(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    run_vectors<BITS>(job, panel_begin, panel_end);
}

#endif

void multiply(const QuantizedJob& job, int64_t panel_begin, int64_t panel_end) {
    auto run = job.segment->bits == 8 ? multiply_panels<8> : multiply_panels<4>;
    run(job, panel_begin, panel_end);
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
    float factor = power_of_two(segment.exponent);
    for (int64_t g = 0; g < k / kGroup; ++g, group += step, row += kGroup) {
        float scale = f16_at(group + 2 * column);
        float minimum = is_bytes ? 0.0f : f16_at(group + kBytesOfScales + 2 * column);
        const char* values = group + bytes_before_values(segment.bits) + 4 * column;
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
const QuantizedKernels quantized_kernels{OCTAVO_NAME(OCTAVO_ISA), tile_rows, kScratchOfGroup, quantize,
                                         multiply, dequantize};

}  // namespace octavo::OCTAVO_ISA
