// The sampling kernels: from logits to token ids, without a sort of the vocabulary. What each instruction set provides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Rows of logits may lie apart; everything else is contiguous, with one entry a row.
struct SamplingArgs {
    const float* logits;
    int64_t row_stride;
    int64_t vocab_size;
    const double* temperature;  // 0: greedy
    const int64_t* top_k;       // 0: off
    const double* top_p;        // 1: off
    const double* min_p;        // 0: off
    const double* uniform;
    int64_t* token_ids;  // sample: [rows]
    double* processed;   // process_logits: [rows, vocab_size]
};

// out: contiguous [rows, vocab_size], of the dtype of the logits.
struct LogSoftmaxArgs {
    const void* logits;
    int64_t row_stride;
    int64_t vocab_size;
    void* out;
};

// Working memory of one thread. Arrays of vocab_size entries and kSamplingPadding more.
struct SamplingScratch {
    int32_t* ids;  // candidates for the draw, in the order of their ids
    float* values;
    double* weights;
    int32_t* buckets;  // what a selection among them works with
    float* part_values;
    double* part_weights;
    double* sums;  // cumulative, one a chunk of tokens
};

// Entries that a kernel may write beyond the last one.
constexpr int64_t kSamplingPadding = 64;

// Each works on the rows [first, last) alone; a row's result is one fixed sequence of operations.
struct SamplingKernels {
    void (*argmax)(const SamplingArgs& args, int64_t first, int64_t last);
    void (*sample)(const SamplingArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last);
    void (*process_logits)(const SamplingArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last);
    void (*log_softmax_f32)(const LogSoftmaxArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last);
    void (*log_softmax_f64)(const LogSoftmaxArgs& args, const SamplingScratch& scratch, int64_t first, int64_t last);
};

}  // namespace octavo
