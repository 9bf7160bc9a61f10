// The linear layer for one instruction set: which tiles cover a range of rows and panels.
#include "linear/linear.h"

#include "linear/tile.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// So many tiles of rows read a panel as it is stored; for more of them it is first brought to float32.
template <class T>
constexpr int64_t kTilesAsStored = 3;
template <>
constexpr int64_t kTilesAsStored<float> = INT64_MAX;
#if !defined(__F16C__)
template <>
constexpr int64_t kTilesAsStored<f16> = 1;
#endif

// The k of one part of the product. A panel that is first brought to float32 should stay in the first cache (32 KB).
template <class T>
constexpr int64_t kPartOfK = sizeof(T) == sizeof(float) ? 640 : 8192 / kPanel;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
using RunTile = void (*)(const Tile<T>&);

// The tile function of 1 .. most_panels(ROWS) panels.
template <class T, int ROWS, int PANELS>
RunTile<T> stream_tile(int panels) {
    if constexpr (PANELS > 1) {
        if (panels < PANELS) return stream_tile<T, ROWS, PANELS - 1>(panels);
    }
    return run_tile<T, ROWS, PANELS, true>;
}

template <class T, int ROWS>
RunTile<T> stream_tile_of(int rows, int panels) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return stream_tile_of<T, ROWS - 1>(rows, panels);
    }
    return stream_tile<T, ROWS, most_panels(ROWS)>(panels);
}

// Of the tiles of many rows, which are balanced, none is smaller than half of the largest.
template <class T, int ROWS>
RunTile<T> shared_tile_of(int rows) {
    if constexpr (ROWS > (kTileRows + 1) / 2) {
        if (rows < ROWS) return shared_tile_of<T, ROWS - 1>(rows);
    }
    return run_tile<T, ROWS, 1, false>;
}

template <class T>
struct Range {
    const LinearJob& job;
    int64_t row_begin, row_end, panel_begin, panel_end;

    int64_t rows() const { return row_end - row_begin; }
    const T* panel(int64_t p) const { return (const T*)job.panels + p * job.k * kPanel; }
    bool is_whole(int64_t p) const { return (p + 1) * kPanel <= job.n; }

    // All rows from panel p on with a part of k.
    Tile<T> tile(int64_t p, int64_t k_begin, int64_t k_end) const {
        Tile<T> t;
        t.x = job.x + row_begin * job.x_stride + k_begin;
        t.x_stride = job.x_stride;
        t.panels = panel(p) + k_begin * kPanel;
        t.panel_stride = job.k * kPanel;
        t.k = k_end - k_begin;
        t.y = job.y + row_begin * job.n + p * kPanel;
        t.y_stride = job.n;
        t.bias = job.bias && k_end == job.k ? job.bias + p * kPanel : nullptr;
        t.is_first = k_begin == 0;
        t.ahead = nullptr;
        t.ahead_step = 0;
        return t;
    }
};

// Runs a tile whose panel has only `columns` columns of y: the tile itself works on whole panels of its own.
template <class T>
void run_cut(RunTile<T> run, Tile<T> t, int rows, int64_t columns) {
    float whole[kTileRows * kPanel] = {};
    float* y = t.y;
    int64_t y_stride = t.y_stride;
    if (!t.is_first)
        for (int r = 0; r < rows; ++r) memcpy(whole + r * kPanel, y + r * y_stride, columns * sizeof(float));
    t.y = whole;
    t.y_stride = kPanel;
    run(t);
    for (int r = 0; r < rows; ++r) memcpy(y + r * y_stride, whole + r * kPanel, columns * sizeof(float));
}

// Up to kTileRows rows: each weight is used once, straight from memory, from several panels at a time.
template <class T>
void few_rows(const Range<T>& range) {
    int rows = int(range.rows());
    int64_t end = range.panel_end - !range.is_whole(range.panel_end - 1);
    int64_t panels = end - range.panel_begin;
    int64_t groups = divide_up(panels, most_panels(rows));
    for (int64_t group = 0; group < groups; ++group) {
        int64_t p = range.panel_begin + panels * group / groups;
        int64_t next = range.panel_begin + panels * (group + 1) / groups;
        stream_tile_of<T, kTileRows>(rows, int(next - p))(range.tile(p, 0, range.job.k));
    }
    if (end < range.panel_end)
        run_cut(stream_tile_of<T, kTileRows>(rows, 1), range.tile(end, 0, range.job.k), rows,
                range.job.n - end * kPanel);
}

template <class T>
OCTAVO_INLINE void widen(const T* source, float* target, int64_t count) {
    int64_t i = 0;
    for (; i + kFloats <= count; i += kFloats) store<kFloats>(target + i, load<kFloats>(source + i));
    if (i == count) return;
    T rest[kFloats] = {};
    memcpy(rest, source + i, (count - i) * sizeof(T));
    float wide[kFloats];
    store<kFloats>(wide, load<kFloats>(rest));
    memcpy(target + i, wide, (count - i) * sizeof(float));
}

// A part of a panel in float32.
template <class T>
OCTAVO_INLINE void widen_panel(const T* source, float* target, int64_t k) {
    for (int64_t i = 0; i < k; ++i) {
        F<kFloats> low, high;
        load_pair(source + i * kPanel, low, high);
        store<kFloats>(target + i * kPanel, low);
        store<kFloats>(target + i * kPanel + kFloats, high);
    }
}

// The tiles of all rows with one part of one panel. `stored`: bytes of that part as stored.
template <class T>
OCTAVO_INLINE void all_tiles(Tile<T> t, int64_t rows, int64_t columns, int64_t stored) {
    int64_t tiles = divide_up(rows, kTileRows);
    Tile<T> all = t;
    t.ahead_step = divide_up(kUnroll * stored, tiles * t.k);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        t.x = all.x + begin * t.x_stride;
        t.y = all.y + begin * t.y_stride;
        t.ahead = all.ahead + stored * tile / tiles;
        RunTile<T> run = shared_tile_of<T, kTileRows>(int(end - begin));
        if (columns >= kPanel) run(t);
        else run_cut(run, t, int(end - begin), columns);
    }
}

// Many rows: each part of a panel is used by all tiles of rows before the next one.
template <class T>
void many_rows(const Range<T>& range) {
    const LinearJob& job = range.job;
    int64_t parts = divide_up(job.k, kPartOfK<T>);
    bool is_widened = divide_up(range.rows(), kTileRows) > kTilesAsStored<T>;
    alignas(64) float wide[kTilesAsStored<T> == INT64_MAX ? 1 : kPartOfK<T> * kPanel];
    for (int64_t part = 0; part < parts; ++part) {
        int64_t k_begin = job.k * part / parts, k_end = job.k * (part + 1) / parts;
        for (int64_t p = range.panel_begin; p < range.panel_end; ++p) {
            Tile<T> t = range.tile(p, k_begin, k_end);
            bool is_last = p + 1 == range.panel_end;
            const T* next = is_last ? range.panel(range.panel_begin) + k_end * kPanel : t.panels + t.panel_stride;
            t.ahead = (const char*)next;
            int64_t columns = job.n - p * kPanel, stored = t.k * kPanel * int64_t(sizeof(T));
            if (is_widened) {
                widen_panel(t.panels, wide, t.k);
                Tile<float> f{t.x, t.x_stride, wide, 0, t.k, t.y, t.y_stride, t.bias, t.is_first, t.ahead, 0};
                all_tiles(f, range.rows(), columns, stored);
            } else {
                all_tiles(t, range.rows(), columns, stored);
            }
        }
    }
}

template <class T>
void linear(const LinearJob& job, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    Range<T> range{job, row_begin, row_end, panel_begin, panel_end};
    if (row_end - row_begin <= kTileRows) few_rows(range);
    else many_rows(range);
}

template <class T>
void widen_values(const void* source, float* target, int64_t count) {
    widen((const T*)source, target, count);
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels{
    kPanel,
    kTileRows,
    {linear<float>, linear<bf16>, linear<f16>},
    {widen_values<float>, widen_values<bf16>, widen_values<f16>},
};

}  // namespace octavo::OCTAVO_ISA
