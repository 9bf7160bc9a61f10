// Top-k, top-p and min-p of one row: a list of candidates in the order of their ids, with a weight of 0 for those that
// are left out. Only what cannot be ruled out by a threshold on the logits becomes a candidate.
#pragma once

#include "sampling/cut.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A row's parameters; a filter that is off has the value that turns it off.
struct Parameters {
    double temperature;
    int64_t top_k;
    double top_p;
    double min_p;

    bool has_filters() const { return top_k > 0 || top_p < 1.0 || min_p > 0.0; }
};

// Thresholds are lowered by this share of a weight, more than what rounding could do.
constexpr double kSlack = 1e-6;

// The greatest float that is not above x, at least -kLargest.
OCTAVO_INLINE float float_below(double x) {
    if (!(x > double(-kLargest))) return -kLargest;
    if (x >= double(kLargest)) return kLargest;
    float rounded = float(x);
    if (double(rounded) <= x) return rounded;
    int32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    bits = rounded > 0.0f ? bits - 1 : rounded < 0.0f ? bits + 1 : int32_t(0x80000001);
    memcpy(&rounded, &bits, sizeof bits);
    return rounded;
}

// A logit that no entry of the top k is below: the k-th greatest of the groups' maxima.
float lowest_of_top_k(int64_t vocab_size, int64_t k, const SamplingScratch& scratch) {
    // the maxima lie in `values`: that list is not needed before
    int64_t num_groups = (vocab_size + kBlock - 1) / kBlock * kFloats, n = 0;
    for (int64_t i = 0; i < num_groups; ++i) {
        float value = scratch.values[i];
        scratch.values[n] = value;
        n += value > -kInfinity;
    }
    return n < k ? -kLargest : find_cut(scratch.values, nullptr, n, double(k), scratch).value;
}

// Keeps the k greatest of n candidates, the first among equals.
int64_t keep_top_k(int64_t n, int64_t k, const SamplingScratch& scratch) {
    float least = find_cut(scratch.values, nullptr, n, double(k), scratch).value;
    n = keep_at_least(least, n, scratch.ids, scratch.values);
    return n > k ? drop_last_equals(least, n, k, scratch.ids, scratch.values) : n;
}

void weigh_candidates(int64_t n, Weigher weigh, const SamplingScratch& scratch) {
    for (int64_t i = 0; i < n; i += kDoubles)
        store_doubles(scratch.weights + i, weigh(load_some_doubles(scratch.values + i, n - i, -kInfinity)));
}

double sum_candidates(int64_t n, const SamplingScratch& scratch) {
    return chunk_sums(n, scratch.sums, [&](int64_t i, int64_t count) {
        return load_some_doubles(scratch.weights + i, count, 0.0);
    });
}

// Sets the weights of all but the greatest, which together reach `limit`, to 0; the first stay among equals.
void keep_top_mass(int64_t n, double limit, const SamplingScratch& scratch) {
    const Cut cut = find_cut(scratch.values, scratch.weights, n, limit, scratch);
    const Doubles value = splat_double(double(cut.value));
    Longs equals = {};
    for (int64_t i = 0; i < n; i += kDoubles) {
        Doubles values = load_some_doubles(scratch.values + i, n - i, -kInfinity);
        Doubles weights = load_doubles(scratch.weights + i);
        store_doubles(scratch.weights + i, values < value ? Doubles{} : weights);
        equals -= values == value;
    }
    int64_t num_equal = 0;
    for (int lane = 0; lane < kDoubles; ++lane) num_equal += equals[lane];
    double reached = cut.before;
    for (int64_t i = 0; i < n && num_equal > 1; ++i) {
        if (scratch.values[i] != cut.value) continue;
        if (reached >= limit && reached > cut.before) scratch.weights[i] = 0.0;
        reached += scratch.weights[i];
    }
}

void keep_heavy(int64_t n, double least, const SamplingScratch& scratch) {
    for (int64_t i = 0; i < n; i += kDoubles) {
        Doubles weights = load_doubles(scratch.weights + i);
        store_doubles(scratch.weights + i, weights < least ? Doubles{} : weights);
    }
}

// The candidates of a row whose maximum is finite, in scratch.ids and scratch.weights; returns their number.
int64_t filter_row(const float* row, int64_t vocab_size, const Parameters& p, Weigher weigh,
                   const SamplingScratch& scratch) {
    double low = double(-kLargest), total = 0.0;
    auto logit_of = [&](double weight) { return weigh.max + p.temperature * (__builtin_log(weight) - kSlack); };
    if (p.top_k > 0) {
        low = double(lowest_of_top_k(vocab_size, p.top_k, scratch));
    } else if (p.top_p < 1.0) {
        // all entries below this one together weigh less than what top-p leaves out
        total = weigh_row(row, vocab_size, weigh, scratch.sums);
        low = logit_of((1.0 - p.top_p) * total / double(vocab_size));
    }
    // top-p counts what min-p will leave out, unless it has the total already
    if (p.min_p > 0.0 && (p.top_k == 0 || p.top_p >= 1.0)) {
        double other = logit_of(p.min_p);
        low = other > low ? other : low;
    }
    int64_t n = collect(row, vocab_size, float_below(low), scratch.ids, scratch.values);
    if (p.top_k > 0 && n > p.top_k) n = keep_top_k(n, p.top_k, scratch);
    weigh_candidates(n, weigh, scratch);
    if (p.top_p < 1.0 && n > 0) {
        if (p.top_k > 0) total = sum_candidates(n, scratch);
        keep_top_mass(n, p.top_p * total, scratch);
    }
    // the greatest weight is 1
    if (p.min_p > 0.0) keep_heavy(n, p.min_p, scratch);
    return n;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
