// Lists of candidates: (id, logit) pairs in the order of their ids, picked out of a row or out of a longer list.
#pragma once

#include "sampling/row.h"

namespace octavo::OCTAVO_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of lanes, eight bytes: their numbers, ascending.
struct LaneTable {
    uint64_t packed[256];

    constexpr LaneTable() : packed() {
        for (int set = 0; set < 256; ++set)
            for (int lane = 0, place = 0; lane < 8; ++lane)
                if (set >> lane & 1) packed[set] |= uint64_t(lane) << (8 * place++);
    }
};
constexpr LaneTable kLaneTable;
#endif

// Writes the lanes of `bits` one after the other; returns how many. Where a whole vector is written, what follows them
// is arbitrary.
OCTAVO_INLINE int64_t write_lanes(uint32_t bits, Ints ids, Floats values, int32_t* out_ids, float* out_values) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(out_ids, _mm512_maskz_compress_epi32(__mmask16(bits), (__m512i)ids));
    _mm512_storeu_ps(out_values, _mm512_maskz_compress_ps(__mmask16(bits), (__m512)values));
#elif defined(__AVX2__)
    __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(kLaneTable.packed + bits)));
    _mm256_storeu_si256((__m256i*)out_ids, _mm256_permutevar8x32_epi32((__m256i)ids, order));
    _mm256_storeu_ps(out_values, _mm256_permutevar8x32_ps((__m256)values, order));
#else
    for (uint32_t left = bits; left; left &= left - 1) {
        *out_ids++ = ids[__builtin_ctz(left)];
        *out_values++ = values[__builtin_ctz(left)];
    }
#endif
    return __builtin_popcount(bits);
}

// The entries of a row that are at least `low`, which is finite. Writes up to kFloats entries beyond the last.
int64_t collect(const float* row, int64_t size, float low, int32_t* ids, float* values) {
    Ints lanes;
    for (int i = 0; i < kFloats; ++i) lanes[i] = i;
    int64_t n = 0;
    for (int64_t i = 0; i < size; i += kFloats) {
        Floats x = load_logits(row + i, size - i);
        uint32_t bits = lane_bits((Ints)(x >= splat<kFloats>(low)));
        if (bits) n += write_lanes(bits, lanes + int32_t(i), x, ids + n, values + n);
    }
    return n;
}

// The same within a list of n, in place: no entry moves up.
int64_t keep_at_least(float low, int64_t n, int32_t* ids, float* values) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += kFloats) {
        Floats x = load_logits(values + i, n - i);
        Ints id;
        memcpy(&id, ids + i, sizeof id);
        uint32_t bits = lane_bits((Ints)(x >= splat<kFloats>(low)));
        if (bits) kept += write_lanes(bits, id, x, ids + kept, values + kept);
    }
    return kept;
}

// Drops the last of the n entries that are equal to `value`, so many that `size` entries are left.
int64_t drop_last_equals(float value, int64_t n, int64_t size, int32_t* ids, float* values) {
    int64_t excess = n - size, first = n;
    while (excess > 0) excess -= values[--first] == value;
    int64_t kept = first;
    for (int64_t i = first; i < n; ++i) {
        if (values[i] == value) continue;
        ids[kept] = ids[i];
        values[kept++] = values[i];
    }
    return kept;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
