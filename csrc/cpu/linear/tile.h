// The innermost part of the linear layer: a tile of ROWS rows of x times PANELS panels of the weight.
//
// Every output is one accumulator that takes x[k] * w[k] for k = 0, 1, ... in order, whatever the shape of the tile;
// the bias is added last. A tile may cover a part of k: it then starts from what the part before left in y. What hides
// the latency of the additions is the number of outputs in flight, never a second accumulator for one output.
#pragma once

#include "linear/linear.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPanel = 2 * kFloats;  // columns of a panel
constexpr int kUnroll = 2;           // steps of k in one round of the inner loop

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kRegisters = 16;
constexpr int kTileRows = 6;
#else
constexpr int kRegisters = 16;
constexpr int kTileRows = 4;  // without fused operations the products take registers, too
#endif

// The most panels of a tile: accumulators, an x of each row, weights, a mask and what is being computed in registers.
constexpr int most_panels(int rows) {
    int panels = 8;
    while (panels > 1 && 2 * rows * panels + rows + 6 > kRegisters) --panels;
    return panels;
}

template <class T>
struct Tile {
    const float* x;
    int64_t x_stride;
    const T* panels;
    int64_t panel_stride;  // values from one panel to the next
    int64_t k;
    float* y;
    int64_t y_stride;
    const float* bias;   // null but in the last part of k
    bool is_first;       // the first part of k
    const char* ahead;   // memory to bring close meanwhile; it may reach past the end of what there is
    int64_t ahead_step;  // bytes of it for one round of the loop
};

template <class T>
OCTAVO_INLINE void load_pair(const T* p, F<kFloats>& low, F<kFloats>& high) {
    low = load<kFloats>(p);
    high = load<kFloats>(p + kFloats);
}
OCTAVO_INLINE void load_pair(const bf16* p, F<kFloats>& low, F<kFloats>& high) {
    U<kFloats> woven;
    memcpy(&woven, p, sizeof woven);
    low = (F<kFloats>)(woven << 16);
    high = (F<kFloats>)(woven & 0xffff0000u);
}

// N streams at equal distances. x86 can address base + index * {1, 2} + constant, so a third of the pointers do; they
// stay in registers, and few additions take the execution ports that the multiplications need.
template <int N>
struct Streams {
    const char* base[(N + 2) / 3];
    int64_t stride;  // bytes

    OCTAVO_INLINE Streams(const void* first, int64_t stride_bytes) : stride(stride_bytes) {
#pragma GCC unroll 16
        for (int i = 0; i < (N + 2) / 3; ++i) base[i] = (const char*)first + 3 * i * stride_bytes;
    }
    OCTAVO_INLINE const char* at(int i) const { return base[i / 3] + i % 3 * stride; }
    OCTAVO_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 16
        for (int i = 0; i < (N + 2) / 3; ++i) {
            base[i] += bytes;
            asm("" : "+r"(base[i]));  // keeps the compiler from making N pointers of them
        }
    }
    OCTAVO_INLINE void hide_stride() { asm("" : "+r"(stride)); }  // or of making several strides of one and constants
};

template <int ROWS, int PANELS>
struct Sums {
    F<kFloats> of[ROWS][PANELS][2];
};

// The step of k that is `k` after where the streams are: every x of the tile's rows with every column.
template <class T, int ROWS, int PANELS>
OCTAVO_INLINE void step(Streams<ROWS>& x, Streams<PANELS>& w, int k, Sums<ROWS, PANELS>& sums) {
    x.hide_stride();
    w.hide_stride();
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
        F<kFloats> low, high;
        load_pair((const T*)w.at(p) + k * kPanel, low, high);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            F<kFloats> factor = splat<kFloats>(((const float*)x.at(r))[k]);
            sums.of[r][p][0] = sums.of[r][p][0] + factor * low;
            sums.of[r][p][1] = sums.of[r][p][1] + factor * high;
        }
    }
}

template <class T, int ROWS, int PANELS>
OCTAVO_INLINE void start(const Tile<T>& t, Sums<ROWS, PANELS>& sums) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
        for (int p = 0; p < PANELS; ++p) {
            const float* y = t.y + r * t.y_stride + p * kPanel;
            __builtin_prefetch(y, 1);
            __builtin_prefetch(y + kFloats, 1);
            sums.of[r][p][0] = t.is_first ? F<kFloats>{} : load<kFloats>(y);
            sums.of[r][p][1] = t.is_first ? F<kFloats>{} : load<kFloats>(y + kFloats);
        }
    }
}

template <class T, int ROWS, int PANELS>
OCTAVO_INLINE void finish(const Tile<T>& t, const Sums<ROWS, PANELS>& sums) {
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            F<kFloats> low = sums.of[r][p][0], high = sums.of[r][p][1];
            if (t.bias) {
                low = low + load<kFloats>(t.bias + p * kPanel);
                high = high + load<kFloats>(t.bias + p * kPanel + kFloats);
            }
            float* y = t.y + r * t.y_stride + p * kPanel;
            store<kFloats>(y, low);
            store<kFloats>(y + kFloats, high);
        }
    }
}

// IS_STREAM: the panels come from memory for this tile alone, so it fetches its own panels ahead. Else several tiles
// use the same panel, and each of them fetches its share of what follows (`ahead`).
template <class T, int ROWS, int PANELS, bool IS_STREAM>
void run_tile(const Tile<T>& t) {
    constexpr int round_bytes = kUnroll * kPanel * sizeof(T);
    constexpr int bytes_ahead = PANELS > 1 ? 1024 : sizeof(T) == sizeof(float) ? 4096 : 2048;
    Streams<ROWS> x(t.x, t.x_stride * sizeof(float));
    Streams<PANELS> w(t.panels, t.panel_stride * sizeof(T));
    const char* ahead = t.ahead;
    Sums<ROWS, PANELS> sums;
    start(t, sums);
    int64_t k = t.k;
    for (; k >= kUnroll; k -= kUnroll) {
        if constexpr (IS_STREAM) {
#pragma GCC unroll 16
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
                for (int line = 0; line < round_bytes; line += 64)
                    __builtin_prefetch(w.at(p) + bytes_ahead + line, 0, bytes_ahead > 2048 ? 2 : 3);
        } else {
            __builtin_prefetch(ahead, 0, 2);
            if (round_bytes / 2 > 64) __builtin_prefetch(ahead + 64, 0, 2);
            ahead += t.ahead_step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < kUnroll; ++i) step<T>(x, w, i, sums);
        x.advance(kUnroll * sizeof(float));
        w.advance(round_bytes);
    }
    for (; k > 0; --k) {
        step<T>(x, w, 0, sums);
        x.advance(sizeof(float));
        w.advance(kPanel * sizeof(T));
    }
    finish(t, sums);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
