#pragma once

#include <cstddef>

namespace octavo {

// Ask the system to back whole huge pages inside [address, address + size) by such. A hint: nothing fails.
void advise_huge_pages(void* address, size_t size);

}  // namespace octavo
