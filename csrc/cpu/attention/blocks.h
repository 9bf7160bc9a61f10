#pragma once

#include <cstdint>

namespace octavo {

// dst[pairs[i][1]] = src[pairs[i][0]] for blocks of block_bytes. src and dst may be the same memory: every source is
// read before any target is written. No target may come twice. Throws std::out_of_range for a block that is not there.
void copy_blocks(const char* src, int64_t num_src, char* dst, int64_t num_dst, int64_t block_bytes,
                 const int64_t* pairs, int64_t num_pairs);

}  // namespace octavo
