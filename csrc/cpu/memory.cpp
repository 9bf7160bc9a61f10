#include "memory.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {

void advise_huge_pages([[maybe_unused]] void* address, [[maybe_unused]] size_t size) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t(2) << 20;
    uintptr_t first = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
    uintptr_t last = (reinterpret_cast<uintptr_t>(address) + size) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace octavo
