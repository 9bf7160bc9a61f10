// The linear layer over few bits for Python: brings the rows of the input to 8 bits, once a call, and cuts the product
// into chunks for the threads. One product has one weight; the grouped form has one for each range of rows.
#include "quantized/quantized.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "program.h"
#include "quantized/choice.h"
#include "quantized/pack.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kBytesOfPass = 4 << 20;        // of the input in 8 bits that is kept at a time
constexpr int64_t kBytesOfBlock = 192 << 10;     // of it that is multiplied with a panel at a time: half a second cache
constexpr int64_t kPanelsOfChunk = 16;           // more would only make the last chunks of two threads uneven
constexpr int64_t kChunksOfThread = 4;           // so that a thread that the system does not run holds nobody up
constexpr int64_t kOperationsOfChunk = 100'000;  // less is not worth waking a thread for
constexpr int64_t kValuesOfChunk = 32'768;       // the same where values are only converted

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that have the same weight.
struct Product {
    const QuantizedWeight* weight;
    int64_t row_begin, row_end;
};

// Some rows of x and what is multiplied with them.
class Pass {
   public:
    Pass(const QuantizedKernels& kernels, const float* x, int64_t x_stride, int64_t k, float* y, int64_t y_stride)
        : kernels_(kernels), x_(x), x_stride_(x_stride), k_(k), y_(y), y_stride_(y_stride) {}

    void add(const Product& product) {
        int64_t rows = product.row_end - product.row_begin, count = divide_up(rows, kernels_.tile_rows(rows));
        most_rows_ = std::max(most_rows_, kernels_.tile_rows(rows));
        products_.push_back({product.weight, int64_t(tiles_.size()), int64_t(tiles_.size()) + count});
        for (int64_t i = 0; i < count; ++i) {
            int64_t begin = product.row_begin + rows * i / count, end = product.row_begin + rows * (i + 1) / count;
            tiles_.push_back({nullptr, y_ + begin * y_stride_, int(end - begin)});
            first_rows_.push_back(begin);
        }
        num_rows_ += rows;
        operations_ += 2 * rows * product.weight->n * k_;
    }

    void run() {
        quantize();
        for (const TilesOfWeight& product : products_)
            for (int64_t i = 0; i < product.weight->num_segments; ++i) cut(product, product.weight->segments()[i]);
        parallel_for(int64_t(chunks_.size()), [&](int64_t i, int) {
            Chunk& chunk = chunks_[i];
            bool needs_scratch = chunk.job.tiles->rows > kernels_.tile_rows(1);
            chunk.job.scratch = needs_scratch ? scratch() : nullptr;
            kernels_.multiply(chunk.job, chunk.panel_begin, chunk.panel_end);
        });
    }

   private:
    struct TilesOfWeight {
        const QuantizedWeight* weight;
        int64_t begin, end;
    };
    struct Chunk {
        QuantizedJob job;
        int64_t panel_begin, panel_end;
    };

    // Of the calling thread.
    char* scratch() const {
        constexpr int64_t kLine = 64;
        thread_local std::vector<char> memory;
        auto wanted = size_t(k_ / kGroup * kernels_.scratch_of_group + kLine);
        if (memory.size() < wanted) memory.resize(wanted);
        return reinterpret_cast<char*>(divide_up(reinterpret_cast<int64_t>(memory.data()), kLine) * kLine);
    }

    void quantize() {
        int64_t groups = k_ / kGroup;
        // kept: to get as much from the system again and again would cost more than its use
        thread_local std::unique_ptr<InputGroup[]> memory;
        thread_local int64_t size = 0;
        // tiles are read as if all of them had the most rows
        int64_t wanted = num_rows_ * groups + most_rows_;
        if (size < wanted) {
            size = 0;  // until there is memory: a failed step is followed by others
            memory.reset();
            memory.reset(new InputGroup[wanted]);
            size = wanted;
        }
        InputGroup* group = memory.get();
        for (InputTile& tile : tiles_) {
            tile.groups = group;
            group += tile.rows * groups;
        }
        auto num_tiles = int64_t(tiles_.size());
        int64_t chunks = std::min(kChunksOfThread * num_threads(), divide_up(num_rows_ * k_, kValuesOfChunk));
        chunks = std::min(chunks, num_tiles);
        parallel_for(chunks, [&](int64_t chunk, int) {
            for (int64_t i = num_tiles * chunk / chunks; i < num_tiles * (chunk + 1) / chunks; ++i)
                for (int row = 0; row < tiles_[i].rows; ++row)
                    kernels_.quantize(x_ + (first_rows_[i] + row) * x_stride_, k_,
                                      const_cast<InputGroup*>(tiles_[i].groups) + row, tiles_[i].rows);
        });
    }

    // Chunks of all tiles of a product with one segment: blocks of tiles, and ranges of panels.
    void cut(const TilesOfWeight& product, const QuantizedSegment& segment) {
        int64_t tiles = product.end - product.begin, panels = divide_up(segment.n, kPanelColumns);
        int64_t bytes_of_tile = most_rows_ * k_ / kGroup * int64_t(sizeof(InputGroup));
        int64_t blocks = divide_up(tiles, std::max<int64_t>(1, kBytesOfBlock / bytes_of_tile));
        int64_t operations = 2 * rows_of(product) * segment.n * k_;
        int64_t wanted = operations / std::max(kOperationsOfChunk, operations_ / (kChunksOfThread * num_threads()));
        int64_t groups = std::max(divide_up(panels, kPanelsOfChunk), divide_up(wanted, blocks));
        groups = std::min(groups, panels);
        for (int64_t block = 0; block < blocks; ++block) {
            int64_t begin = product.begin + tiles * block / blocks, end = product.begin + tiles * (block + 1) / blocks;
            for (int64_t group = 0; group < groups; ++group)
                chunks_.push_back({{&segment, &tiles_[begin], end - begin, k_, y_stride_, nullptr},
                                   panels * group / groups,
                                   panels * (group + 1) / groups});
        }
    }

    int64_t rows_of(const TilesOfWeight& product) const {
        int64_t rows = 0;
        for (int64_t i = product.begin; i < product.end; ++i) rows += tiles_[i].rows;
        return rows;
    }

    const QuantizedKernels& kernels_;
    const float* x_;
    int64_t x_stride_, k_;
    float* y_;
    int64_t y_stride_;
    std::vector<TilesOfWeight> products_;
    std::vector<InputTile> tiles_;
    std::vector<int64_t> first_rows_;  // of the tiles
    std::vector<Chunk> chunks_;
    int64_t num_rows_ = 0, operations_ = 0;
    int most_rows_ = 0;  // of a tile
};

// y [rows, n] = x [rows, k] with each range of rows times its weight. The ranges are in order.
void multiply(const float* x, int64_t x_stride, int64_t k, const std::vector<Product>& products, float* y, int64_t n) {
    if (products.empty()) return;
    const QuantizedKernels& kernels = quantized_kernels();
    int64_t rows_of_pass = kBytesOfPass / (k / kGroup * int64_t(sizeof(InputGroup)));
    int64_t rows = products.back().row_end, most = kernels.tile_rows(rows);
    rows_of_pass = std::max<int64_t>(rows_of_pass / most, 1) * most;
    ReleaseGil release(2 * rows * n * k);
    for (int64_t begin = 0; begin < rows; begin += rows_of_pass) {
        Pass pass(kernels, x, x_stride, k, y, n);
        for (Product product : products) {
            product.row_begin = std::max(product.row_begin, begin);
            product.row_end = std::min(product.row_end, begin + rows_of_pass);
            if (product.row_begin < product.row_end) pass.add(product);
        }
        pass.run();
    }
}

void quantized_linear(uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t weight, uintptr_t y) {
    if (rows == 0) return;
    const QuantizedWeight& w = *at<const QuantizedWeight>(weight);
    multiply(at<const float>(x), x_stride, w.k, {{&w, 0, rows}}, at<float>(y), w.n);
}

// offsets [weights + 1]: rows offsets[i] .. offsets[i + 1] times weight i. All weights have the same shape.
void grouped_quantized_linear(uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t offsets,
                              const std::vector<uintptr_t>& weights, uintptr_t y) {
    const int64_t* bounds = at<const int64_t>(offsets);
    std::vector<Product> products;
    bool is_in_order = bounds[0] == 0 && bounds[weights.size()] == rows;
    for (size_t i = 0; i < weights.size(); ++i) {
        is_in_order = is_in_order && bounds[i] <= bounds[i + 1];
        if (bounds[i] < bounds[i + 1]) products.push_back({at<const QuantizedWeight>(weights[i]), bounds[i], bounds[i + 1]});
    }
    if (!is_in_order) throw std::invalid_argument("offsets must rise from 0 to the number of rows");
    if (products.empty()) return;
    const QuantizedWeight& w = *products[0].weight;
    multiply(at<const float>(x), x_stride, w.k, products, at<float>(y), w.n);
}

void embedding_of_quantized(uintptr_t token_ids, int64_t count, uintptr_t weight, uintptr_t output) {
    const QuantizedWeight& w = *at<const QuantizedWeight>(weight);
    const int64_t* ids = at<const int64_t>(token_ids);
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= w.n)
            throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside of the " + std::to_string(w.n) +
                                    " rows of the embedding");
    int64_t chunks = std::min(kChunksOfThread * num_threads(), divide_up(count * w.k, kValuesOfChunk));
    ReleaseGil release(count * w.k);
    parallel_for(chunks, [&](int64_t chunk, int) {
        for (int64_t i = count * chunk / chunks; i < count * (chunk + 1) / chunks; ++i) {
            const QuantizedSegment* segment = w.segments();
            while (ids[i] >= segment->column + segment->n) ++segment;
            quantized_kernels().dequantize(*segment, w.k, ids[i] - segment->column, at<float>(output) + i * w.k);
        }
    });
}

void pack(uintptr_t values, int64_t row_bytes, uintptr_t scales, uintptr_t minima, int64_t n, int64_t k, int64_t bits,
          uintptr_t panels) {
    QuantizedRows rows{at<const uint8_t>(values), row_bytes, at<const uint16_t>(scales), at<const uint16_t>(minima),
                       n,                         k,         bits};
    ReleaseGil release(n * k);
    parallel_for(divide_up(n, kPanelColumns), [&](int64_t panel, int) { pack_panel(rows, panel, at<char>(panels)); });
}

}  // namespace

void bind_quantized(nanobind::module_& module) {
    module.def("quantized_kernels", &supported_quantized_kernels,
               "Names of the kernels for few bits that this build and this machine have, best first.");
    module.def("quantized_kernels_in_use", [] { return std::string(quantized_kernels().name); });
    module.def("use_quantized_kernels", &use_quantized_kernels,
               "Compute with these, or if the name is empty with the best for the instruction set in use.");
    module.def("quantized_bytes", [](int64_t n, int64_t k, int64_t bits) {
        return divide_up(n, kPanelColumns) * (k / kGroup) * bytes_of_group(bits);
    }, "Memory of a packed weight [n, k].");
    module.def("pack_quantized", &pack);
    define<&quantized_linear>(module, "quantized_linear");
    module.def("grouped_quantized_linear", &grouped_quantized_linear);
    define<&embedding_of_quantized>(module, "embedding_of_quantized");
}

}  // namespace octavo
