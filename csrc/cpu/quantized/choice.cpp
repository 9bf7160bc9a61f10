#include "quantized/choice.h"

#include <algorithm>
#include <stdexcept>

#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {

#define OCTAVO_DECLARE(name)                         \
    namespace name {                                 \
    extern const QuantizedKernels quantized_kernels; \
    }

#ifdef OCTAVO_HAVE_avx512amx
OCTAVO_DECLARE(avx512amx)
#endif
#ifdef OCTAVO_HAVE_avx512vnni
OCTAVO_DECLARE(avx512vnni)
#endif
#ifdef OCTAVO_HAVE_avx2vnni
OCTAVO_DECLARE(avx2vnni)
#endif
#ifdef OCTAVO_HAVE_avx2
OCTAVO_DECLARE(avx2)
#endif
#ifdef OCTAVO_HAVE_neondot
OCTAVO_DECLARE(neondot)
#endif
#ifdef OCTAVO_HAVE_neon
OCTAVO_DECLARE(neon)
#endif
#ifdef OCTAVO_HAVE_baseline
OCTAVO_DECLARE(baseline)
#endif

namespace {

[[maybe_unused]] bool always() { return true; }

[[maybe_unused]] bool has_isa(const char* name) {
    std::vector<std::string> names = supported_isas();
    return std::find(names.begin(), names.end(), name) != names.end();
}

#ifdef OCTAVO_HAVE_avx512vnni
bool has_avx512vnni() { return has_isa("avx512") && __builtin_cpu_supports("avx512vnni"); }
#endif
#ifdef OCTAVO_HAVE_avx512amx
// The processor has it, and the system lets this process use its registers, which are 8 KiB a thread.
bool has_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl and the extended state
    constexpr unsigned kTileAndInt8 = 1u << 24 | 1u << 25;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return has_avx512vnni() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
           (edx & kTileAndInt8) == kTileAndInt8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
#ifdef OCTAVO_HAVE_avx2vnni
// Asked of the processor itself: older compilers do not know the name.
bool has_avx2vnni() {
    unsigned eax = 0, ebx, ecx, edx;
    return has_isa("avx2") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif
#ifdef OCTAVO_HAVE_avx2
bool has_avx2() { return has_isa("avx2"); }
#endif
#ifdef OCTAVO_HAVE_neondot
bool has_neondot() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;  // every arm64 processor of Apple's has it
#endif
}
#endif

struct Variant {
    int floats;  // an instruction set with vectors of as many, or more, may use it
    bool (*is_supported)();
    const QuantizedKernels* kernels;
};

const Variant kVariants[] = {
#ifdef OCTAVO_HAVE_avx512amx
    {16, has_amx, &avx512amx::quantized_kernels},
#endif
#ifdef OCTAVO_HAVE_avx512vnni
    {16, has_avx512vnni, &avx512vnni::quantized_kernels},
#endif
#ifdef OCTAVO_HAVE_avx2vnni
    {8, has_avx2vnni, &avx2vnni::quantized_kernels},
#endif
#ifdef OCTAVO_HAVE_avx2
    {8, has_avx2, &avx2::quantized_kernels},
#endif
#ifdef OCTAVO_HAVE_neondot
    {4, has_neondot, &neondot::quantized_kernels},
#endif
#ifdef OCTAVO_HAVE_neon
    {4, always, &neon::quantized_kernels},
#endif
#ifdef OCTAVO_HAVE_baseline
    {4, always, &baseline::quantized_kernels},
#endif
};

const QuantizedKernels* named = nullptr;

// For each width of vectors the best, found once.
const QuantizedKernels& best_for(int floats) {
    static const QuantizedKernels* best[3] = {};
    const QuantizedKernels*& found = best[floats == 16 ? 2 : floats == 8 ? 1 : 0];
    for (const Variant& variant : kVariants) {
        if (found) break;
        if (variant.floats <= floats && variant.is_supported()) found = variant.kernels;
    }
    return *found;
}

}  // namespace

const QuantizedKernels& quantized_kernels() { return named ? *named : best_for(isa().floats); }

std::vector<std::string> supported_quantized_kernels() {
    std::vector<std::string> names;
    for (const Variant& variant : kVariants)
        if (variant.is_supported()) names.emplace_back(variant.kernels->name);
    return names;
}

void use_quantized_kernels(const std::string& name) {
    const QuantizedKernels* found = nullptr;
    for (const Variant& variant : kVariants)
        if (name == variant.kernels->name && variant.is_supported()) found = variant.kernels;
    if (!found && !name.empty())
        throw std::invalid_argument("this machine has no kernels for few bits called " + name);
    named = found;
}

}  // namespace octavo
