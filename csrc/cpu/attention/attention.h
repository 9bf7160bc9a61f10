// What the attention kernels take, as plain data, and the table of functions that each instruction set provides.
//
// The KV of a request is cut into partitions by absolute position. Every (token, head) computes each partition by
// itself (maximum, sum of exponentials, weighted values) and folds the results in position order, whoever computed
// them: so its bits depend neither on its neighbours nor on how the work was split.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int kMaxPartition = 256;  // keys; a partition is the largest multiple of the block size within it
constexpr int kMaxRows = 66;        // (token, head) rows computed together
constexpr int kMaxBlockSize = 128;

enum class KVType : int { f32, bf16, f16, int8, fp8 };

// A block holds, for each KV head, K as [head_dim_k][block_size] and (in another tensor) V as [block_size][head_dim_v].
// In int8 and fp8 each of these is followed by its scales, block_size floats: one for a token.
struct KVLayout {
    KVType type;
    int block_size, num_kv_heads, head_dim_k, head_dim_v;
    int64_t k_head_bytes, v_head_bytes;  // from one KV head to the next
    int64_t k_block_bytes, v_block_bytes;
};

struct KVMemory {
    char* k;
    char* v;
    KVLayout layout;
};

// Consecutive tokens of one request.
struct TokenTile {
    const int32_t* blocks;  // the request's row of the block table
    int32_t token, num_tokens;
    int32_t position;  // of the first token
    int32_t slots;     // where the request's entries in `slots` begin, one a partition; -1: nothing is stored for it
};

// One partition computed ahead for tokens of one or more requests whose blocks are the same there.
struct StoredItem {
    const int32_t* blocks;
    int32_t partition;
    int32_t first, num_tokens;  // range in `stored_tokens`
};

struct StoredToken {
    int32_t token, position;
    int32_t slot;  // place of its results
};

struct AttentionArgs {
    const float* q;  // [tokens, num_heads, head_dim_k], rows q_stride apart
    int64_t q_stride;
    float* out;  // [tokens, num_heads, head_dim_v]
    KVMemory kv;
    int num_heads;
    int partition;  // keys
    float scale;
    float soft_cap;  // 0: none
    int window;      // a token sees itself and the window - 1 tokens before it
    const float* sinks;  // [num_heads] or null

    // The heads of a KV head are computed together, in as many units as kMaxRows asks for. Item i of a list of tiles
    // (or stored items) is entry i / num_units for unit i % num_units.
    int group, unit_heads, units_per_group, num_units;
    const TokenTile* tiles;
    const StoredItem* stored;
    const StoredToken* stored_tokens;
    const int32_t* slots;  // slot of a tile's first token in a partition, the other tokens follow; -1: compute it
    float* stored_out;     // [slots, num_heads, head_dim_v], weighted by exp(score - maximum)
    float* stored_stats;   // [slots, num_heads, 2]: maximum, sum
};

struct WriteArgs {
    const float* k;  // [tokens, num_kv_heads, head_dim_k], rows k_stride apart
    const float* v;
    int64_t k_stride, v_stride;
    const int64_t* slots;
    KVMemory kv;
};

// x [tokens, num_heads, head_dim], rows stride apart
struct RopeTensor {
    const float* x;
    float* out;
    int64_t stride, out_stride;
    int num_heads, head_dim;
};

struct RopeArgs {
    const int64_t* positions;
    const float* cos_sin;  // [max_positions, rotated]: cosines, then sines
    int rotated;
    bool is_interleaved;
};

struct AttentionKernels {
    // Items begin .. end - 1, one after the other. scratch: attention_scratch_floats() floats.
    void (*store_partitions)(const AttentionArgs& args, int64_t begin, int64_t end, float* scratch);
    void (*attend)(const AttentionArgs& args, int64_t begin, int64_t end, float* scratch);
    // Tokens begin .. end - 1. scratch: write_scratch_floats() floats. rope: rotate K on the way, or null.
    void (*write_kv)(const WriteArgs& args, const RopeArgs* rope, int64_t begin, int64_t end, float* scratch);
    void (*rope)(const RopeArgs& args, const RopeTensor& tensor, int64_t begin, int64_t end);
};

constexpr int kScoreStride = kMaxPartition + 64;  // scores of a row: whole groups of vectors are written

static inline int64_t attention_scratch_floats(const KVLayout& kv) {
    int64_t row = kv.head_dim_k + 2 * kv.head_dim_v + kScoreStride + 4;
    return kMaxRows * row + 2 * kScoreStride + kMaxBlockSize * int64_t(kv.head_dim_k + kv.head_dim_v);
}

static inline int64_t write_scratch_floats(const KVLayout& kv) { return 2 * (kv.head_dim_k + kv.head_dim_v); }

}  // namespace octavo
