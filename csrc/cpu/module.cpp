// The Python module octavo.ops.cpu._native. Tensors come as addresses: a call costs under a microsecond. The callers in
// octavo/ops/cpu check shapes and dtypes; nothing here does.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding.h"
#include "isa.h"
#include "memory.h"
#include "thread_pool.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    using namespace octavo;
    module.def("isa", [] { return std::string(isa().name); }, "Instruction set in use.");
    module.def("supported_isas", &supported_isas, "Those this build and this machine have, widest first.");
    module.def("use_isa", &use_isa, "Use this one from now on; weights packed before are then of no use.");
    module.def("set_num_threads", &set_num_threads);
    module.def("num_threads", &num_threads);
    module.def("advise_huge_pages", [](uintptr_t address, size_t size) {
        advise_huge_pages(reinterpret_cast<void*>(address), size);
    });
    bind_linear(module);
    bind_attention(module);
    bind_elementwise(module);
    bind_sampling(module);
}
