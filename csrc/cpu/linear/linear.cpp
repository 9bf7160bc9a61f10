// The linear layer for Python: packs weights, and cuts a product into chunks for the threads.
#include "linear/linear.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "binding.h"
#include "isa.h"
#include "linear/pack.h"
#include "program.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kRowsOfBlock = 144;         // their x, for a part of k, stays in the second cache
constexpr int64_t kPanelsOfChunk = 16;        // more would only make the last chunks of two threads uneven
constexpr int64_t kFewPanels = 4;             // with few rows less would leave too few sums in flight
constexpr int64_t kChunksOfThread = 4;        // so that a thread that the system does not run holds nobody up
constexpr int64_t kOperationsOfChunk = 50'000;  // less is not worth waking a thread for
constexpr int64_t kValuesOfChunk = 65'536;      // the same where values are only moved

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Throws unless `isa_name`, for which a weight was packed, is the instruction set in use.
const LinearKernels& kernels_of(const char* isa_name) {
    const Isa& current = isa();
    if (std::strcmp(isa_name, current.name) != 0)
        throw std::invalid_argument(std::string("the weight was packed for ") + isa_name + ", but " + current.name +
                                    " is in use: pack it again");
    return *current.linear;
}

void linear(uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t panels, uintptr_t bias, int64_t n, int64_t k,
            int storage, const char* isa_name, uintptr_t y) {
    const LinearKernels& kernels = kernels_of(isa_name);
    if (rows == 0 || n == 0) return;
    LinearJob job{at<const float>(x), x_stride, at<const void>(panels), at<const float>(bias),
                  at<float>(y),       rows,     n,                      k};
    auto run = kernels.linear[storage];
    int64_t num_panels = divide_up(n, kernels.panel_columns);
    int64_t operations = 2 * rows * n * k;
    int64_t blocks = divide_up(rows, kRowsOfBlock);
    int64_t wanted = std::min(kChunksOfThread * num_threads(), operations / kOperationsOfChunk);
    int64_t groups = std::max(divide_up(num_panels, kPanelsOfChunk), divide_up(wanted, blocks));
    int64_t fewest_panels = rows <= kernels.tile_rows ? kFewPanels : 1;
    groups = std::min(groups, divide_up(num_panels, fewest_panels));
    ReleaseGil release(operations);
    parallel_for(blocks * groups, [&](int64_t chunk, int) {
        int64_t block = chunk / groups, group = chunk % groups;
        run(job, rows * block / blocks, rows * (block + 1) / blocks, num_panels * group / groups,
            num_panels * (group + 1) / groups);
    });
}

void check_ids(const int64_t* ids, int64_t count, int64_t vocabulary) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= vocabulary)
            throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside of the " +
                                    std::to_string(vocabulary) + " rows of the embedding");
}

// fn(i) for every i in [0, count), where each moves `values` values.
template <class Function>
void for_each_row(int64_t count, int64_t values, Function fn) {
    int64_t chunks = std::min(kChunksOfThread * num_threads(), divide_up(count * values, kValuesOfChunk));
    ReleaseGil release(count * values);
    parallel_for(chunks, [&](int64_t chunk, int) {
        for (int64_t i = count * chunk / chunks; i < count * (chunk + 1) / chunks; ++i) fn(i);
    });
}

void embedding(uintptr_t token_ids, int64_t count, uintptr_t table, int64_t vocabulary, int64_t hidden, int storage,
               uintptr_t output) {
    const int64_t* ids = at<const int64_t>(token_ids);
    check_ids(ids, count, vocabulary);
    auto widen = isa().linear->widen[storage];
    int64_t row_bytes = hidden * bytes_of(Storage(storage));
    for_each_row(count, hidden, [&](int64_t i) {
        widen(at<const char>(table) + ids[i] * row_bytes, at<float>(output) + i * hidden, hidden);
    });
}

void embedding_of_linear(uintptr_t token_ids, int64_t count, uintptr_t panels, int64_t n, int64_t k, int storage,
                         const char* isa_name, uintptr_t output) {
    const LinearKernels& kernels = kernels_of(isa_name);
    const int64_t* ids = at<const int64_t>(token_ids);
    check_ids(ids, count, n);
    PanelLayout layout{kernels.panel_columns, k, Storage(storage)};
    for_each_row(count, k, [&](int64_t i) {
        float* row = at<float>(output) + i * k;
        constexpr int64_t part = 512;
        alignas(64) char stored[part * sizeof(float)];
        for (int64_t begin = 0; begin < k; begin += part) {
            int64_t values = std::min(part, k - begin);
            unpack_row(layout, at<const void>(panels), ids[i], begin, values, stored);
            kernels.widen[storage](stored, row + begin, values);
        }
    });
}

void pack(uintptr_t weight, int64_t n, int64_t k, int64_t n_stride, int64_t k_stride, int storage, uintptr_t panels) {
    PanelLayout layout{isa().linear->panel_columns, k, Storage(storage)};
    ReleaseGil release(n * k);
    parallel_for(divide_up(n, layout.columns), [&](int64_t panel, int) {
        pack_panel(layout, {at<const void>(weight), n, n_stride, k_stride}, panel, at<void>(panels));
    });
}

}  // namespace

void bind_linear(nanobind::module_& module) {
    module.def("panel_columns", [] { return isa().linear->panel_columns; },
               "Rows of a weight that are packed together by the instruction set in use.");
    module.def("pack_linear", &pack);
    define<&linear>(module, "linear");
    define<&embedding>(module, "embedding");
    define<&embedding_of_linear>(module, "embedding_of_linear");
}

}  // namespace octavo
