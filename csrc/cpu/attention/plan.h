// How the attention of one step is split into work, once for all layers of one shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attention.h"

namespace octavo {

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim_v, block_size;
    int window;  // 2^30: none
    int num_threads;
    int64_t num_blocks;  // of the cache: no other block may be named
};

struct StepMetadata {
    const int32_t* block_tables;
    int64_t table_width, num_requests;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    int64_t num_tokens;
};

// Ranges of items that threads claim: bounds[i] .. bounds[i + 1] - 1.
using Chunks = std::vector<int64_t>;

class AttentionPlan {
   public:
    // Throws std::invalid_argument if the metadata contradicts itself. It must outlive the plan.
    AttentionPlan(const AttentionShape& shape, const StepMetadata& step);

    // Sets the fields that describe the work; those of the tensors and of the workspace are the caller's.
    void describe(AttentionArgs& args) const;
    int64_t stored_out_floats() const { return num_slots_ * shape_.num_heads * shape_.head_dim_v; }
    int64_t stored_stats_floats() const { return num_slots_ * shape_.num_heads * 2; }

    const AttentionShape& shape() const { return shape_; }
    int64_t num_tokens() const { return num_tokens_; }
    int64_t first_idle_token() const { return first_idle_token_; }
    const Chunks& stored_chunks() const { return stored_chunks_; }
    const Chunks& tile_chunks() const { return tile_chunks_; }
    int64_t cost() const { return cost_; }
    int64_t num_stored() const { return int64_t(stored_.size()); }

   private:
    struct Request {
        const int32_t* blocks;
        int32_t token, num_tokens, position, seq_len;
        int32_t slots = -1;
    };

    void read(const StepMetadata& step);
    void check(const Request& request, int64_t table_width) const;
    void share();
    void share_partition(int partition, std::vector<Request*>& candidates);
    void split();
    void store(int partition, Request* const* members, size_t count);
    bool is_stored(const Request& request, int partition) const;
    void make_tiles();
    void make_chunks();

    int first_partition(const Request& request) const;
    int end_partition(const Request& request) const;
    int64_t visible_keys(int position, int num_tokens) const;
    int64_t unit_cost(const Request& request) const;
    int64_t item_cost(const TokenTile& tile) const;

    const AttentionShape shape_;
    int partition_, group_, unit_heads_, units_per_group_, num_units_, tile_tokens_;
    int64_t num_tokens_ = 0, first_idle_token_ = 0, num_slots_ = 0, max_slots_ = 0, cost_ = 0;
    std::vector<Request> requests_;
    std::vector<TokenTile> tiles_;
    std::vector<StoredItem> stored_;
    std::vector<StoredToken> stored_tokens_;
    std::vector<int32_t> slots_;
    Chunks stored_chunks_, tile_chunks_;
};

}  // namespace octavo
