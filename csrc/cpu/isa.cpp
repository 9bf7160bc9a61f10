#include "isa.h"

#include <stdexcept>

namespace octavo {

#define OCTAVO_DECLARE(name)                                 \
    namespace name {                                         \
    extern const LinearKernels linear_kernels;               \
    extern const AttentionKernels attention_kernels;         \
    extern const ElementwiseKernels elementwise_kernels;     \
    extern const SamplingKernels sampling_kernels;           \
    }
#define OCTAVO_ENTRY(name, floats, test) \
    {#name, floats, test, &name::linear_kernels, &name::attention_kernels, &name::elementwise_kernels, &name::sampling_kernels}

#ifdef OCTAVO_HAVE_avx512
OCTAVO_DECLARE(avx512)
#endif
#ifdef OCTAVO_HAVE_avx2
OCTAVO_DECLARE(avx2)
#endif
#ifdef OCTAVO_HAVE_neon
OCTAVO_DECLARE(neon)
#endif
#ifdef OCTAVO_HAVE_baseline
OCTAVO_DECLARE(baseline)
#endif

namespace {

[[maybe_unused]] bool always() { return true; }

#ifdef OCTAVO_HAVE_avx512
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif
#ifdef OCTAVO_HAVE_avx2
// Every processor with AVX2 has F16C.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

const Isa kIsas[] = {
#ifdef OCTAVO_HAVE_avx512
    OCTAVO_ENTRY(avx512, 16, has_avx512),
#endif
#ifdef OCTAVO_HAVE_avx2
    OCTAVO_ENTRY(avx2, 8, has_avx2),
#endif
#ifdef OCTAVO_HAVE_neon
    OCTAVO_ENTRY(neon, 4, always),
#endif
#ifdef OCTAVO_HAVE_baseline
    OCTAVO_ENTRY(baseline, 4, always),
#endif
};

const Isa* widest() {
    for (const Isa& candidate : kIsas)
        if (candidate.is_supported()) return &candidate;
    return nullptr;  // not reached: the last one runs everywhere
}

const Isa* chosen = nullptr;

}  // namespace

const Isa& isa() {
    if (!chosen) chosen = widest();
    return *chosen;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& candidate : kIsas)
        if (candidate.is_supported()) names.emplace_back(candidate.name);
    return names;
}

void use_isa(const std::string& name) {
    for (const Isa& candidate : kIsas) {
        if (name == candidate.name && candidate.is_supported()) {
            chosen = &candidate;
            return;
        }
    }
    throw std::invalid_argument("this machine has no kernels called " + name);
}

}  // namespace octavo
