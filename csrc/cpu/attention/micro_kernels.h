// The two products of attention as register tiles: scores (queries by K) and mix (weights by V).
// An element is one chain of multiply-adds, over the head dimension or over the keys, whatever the tile.
#pragma once

#include "attention/attention.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kMaxPanel = 6;  // rows of a register tile

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kHas32Registers = true;
#else
constexpr bool kHas32Registers = false;
#endif

constexpr int kStripGroup = kHas32Registers ? 4 : 8;  // vectors of keys scored together

// Enough chains to hide the latency of a multiply-add, few enough for the registers.
template <int R>
constexpr int kStripsAtOnce = kHas32Registers ? 4 : R == 1 ? 8 : R < 4 ? 4 : 2;
template <int R>
constexpr int kColumnsAtOnce = R == 1 ? 8 : kHas32Registers || R < 4 ? 4 : 2;

// Memory that will be needed soon, a piece for each strip: brought to the cache a little at a time, between the
// arithmetic, so that neither waits for the other.
struct Fetch {
    const char* const* values = nullptr;  // of the strips' own keys; null: nothing is fetched
    const char* const* keys = nullptr;    // of the next group's strips
    int64_t value_bytes = 0, key_bytes = 0;
};

template <int kLines>
OCTAVO_INLINE void prefetch_lines(const char* from) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(from + i * 64, 0, 2);
}

// K in vectors of keys: a strip is one vector at each of `dims` rows `stride` apart.
template <class T>
struct Strips {
    const T* const* keys;
    int64_t stride;
    int dims;
    Fetch fetch;
};

constexpr int kDimsAtOnce = 8;  // of which head sizes are multiples

// q [dims][R] by strips first .. first + C - 1. Scores of row r go to scores + r * kScoreStride.
template <class T, int W, int R, int C, bool kFetches>
OCTAVO_INLINE void score_tile(const float* q, const Strips<T>& strips, int first, float* scores) {
    F<W> sums[R][C];
    const T* keys[C];
    for (int c = 0; c < C; ++c) {
        keys[c] = strips.keys[first + c];
        for (int r = 0; r < R; ++r) sums[r][c] = F<W>{};
    }
    constexpr int kLines = W * kDimsAtOnce * sizeof(T) / 64;  // as much as is used meanwhile
    int64_t stride = strips.stride, fetched = 0;
    for (int d = 0; d < strips.dims; fetched += kLines * 64) {
        if (kFetches && fetched < strips.fetch.value_bytes)
            for (int c = 0; c < C; ++c) prefetch_lines<kLines>(strips.fetch.values[first + c] + fetched);
        if (kFetches && fetched < strips.fetch.key_bytes)
            for (int c = 0; c < C; ++c) prefetch_lines<kLines>(strips.fetch.keys[first + c] + fetched);
        int stop = kFetches ? d + kDimsAtOnce : strips.dims;
#pragma GCC unroll 1
        for (; d < stop; ++d, q += R) {
            F<W> k[C];
            for (int c = 0; c < C; ++c) k[c] = load<W>(keys[c] + d * stride);
            for (int r = 0; r < R; ++r) {
                F<W> x = splat<W>(q[r]);
                for (int c = 0; c < C; ++c) sums[r][c] = sums[r][c] + x * k[c];
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store<W>(scores + r * kScoreStride + c * W, sums[r][c]);
}

template <class T, int W, int R>
void score_panel(const float* q, const Strips<T>& strips, int count, float* scores) {
    constexpr int C = kStripsAtOnce<R>;
    if (strips.fetch.values)
        for (int c = 0; c < count; c += C) score_tile<T, W, R, C, true>(q, strips, c, scores + c * W);
    else
        for (int c = 0; c < count; c += C) score_tile<T, W, R, C, false>(q, strips, c, scores + c * W);
}

// count strips, padded to a whole kStripGroup with strips that may be read. q: panels of rows, each [dims][panel].
template <class T, int W>
void score_group(const float* q, int rows, int panel_rows, Strips<T> strips, int count, float* scores) {
    for (int row = 0; row < rows; row += panel_rows) {
        const float* panel = q + int64_t(row) * strips.dims;
        float* to = scores + row * kScoreStride;
        int left = rows - row;
        switch (left < panel_rows ? left : panel_rows) {
            case 1: score_panel<T, W, 1>(panel, strips, count, to); break;
            case 2: score_panel<T, W, 2>(panel, strips, count, to); break;
            case 3: score_panel<T, W, 3>(panel, strips, count, to); break;
            case 4: score_panel<T, W, 4>(panel, strips, count, to); break;
            case 5: score_panel<T, W, 5>(panel, strips, count, to); break;
            case 6: score_panel<T, W, 6>(panel, strips, count, to); break;
        }
        strips.fetch = Fetch{};
    }
}

// V of the keys of a partition: key i is row i % block_size of blocks[i / block_size].
template <class T>
struct Values {
    const T* const* blocks;
    int block_size;
    int dims;
};

// out[r][column ..] += sum over keys begin .. end - 1 of weights[r][key] * v[key][column ..]
template <class T, int W, int R, int C>
OCTAVO_INLINE void mix_tile(const float* weights, const Values<T>& v, int begin, int end, int column, float* out) {
    F<W> sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = load<W>(out + int64_t(r) * v.dims + column + c * W);
    int block = begin / v.block_size, offset = begin - block * v.block_size;
    for (int key = begin; key < end; ++block, offset = 0) {
        int stop = key + v.block_size - offset;
        if (stop > end) stop = end;
        const T* row = v.blocks[block] + int64_t(offset) * v.dims + column;
        for (; key < stop; ++key, row += v.dims) {
            // the fewer of the two stay in registers
            if constexpr (R < C) {
                F<W> x[R];
                for (int r = 0; r < R; ++r) x[r] = splat<W>(weights[r * kScoreStride + key]);
                for (int c = 0; c < C; ++c) {
                    F<W> value = load<W>(row + c * W);
                    for (int r = 0; r < R; ++r) sums[r][c] = sums[r][c] + x[r] * value;
                }
            } else {
                F<W> value[C];
                for (int c = 0; c < C; ++c) value[c] = load<W>(row + c * W);
                for (int r = 0; r < R; ++r) {
                    F<W> x = splat<W>(weights[r * kScoreStride + key]);
                    for (int c = 0; c < C; ++c) sums[r][c] = sums[r][c] + x * value[c];
                }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store<W>(out + int64_t(r) * v.dims + column + c * W, sums[r][c]);
}

// Columns from `column` on in tiles of C vectors, then of fewer, then in vectors of 8: so many divide the head size.
template <class T, int W, int R, int C>
OCTAVO_INLINE void mix_columns(const float* weights, const Values<T>& v, int begin, int end, int column, float* out) {
    for (; column + C * W <= v.dims; column += C * W) mix_tile<T, W, R, C>(weights, v, begin, end, column, out);
    if constexpr (C > 1)
        mix_columns<T, W, R, C / 2>(weights, v, begin, end, column, out);
    else if constexpr (W > 8)
        mix_columns<T, 8, R, 1>(weights, v, begin, end, column, out);
}

template <class T, int R>
void mix_panel(const float* weights, const Values<T>& v, int begin, int end, float* out) {
    mix_columns<T, kFloats, R, kColumnsAtOnce<R>>(weights, v, begin, end, 0, out);
}

template <class T>
void mix_rows(int rows, const float* weights, const Values<T>& v, int begin, int end, float* out) {
    switch (rows) {
        case 1: return mix_panel<T, 1>(weights, v, begin, end, out);
        case 2: return mix_panel<T, 2>(weights, v, begin, end, out);
        case 3: return mix_panel<T, 3>(weights, v, begin, end, out);
        case 4: return mix_panel<T, 4>(weights, v, begin, end, out);
        case 5: return mix_panel<T, 5>(weights, v, begin, end, out);
        case 6: return mix_panel<T, 6>(weights, v, begin, end, out);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
