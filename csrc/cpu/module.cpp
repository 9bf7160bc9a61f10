// The Python module octavo.ops.cpu._native. Tensors come as addresses: a call costs under a microsecond. The callers in
// octavo/ops/cpu check shapes and dtypes; nothing here does.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding.h"
#include "isa.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace {

// For the tests of the pool: how often each chunk was run in `num_jobs` jobs.
std::vector<int64_t> count_chunks(int64_t num_chunks, int64_t num_jobs) {
    std::vector<int64_t> counts(num_chunks, 0);
    nb::gil_scoped_release release;
    for (int64_t job = 0; job < num_jobs; ++job)
        octavo::parallel_for(num_chunks, [&](int64_t chunk, int) { ++counts[chunk]; });
    return counts;
}

}  // namespace

NB_MODULE(_native, module) {
    using namespace octavo;
    module.def("isa", [] { return std::string(isa().name); }, "Instruction set in use.");
    module.def("supported_isas", &supported_isas, "Those this build and this machine have, widest first.");
    module.def("use_isa", &use_isa, "Use this one from now on; weights packed before are then of no use.");
    module.def("set_num_threads", &set_num_threads);
    module.def("num_threads", &num_threads);
    module.def("count_chunks", &count_chunks, "For tests: how often each chunk was run in so many jobs.");
    bind_linear(module);
    bind_quantized(module);
    bind_attention(module);
    bind_elementwise(module);
    bind_sampling(module);
    bind_program(module);
}
