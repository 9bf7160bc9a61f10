#include "attention/plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

constexpr int64_t kMaxStoredFloats = 8 << 20;  // results kept between the two phases
constexpr int kChunksPerThread = 8;

// Costs are in multiply-adds of one element of a row, roughly: reading a key from memory costs as much as some rows.
constexpr int64_t kRowsOfReading = 8;
constexpr int64_t kKeysOfFold = 4;
constexpr int64_t kMinChunkCost = 4000;  // about 20 microseconds: less is not worth waking a thread

// Ranges of items of about the same cost. cost(i) is that of item i.
template <class Cost>
Chunks balanced(int64_t num_items, int num_threads, Cost&& cost) {
    int64_t total = 0;
    for (int64_t i = 0; i < num_items; ++i) total += cost(i);
    int64_t wanted = std::max(kMinChunkCost, total / (int64_t(num_threads) * kChunksPerThread));
    if (num_threads == 1 || total < 2 * kMinChunkCost) wanted = total + 1;
    Chunks bounds{0};
    int64_t sum = 0;
    for (int64_t i = 0; i < num_items; ++i) {
        sum += cost(i);
        if (sum < wanted && i + 1 < num_items) continue;
        bounds.push_back(i + 1);
        sum = 0;
    }
    return bounds;
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, const StepMetadata& step) : shape_(shape) {
    partition_ = kMaxPartition / shape.block_size * shape.block_size;
    group_ = shape.num_heads / shape.num_kv_heads;
    units_per_group_ = (group_ + kMaxRows - 1) / kMaxRows;
    unit_heads_ = (group_ + units_per_group_ - 1) / units_per_group_;
    num_units_ = shape.num_kv_heads * units_per_group_;
    tile_tokens_ = kMaxRows / unit_heads_;
    max_slots_ = kMaxStoredFloats / (int64_t(shape.num_heads) * (shape.head_dim_v + 2));
    read(step);
    share();
    if (shape.num_threads > 1) split();
    make_tiles();
    make_chunks();
}

void AttentionPlan::describe(AttentionArgs& args) const {
    args.num_heads = shape_.num_heads;
    args.partition = partition_;
    args.window = shape_.window;
    args.group = group_;
    args.unit_heads = unit_heads_;
    args.units_per_group = units_per_group_;
    args.num_units = num_units_;
    args.tiles = tiles_.data();
    args.stored = stored_.data();
    args.stored_tokens = stored_tokens_.data();
    args.slots = slots_.data();
}

void AttentionPlan::read(const StepMetadata& step) {
    num_tokens_ = step.num_tokens;
    requests_.reserve(step.num_requests);
    if (step.query_start_loc[0] != 0) throw std::invalid_argument("query_start_loc does not begin with 0");
    for (int64_t r = 0; r < step.num_requests; ++r) {
        int32_t begin = step.query_start_loc[r], end = step.query_start_loc[r + 1], seq_len = step.seq_lens[r];
        if (end < begin || end > step.num_tokens)
            throw std::invalid_argument("query_start_loc falls, or names more tokens than q has");
        if (begin == end) continue;
        if (seq_len < end - begin) throw std::invalid_argument("a request has more tokens in a step than in seq_lens");
        Request request{step.block_tables + r * step.table_width, begin, end - begin, seq_len - (end - begin), seq_len};
        check(request, step.table_width);
        requests_.push_back(request);
    }
    first_idle_token_ = step.query_start_loc[step.num_requests];
}

// Every block that will be read exists.
void AttentionPlan::check(const Request& request, int64_t table_width) const {
    int64_t oldest = std::max<int64_t>(0, int64_t(request.position) - shape_.window + 1);
    int64_t end = (int64_t(request.seq_len) + shape_.block_size - 1) / shape_.block_size;
    if (end > table_width) throw std::invalid_argument("a request is longer than its row of the block table");
    uint32_t highest = 0;
    for (int64_t i = oldest / shape_.block_size; i < end; ++i)
        highest = std::max(highest, uint32_t(request.blocks[i]));
    if (highest >= shape_.num_blocks) throw std::invalid_argument("the block table names a block that the cache lacks");
}

int AttentionPlan::first_partition(const Request& request) const {
    return std::max(0, request.position - shape_.window + 1) / partition_;
}
int AttentionPlan::end_partition(const Request& request) const {
    return (request.seq_len + partition_ - 1) / partition_;
}

// Requests of few tokens whose blocks are the same in a whole partition compute it together. Only requests that shared
// the partition before, or see none before, are compared: what is shared is a prefix.
void AttentionPlan::share() {
    std::vector<Request*> waiting, candidates;
    for (Request& request : requests_)
        if (request.num_tokens <= tile_tokens_ && request.seq_len >= partition_) waiting.push_back(&request);
    if (waiting.size() < 2) return;
    std::stable_sort(waiting.begin(), waiting.end(), [this](const Request* a, const Request* b) {
        return first_partition(*a) < first_partition(*b);
    });
    size_t next = 0;
    for (int p = 0; next < waiting.size() || !candidates.empty(); ++p) {
        if (candidates.empty()) p = first_partition(*waiting[next]);
        for (; next < waiting.size() && first_partition(*waiting[next]) == p; ++next)
            candidates.push_back(waiting[next]);
        std::erase_if(candidates, [&](const Request* r) { return r->seq_len < (p + 1) * partition_; });
        share_partition(p, candidates);
    }
}

// Leaves in `candidates` those that share the partition with another.
void AttentionPlan::share_partition(int partition, std::vector<Request*>& candidates) {
    int num_blocks = partition_ / shape_.block_size;
    auto compare = [&](const Request* a, const Request* b) {
        int64_t first = int64_t(partition) * num_blocks;
        return memcmp(a->blocks + first, b->blocks + first, num_blocks * sizeof(int32_t));
    };
    std::sort(candidates.begin(), candidates.end(), [&](const Request* a, const Request* b) {
        int order = compare(a, b);
        return order != 0 ? order < 0 : a->token < b->token;
    });
    size_t kept = 0;
    for (size_t begin = 0, end; begin < candidates.size(); begin = end) {
        for (end = begin + 1; end < candidates.size() && compare(candidates[begin], candidates[end]) == 0;) ++end;
        if (end - begin < 2) continue;
        store(partition, candidates.data() + begin, end - begin);
        for (size_t i = begin; i < end; ++i) candidates[kept++] = candidates[i];
    }
    candidates.resize(kept);
}

// Requests of few tokens that would keep one thread busy for long while others have nothing to do.
void AttentionPlan::split() {
    int64_t total = 0;
    for (const Request& request : requests_) total += unit_cost(request) * num_units_;
    int64_t largest = total / (4 * shape_.num_threads);
    for (Request& request : requests_) {
        if (request.num_tokens > tile_tokens_ || unit_cost(request) <= largest) continue;
        if (unit_cost(request) < 2 * kMinChunkCost) continue;
        Request* member = &request;
        for (int p = first_partition(request); p < end_partition(request); ++p)
            if (!is_stored(request, p)) store(p, &member, 1);
    }
}

bool AttentionPlan::is_stored(const Request& request, int partition) const {
    return request.slots >= 0 && slots_[request.slots + partition] >= 0;
}

// Compute a partition ahead for these requests, unless there is no more room.
void AttentionPlan::store(int partition, Request* const* members, size_t count) {
    int64_t tokens = 0;
    for (size_t i = 0; i < count; ++i) tokens += members[i]->num_tokens;
    if (num_slots_ + tokens > max_slots_) return;
    StoredItem item{members[0]->blocks, partition, int32_t(stored_tokens_.size()), 0};
    for (size_t i = 0; i < count; ++i) {
        Request& request = *members[i];
        if (request.slots < 0) {
            request.slots = int32_t(slots_.size());
            slots_.resize(slots_.size() + end_partition(request), -1);
        }
        slots_[request.slots + partition] = int32_t(num_slots_);
        for (int t = 0; t < request.num_tokens; ++t) {
            if (item.num_tokens == tile_tokens_) {
                stored_.push_back(item);
                item.first = int32_t(stored_tokens_.size());
                item.num_tokens = 0;
            }
            stored_tokens_.push_back({request.token + t, request.position + t, int32_t(num_slots_++)});
            ++item.num_tokens;
        }
    }
    stored_.push_back(item);
}

int64_t AttentionPlan::visible_keys(int position, int num_tokens) const {
    return position + num_tokens - std::max(0, position - shape_.window + 1);
}

int64_t AttentionPlan::unit_cost(const Request& request) const {
    return visible_keys(request.position, request.num_tokens) * (request.num_tokens * unit_heads_ + kRowsOfReading);
}

int64_t AttentionPlan::item_cost(const TokenTile& tile) const {
    int64_t keys = visible_keys(tile.position, tile.num_tokens);
    int64_t rows = int64_t(tile.num_tokens) * unit_heads_;
    if (tile.slots < 0) return keys * (rows + kRowsOfReading);
    int64_t num_stored = 0;
    int begin = std::max(0, tile.position - shape_.window + 1) / partition_;
    int end = (tile.position + tile.num_tokens + partition_ - 1) / partition_;
    for (int p = begin; p < end; ++p) num_stored += slots_[tile.slots + p] >= 0;
    return std::max<int64_t>(0, keys - num_stored * partition_) * (rows + kRowsOfReading) +
           num_stored * kKeysOfFold * rows;
}

void AttentionPlan::make_tiles() {
    for (const Request& request : requests_)
        for (int t = 0; t < request.num_tokens; t += tile_tokens_)
            tiles_.push_back({request.blocks, request.token + t, std::min(tile_tokens_, request.num_tokens - t),
                              request.position + t, request.slots});
}

// The costliest first, so that the last chunks are small ones.
void AttentionPlan::make_chunks() {
    std::vector<std::pair<int64_t, TokenTile>> costs;
    costs.reserve(tiles_.size());
    for (const TokenTile& tile : tiles_) costs.emplace_back(item_cost(tile), tile);
    std::stable_sort(costs.begin(), costs.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (size_t i = 0; i < costs.size(); ++i) tiles_[i] = costs[i].second;
    auto stored_cost = [&](int64_t i) {
        return partition_ * (int64_t(stored_[i / num_units_].num_tokens) * unit_heads_ + kRowsOfReading);
    };
    stored_chunks_ = balanced(int64_t(stored_.size()) * num_units_, shape_.num_threads, stored_cost);
    auto tile_cost = [&](int64_t i) { return costs[i / num_units_].first; };
    tile_chunks_ = balanced(int64_t(tiles_.size()) * num_units_, shape_.num_threads, tile_cost);
    for (const auto& [cost, tile] : costs) cost_ += cost * num_units_;
    for (size_t i = 0; i < stored_.size(); ++i) cost_ += stored_cost(int64_t(i) * num_units_) * num_units_;
}

}  // namespace octavo
