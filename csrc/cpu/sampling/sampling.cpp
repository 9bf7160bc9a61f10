// Which thread samples which rows, the working memory it does so in, and the binding to Python.
#include "sampling/sampling.h"

#include <algorithm>
#include <memory>

#include "binding.h"
#include "isa.h"
#include "thread_pool.h"

namespace octavo {
namespace {

// Every thread keeps its working memory from call to call; it grows with the vocabulary.
class Workspace {
   public:
    const SamplingScratch& of_size(int64_t vocab_size) {
        if (vocab_size > size_) {
            const size_t n = size_t(vocab_size + kSamplingPadding);
            memory_.reset(new double[5 * n]);  // three arrays of float64, four of half the size
            scratch_.weights = memory_.get();
            scratch_.part_weights = scratch_.weights + n;
            scratch_.sums = scratch_.part_weights + n;
            scratch_.values = reinterpret_cast<float*>(scratch_.sums + n);
            scratch_.part_values = scratch_.values + n;
            scratch_.ids = reinterpret_cast<int32_t*>(scratch_.part_values + n);
            scratch_.buckets = scratch_.ids + n;
            size_ = vocab_size;
        }
        return scratch_;
    }

   private:
    int64_t size_ = 0;
    std::unique_ptr<double[]> memory_;
    SamplingScratch scratch_{};
};

thread_local Workspace workspace;

// run(first, last, scratch) over the rows, a few at a time.
template <class Run>
void run_rows(int64_t rows, int64_t vocab_size, Run run) {
    ReleaseGil release(rows * vocab_size * 8);
    int64_t chunk_rows = std::clamp<int64_t>(rows / (4 * num_threads()), 1, 16);
    parallel_for((rows + chunk_rows - 1) / chunk_rows, [&](int64_t chunk, int) {
        run(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), workspace.of_size(vocab_size));
    });
}

void argmax(uintptr_t logits, int64_t row_stride, int64_t rows, int64_t vocab_size, uintptr_t token_ids) {
    SamplingArgs args{};
    args.logits = at<const float>(logits), args.row_stride = row_stride, args.vocab_size = vocab_size;
    args.token_ids = at<int64_t>(token_ids);
    run_rows(rows, vocab_size, [&](int64_t first, int64_t last, const SamplingScratch&) {
        isa().sampling->argmax(args, first, last);
    });
}

SamplingArgs make_args(uintptr_t logits, int64_t row_stride, int64_t vocab_size, uintptr_t temperature,
                       uintptr_t top_k, uintptr_t top_p, uintptr_t min_p) {
    SamplingArgs args{};
    args.logits = at<const float>(logits), args.row_stride = row_stride, args.vocab_size = vocab_size;
    args.temperature = at<const double>(temperature), args.top_k = at<const int64_t>(top_k);
    args.top_p = at<const double>(top_p), args.min_p = at<const double>(min_p);
    return args;
}

void sample(uintptr_t logits, int64_t row_stride, int64_t rows, int64_t vocab_size, uintptr_t temperature,
            uintptr_t top_k, uintptr_t top_p, uintptr_t min_p, uintptr_t uniform, uintptr_t token_ids) {
    SamplingArgs args = make_args(logits, row_stride, vocab_size, temperature, top_k, top_p, min_p);
    args.uniform = at<const double>(uniform), args.token_ids = at<int64_t>(token_ids);
    run_rows(rows, vocab_size, [&](int64_t first, int64_t last, const SamplingScratch& scratch) {
        isa().sampling->sample(args, scratch, first, last);
    });
}

void process_logits(uintptr_t logits, int64_t row_stride, int64_t rows, int64_t vocab_size, uintptr_t temperature,
                    uintptr_t top_k, uintptr_t top_p, uintptr_t min_p, uintptr_t processed) {
    SamplingArgs args = make_args(logits, row_stride, vocab_size, temperature, top_k, top_p, min_p);
    args.processed = at<double>(processed);
    run_rows(rows, vocab_size, [&](int64_t first, int64_t last, const SamplingScratch& scratch) {
        isa().sampling->process_logits(args, scratch, first, last);
    });
}

void log_softmax(uintptr_t logits, int64_t row_stride, int64_t rows, int64_t vocab_size, uintptr_t out,
                 bool is_double) {
    const LogSoftmaxArgs args{at<const void>(logits), row_stride, vocab_size, at<void>(out)};
    auto kernel = is_double ? isa().sampling->log_softmax_f64 : isa().sampling->log_softmax_f32;
    run_rows(rows, vocab_size, [&](int64_t first, int64_t last, const SamplingScratch& scratch) {
        kernel(args, scratch, first, last);
    });
}

}  // namespace

void bind_sampling(nanobind::module_& module) {
    module.def("argmax", &argmax);
    module.def("sample", &sample);
    module.def("process_logits", &process_logits);
    module.def("log_softmax", &log_softmax);
}

}  // namespace octavo
