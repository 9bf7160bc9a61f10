// Passes over one row of logits: its greatest entry, its weights e^((logit - max) / temperature), its candidates.
//
// A row is cut into chunks of kChunk tokens; sums are taken chunk by chunk, in the order of the token ids.
#pragma once

#include "sampling/doubles.h"
#include "sampling/sampling.h"

namespace octavo::OCTAVO_ISA {
namespace {

using Floats = F<kFloats>;
using Ints = I<kFloats>;

constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.40282347e+38f;
constexpr int64_t kChunk = 512;
constexpr int64_t kGroup = 16;  // tokens whose maximum is kept where a threshold for top-k is sought
constexpr int64_t kBlock = kGroup * kFloats;

// One bit a lane of a comparison's result.
OCTAVO_INLINE uint32_t lane_bits(Ints mask) {
#if defined(__AVX512F__)
    return uint32_t(_mm512_movepi32_mask((__m512i)mask));
#elif defined(__AVX__)
    return uint32_t(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_ps((__m128)mask));
#elif defined(__aarch64__)
    const Ints places = {1, 2, 4, 8};
    return uint32_t(vaddvq_s32((int32x4_t)(mask & places)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kFloats; ++i) bits |= uint32_t(mask[i] & 1) << i;
    return bits;
#endif
}

// The first `count` lanes from memory, -inf in the others.
OCTAVO_INLINE Floats load_logits(const float* p, int64_t count) {
    if (count >= kFloats) return load<kFloats>(p);
    Floats lanes = splat<kFloats>(-kInfinity);
    memcpy(&lanes, p, size_t(count) * sizeof(float));
    return lanes;
}

struct RowMax {
    float max;
    int64_t position;  // of the first maximum, or of the first NaN if there is one
    bool is_finite;
};

OCTAVO_INLINE int64_t find_first(const float* row, int64_t first, int64_t size, float value) {
    for (int64_t i = first; i < size; ++i)
        if (row[i] == value) return i;
    return 0;
}

OCTAVO_INLINE int64_t find_nan(const float* row, int64_t size) {
    for (int64_t i = 0; i < size; ++i)
        if (row[i] != row[i]) return i;
    return 0;
}

// The maximum of a row, and, if wanted, of its groups: kFloats interleaved groups of kGroup tokens in each block.
RowMax scan_row(const float* row, int64_t size, float* group_max) {
    float max = -kInfinity;
    int64_t block_of_max = 0;
    Ints magnitude = {};  // greater than infinity's bits if there is a NaN
    for (int64_t first = 0; first < size; first += kBlock) {
        Floats block_max = splat<kFloats>(-kInfinity);
        auto take = [&](Floats x) {
            block_max = x > block_max ? x : block_max;
            Ints bits = (Ints)x & 0x7fffffff;
            magnitude = bits > magnitude ? bits : magnitude;
        };
        if (first + kBlock <= size)
            for (int64_t i = first; i < first + kBlock; i += kFloats) take(load<kFloats>(row + i));
        else
            for (int64_t i = first; i < size; i += kFloats) take(load_logits(row + i, size - i));
        if (group_max) store<kFloats>(group_max + first / kGroup, block_max);
        if (lane_bits((Ints)(block_max > splat<kFloats>(max)))) {
            max = hmax<kFloats>(block_max);
            block_of_max = first;
        }
    }
    if (lane_bits((Ints)(magnitude > 0x7f800000))) return {max, find_nan(row, size), false};
    return {max, find_first(row, block_of_max, size, max), max > -kInfinity && max < kInfinity};
}

// e^((x - max) * inverse_temperature)
struct Weigher {
    double max;
    double inverse_temperature;

    OCTAVO_INLINE Doubles operator()(Doubles x) const {
        return exp_of_negative((x - max) * inverse_temperature);
    }
};

// f(offset, count) for every vector of `size` entries, sums of what it gives taken chunk by chunk: sums[c] is the total
// of the chunks up to c. Returns the whole.
template <class Function>
OCTAVO_INLINE double chunk_sums(int64_t size, double* sums, Function f) {
    double total = 0.0;
    for (int64_t first = 0; first < size; first += kChunk) {
        Doubles part[4] = {};
        if (first + kChunk <= size) {
            for (int64_t i = first; i < first + kChunk; i += 4 * kDoubles)
                for (int j = 0; j < 4; ++j) part[j] += f(i + j * kDoubles, int64_t(kDoubles));
        } else {
            for (int64_t i = first; i < size; i += kDoubles) part[0] += f(i, size - i);
        }
        total += sum_lanes((part[0] + part[1]) + (part[2] + part[3]));
        sums[first / kChunk] = total;
    }
    return total;
}

// Cumulative weights of a row, T float or double.
template <class T>
double weigh_row(const T* row, int64_t size, Weigher weigh, double* sums) {
    const T nothing = -T(kInfinity);
    return chunk_sums(size, sums, [=](int64_t i, int64_t count) {
        return weigh(load_some_doubles(row + i, count, nothing));
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
