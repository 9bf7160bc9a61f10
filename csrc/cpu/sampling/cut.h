// Where a list of logits is to be cut so that its greatest entries reach a count or a mass: a selection by histograms.
#pragma once

#include "sampling/compact.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Entries greater than `value` stay, and measure `before` together; of those equal to it the first ones stay, until the
// limit is reached. A list that does not reach it stays whole.
struct Cut {
    float value;
    double before;
};

constexpr int kBuckets = 512;
constexpr int kTables = 4;  // side by side, so that entries of one bucket in a row need not wait for each other
constexpr int64_t kFew = 32;

// weights null: every entry measures 1
OCTAVO_INLINE double measure(const double* weights, int64_t i) { return weights ? weights[i] : 1.0; }

// The cut of a list so short that it is put in order, with `before` ahead of it.
Cut cut_few(const float* values, const double* weights, int64_t n, double before, double limit) {
    float ordered[kFew];
    double measures[kFew];
    for (int64_t i = 0; i < n; ++i) {
        int64_t place = i;
        for (; place > 0 && ordered[place - 1] < values[i]; --place) {
            ordered[place] = ordered[place - 1];
            measures[place] = measures[place - 1];
        }
        ordered[place] = values[i];
        measures[place] = measure(weights, i);
    }
    Cut cut{};
    for (int64_t i = 0; i < n; ++i) {
        if (i == 0 || ordered[i] != cut.value) cut = {ordered[i], before};
        before += measures[i];
        if (before >= limit) break;
    }
    return cut;
}

// Bucket 0 holds the greatest values, kBuckets - 1 the least: a monotone map from [low, high].
OCTAVO_INLINE void fill_buckets(const float* values, int64_t n, float low, float high, int32_t* buckets) {
    const double scale = (kBuckets - 1) / (double(high) - double(low));
    for (int64_t i = 0; i < n; i += kDoubles) {
        Doubles scaled = (double(high) - load_some_doubles(values + i, n - i, high)) * scale;
        auto bucket = __builtin_convertvector(scaled, I<kDoubles>);
        memcpy(buckets + i, &bucket, sizeof bucket);
    }
}

// The bucket in which `before` plus what lies in the buckets up to it reaches the limit, if any; adds to `before` what
// lies in the buckets ahead of it.
OCTAVO_INLINE int find_bucket(const int32_t* buckets, const double* weights, int64_t n, double limit, double& before) {
    double tables[kBuckets * kTables] = {};
    for (int64_t i = 0; i < n; ++i) tables[buckets[i] * kTables + i % kTables] += measure(weights, i);
    for (int b = 0; b < kBuckets; ++b) {
        const double* parts = tables + b * kTables;
        double reached = before + ((parts[0] + parts[1]) + (parts[2] + parts[3]));
        if (reached >= limit) return b;
        before = reached;
    }
    return kBuckets;
}

// Copies the entries of one bucket to the part arrays, which may be where they are; returns their number.
OCTAVO_INLINE int64_t take_bucket(const float* values, const double* weights, int64_t n, int chosen,
                                  const SamplingScratch& scratch) {
    int64_t taken = 0;
    auto take = [&](int64_t i) {
        scratch.part_values[taken] = values[i];
        if (weights) scratch.part_weights[taken] = weights[i];
        ++taken;
    };
    int64_t i = 0;
    for (; i + kFloats <= n; i += kFloats) {
        Ints bucket;
        memcpy(&bucket, scratch.buckets + i, sizeof bucket);
        for (uint32_t bits = lane_bits((Ints)(bucket == chosen)); bits; bits &= bits - 1) take(i + __builtin_ctz(bits));
    }
    for (; i < n; ++i)
        if (scratch.buckets[i] == chosen) take(i);
    return taken;
}

OCTAVO_INLINE void find_range(const float* values, int64_t n, float& low, float& high) {
    Floats least = splat<kFloats>(values[0]), most = least;
    int64_t i = 0;
    for (; i + kFloats <= n; i += kFloats) {
        Floats x = load<kFloats>(values + i);
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    high = hmax<kFloats>(most), low = -hmax<kFloats>(-least);
    for (; i < n; ++i) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
}

// The cut at which a list of n > 0 finite values reaches `limit`; at its least value, and with -inf before it, if it
// does not.
Cut find_cut(const float* values, const double* weights, int64_t n, double limit, const SamplingScratch& scratch) {
    double before = 0.0;
    while (n > kFew) {
        float low, high;
        find_range(values, n, low, high);
        if (low == high) return {low, before};
        fill_buckets(values, n, low, high, scratch.buckets);
        int chosen = find_bucket(scratch.buckets, weights, n, limit, before);
        if (chosen == kBuckets) return {low, -double(kInfinity)};
        n = take_bucket(values, weights, n, chosen, scratch);
        values = scratch.part_values;
        weights = weights ? scratch.part_weights : nullptr;
    }
    return cut_few(values, weights, n, before, limit);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
