#include "attention/blocks.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_set>
#include <vector>

#include "thread_pool.h"

namespace octavo {
namespace {

struct Copy {
    const char* from;
    char* to;
};

constexpr int64_t kPiece = 64 << 10;  // bytes a chunk at least

void run(const std::vector<Copy>& copies, int64_t block_bytes) {
    int64_t count = int64_t(copies.size());
    int64_t per_chunk = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, block_bytes));
    parallel_for((count + per_chunk - 1) / per_chunk, [&](int64_t chunk, int) {
        for (int64_t i = chunk * per_chunk; i < std::min(count, (chunk + 1) * per_chunk); ++i)
            memcpy(copies[i].to, copies[i].from, block_bytes);
    });
}

}  // namespace

void copy_blocks(const char* src, int64_t num_src, char* dst, int64_t num_dst, int64_t block_bytes,
                 const int64_t* pairs, int64_t num_pairs) {
    std::unordered_set<const char*> targets;
    for (int64_t i = 0; i < num_pairs; ++i) {
        int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
        if (from < 0 || from >= num_src || to < 0 || to >= num_dst)
            throw std::out_of_range("copy_blocks names a block that the cache lacks");
        targets.insert(dst + to * block_bytes);
    }
    // A source that will be overwritten is set aside first.
    std::vector<Copy> first, second;
    for (int64_t i = 0; i < num_pairs; ++i) {
        Copy copy{src + pairs[2 * i] * block_bytes, dst + pairs[2 * i + 1] * block_bytes};
        if (copy.from == copy.to) continue;
        (targets.count(copy.from) ? first : second).push_back(copy);
    }
    std::vector<char> aside(first.size() * block_bytes);
    for (size_t i = 0; i < first.size(); ++i) {
        char* place = aside.data() + i * block_bytes;
        second.push_back({place, first[i].to});
        first[i].to = place;
    }
    run(first, block_bytes);
    run(second, block_bytes);
}

}  // namespace octavo
