// Rows of logits to token ids, to the logits that were drawn from, and to log-probabilities.
#include "sampling/sampling.h"

#include "sampling/filter.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Nothing overflows at the floor, and there the gap between any two float32 is as good as infinite already.
constexpr double kLowestTemperature = 1e-250;

Parameters parameters_of(const SamplingArgs& args, int64_t row) {
    double temperature = args.temperature[row];
    if (temperature == 0.0) temperature = 1.0;
    if (temperature < kLowestTemperature) temperature = kLowestTemperature;
    int64_t top_k = args.top_k[row];
    if (top_k < 0 || top_k >= args.vocab_size) top_k = 0;
    return {temperature, top_k, args.top_p[row], args.min_p[row]};
}

// The first of n weights at which `reached` and those up to it exceed the target; the last that is not 0 if rounding
// lets none.
int64_t find_weight(const double* weights, int64_t n, double reached, double target) {
    int64_t last = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (weights[i] > 0.0) last = i;
        reached += weights[i];
        if (reached > target) return i;
    }
    return last;
}

// The chunk whose cumulative sum is the first to exceed the target; `size` if none does, in a row without a sum.
int64_t find_chunk(const double* sums, int64_t size, double target) {
    int64_t num_chunks = (size + kChunk - 1) / kChunk;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
        if (sums[chunk] > target) return chunk;
    return size;
}

// The drawn one of n candidates, or -1.
int64_t draw_candidate(int64_t n, double uniform, const SamplingScratch& scratch) {
    double target = uniform * sum_candidates(n, scratch);
    int64_t chunk = find_chunk(scratch.sums, n, target), first = chunk * kChunk;
    if (chunk == n) return -1;
    int64_t count = n - first < kChunk ? n - first : kChunk;
    double reached = chunk > 0 ? scratch.sums[chunk - 1] : 0.0;
    return scratch.ids[first + find_weight(scratch.weights + first, count, reached, target)];
}

// The token drawn from a whole row, or -1. Weights are made twice in one chunk rather than kept in all.
int64_t draw_token(const float* row, int64_t size, double uniform, Weigher weigh, const SamplingScratch& scratch) {
    double target = uniform * weigh_row(row, size, weigh, scratch.sums);
    int64_t chunk = find_chunk(scratch.sums, size, target), first = chunk * kChunk;
    if (chunk == size) return -1;
    int64_t count = size - first < kChunk ? size - first : kChunk;
    double weights[kChunk];
    for (int64_t i = 0; i < count; i += kDoubles)
        store_doubles(weights + i, weigh(load_some_doubles(row + first + i, count - i, -kInfinity)));
    double reached = chunk > 0 ? scratch.sums[chunk - 1] : 0.0;
    return first + find_weight(weights, count, reached, target);
}

int64_t sample_row(const SamplingArgs& args, int64_t index, const SamplingScratch& scratch) {
    const float* row = args.logits + index * args.row_stride;
    const bool is_greedy = args.temperature[index] == 0.0;
    const Parameters p = parameters_of(args, index);
    RowMax top = scan_row(row, args.vocab_size, !is_greedy && p.top_k > 0 ? scratch.values : nullptr);
    if (is_greedy || !top.is_finite) return top.position;
    const Weigher weigh{double(top.max), 1.0 / p.temperature};
    const double uniform = args.uniform[index];
    int64_t token = -1;
    if (p.has_filters())
        token = draw_candidate(filter_row(row, args.vocab_size, p, weigh, scratch), uniform, scratch);
    else
        token = draw_token(row, args.vocab_size, uniform, weigh, scratch);
    return token < 0 ? top.position : token;
}

void process_row(const SamplingArgs& args, int64_t index, const SamplingScratch& scratch) {
    const int64_t size = args.vocab_size;
    const float* row = args.logits + index * args.row_stride;
    double* out = args.processed + index * size;
    const Parameters p = parameters_of(args, index);
    if (p.has_filters()) {
        RowMax top = scan_row(row, size, p.top_k > 0 ? scratch.values : nullptr);
        if (top.is_finite) {
            int64_t n = filter_row(row, size, p, Weigher{double(top.max), 1.0 / p.temperature}, scratch);
            for (int64_t i = 0; i < size; ++i) out[i] = double(-kInfinity);
            for (int64_t i = 0; i < n; ++i)
                if (scratch.weights[i] > 0.0) out[scratch.ids[i]] = double(row[scratch.ids[i]]) / p.temperature;
            return;
        }
    }
    for (int64_t i = 0; i < size; i += kDoubles)
        store_some_doubles(out + i, load_some_doubles(row + i, size - i, 0.0f) / p.temperature, size - i);
}

void argmax(const SamplingArgs& args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
        args.token_ids[row] = scan_row(args.logits + row * args.row_stride, args.vocab_size, nullptr).position;
}

void sample(const SamplingArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) args.token_ids[row] = sample_row(args, row, scratch);
}

void process_logits(const SamplingArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) process_row(args, row, scratch);
}

template <class T>
double greatest(const T* row, int64_t size) {
    const T nothing = -T(kInfinity);
    Doubles most[4];
    for (Doubles& lanes : most) lanes = splat_double(double(nothing));
    int64_t i = 0;
    for (; i + 4 * kDoubles <= size; i += 4 * kDoubles) {
        for (int j = 0; j < 4; ++j) {
            Doubles x = load_doubles(row + i + j * kDoubles);
            most[j] = x > most[j] ? x : most[j];
        }
    }
    for (; i < size; i += kDoubles) {
        Doubles x = load_some_doubles(row + i, size - i, nothing);
        most[0] = x > most[0] ? x : most[0];
    }
    double result = double(nothing);
    for (const Doubles& lanes : most)
        for (int lane = 0; lane < kDoubles; ++lane) result = lanes[lane] > result ? lanes[lane] : result;
    return result;
}

// Summed and subtracted in float64 and rounded once. A row that holds a NaN, or no finite maximum, becomes NaN.
template <class T>
void log_softmax(const LogSoftmaxArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
        const T* row = static_cast<const T*>(args.logits) + index * args.row_stride;
        T* out = static_cast<T*>(args.out) + index * args.vocab_size;
        double max = greatest(row, args.vocab_size);
        double log_sum = __builtin_log(weigh_row(row, args.vocab_size, Weigher{max, 1.0}, scratch.sums));
        for (int64_t i = 0; i < args.vocab_size; i += kDoubles) {
            Doubles x = load_some_doubles(row + i, args.vocab_size - i, T(0));
            store_some_doubles(out + i, (x - max) - log_sum, args.vocab_size - i);
        }
    }
}

}  // namespace

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels{argmax, sample, process_logits, log_softmax<float>, log_softmax<double>};

}  // namespace octavo::OCTAVO_ISA
