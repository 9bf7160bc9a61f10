// The walk over partitions: tiles of tokens folding them in position order, and partitions computed ahead.
#include "attention/attention.h"

#include "attention/kv_write.h"
#include "attention/partition.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A partition of a stored item for one unit, into the slots of its tokens.
template <class T>
void store_partition(const AttentionArgs& args, const StoredItem& item, const Unit& unit, const Scratch& scratch) {
    RowTile rows;
    const StoredToken* tokens = args.stored_tokens + item.first;
    for (int i = 0; i < item.num_tokens; ++i) rows.add_token(args, unit, tokens[i].token, tokens[i].position);
    rows.make_panels();
    if (!rows.enter_partition(args, item.partition * args.partition)) return;
    int dims = args.kv.layout.head_dim_v, blocks = args.partition / args.kv.layout.block_size;
    rows.pack_q(args.scale, args.kv.layout.head_dim_k, scratch.q);
    Partition<T>(args, unit, rows, scratch, item.blocks + int64_t(item.partition) * blocks).run();
    for (int row = 0; row < rows.num_rows; ++row) {
        int64_t place = int64_t(tokens[row / unit.num_heads].slot) * args.num_heads + unit.head + row % unit.num_heads;
        memcpy(args.stored_out + place * dims, scratch.mixed + int64_t(row) * dims, sizeof(float) * dims);
        memcpy(args.stored_stats + place * 2, scratch.mixed_stats + row, sizeof(Stats));
    }
}

// All partitions that a tile's tokens see, for one unit.
template <class T>
class TileWalk {
   public:
    TileWalk(const AttentionArgs& args, const TokenTile& tile, const Unit& unit, const Scratch& scratch)
        : args_(args), tile_(tile), unit_(unit), scratch_(scratch), dims_(args.kv.layout.head_dim_v) {
        for (int i = 0; i < tile.num_tokens; ++i) rows_.add_token(args, unit, tile.token + i, tile.position + i);
        rows_.make_panels();
    }

    void run() {
        int oldest = max_of(0, tile_.position - args_.window + 1), newest = tile_.position + tile_.num_tokens - 1;
        bool is_packed = false;
        for (int row = 0; row < rows_.num_rows; ++row) is_empty_[row] = true;
        for (int p = oldest / args_.partition; p <= newest / args_.partition; ++p) {
            if (!rows_.enter_partition(args_, p * args_.partition)) continue;
            int slot = tile_.slots < 0 ? -1 : args_.slots[tile_.slots + p];
            if (slot >= 0) {
                fold_stored(slot);
                continue;
            }
            if (!is_packed) rows_.pack_q(args_.scale, args_.kv.layout.head_dim_k, scratch_.q);
            is_packed = true;
            compute(p);
        }
        finish();
    }

   private:
    void compute(int p) {
        int64_t block = int64_t(p) * (args_.partition / args_.kv.layout.block_size);
        Partition<T>(args_, unit_, rows_, scratch_, tile_.blocks + block).run();
        for (int row = 0; row < rows_.num_rows; ++row)
            if (rows_.sees_any(row)) take(row, scratch_.mixed_stats[row], scratch_.mixed + int64_t(row) * dims_);
    }

    void fold_stored(int slot) {
        for (int row = 0; row < rows_.num_rows; ++row) {
            if (!rows_.sees_any(row)) continue;
            int64_t token = slot + row / unit_.num_heads, head = unit_.head + row % unit_.num_heads;
            int64_t place = token * args_.num_heads + head;
            Stats stats;
            memcpy(&stats, args_.stored_stats + place * 2, sizeof stats);
            take(row, stats, args_.stored_out + place * dims_);
        }
    }

    void take(int row, const Stats& stats, const float* mixed) {
        float* out = scratch_.out + int64_t(row) * dims_;
        if (!is_empty_[row]) return fold(scratch_.stats[row], out, stats, mixed, dims_);
        is_empty_[row] = false;
        scratch_.stats[row] = stats;
        memcpy(out, mixed, sizeof(float) * dims_);
    }

    void finish() {
        for (int row = 0; row < rows_.num_rows; ++row) {
            int64_t token = tile_.token + row / unit_.num_heads, head = unit_.head + row % unit_.num_heads;
            const float* sink = args_.sinks ? args_.sinks + head : nullptr;
            float* out = args_.out + (token * args_.num_heads + head) * dims_;
            finish_row(scratch_.stats[row], scratch_.out + int64_t(row) * dims_, sink, out, dims_);
        }
    }

    const AttentionArgs& args_;
    const TokenTile& tile_;
    const Unit unit_;
    const Scratch& scratch_;
    const int dims_;
    RowTile rows_;
    bool is_empty_[kMaxRows];
};

template <class T>
void store_items(const AttentionArgs& args, int64_t begin, int64_t end, const Scratch& scratch) {
    for (int64_t i = begin; i < end; ++i)
        store_partition<T>(args, args.stored[i / args.num_units], Unit(args, int(i % args.num_units)), scratch);
}

template <class T>
void attend_items(const AttentionArgs& args, int64_t begin, int64_t end, const Scratch& scratch) {
    for (int64_t i = begin; i < end; ++i)
        TileWalk<T>(args, args.tiles[i / args.num_units], Unit(args, int(i % args.num_units)), scratch).run();
}

void store_partitions(const AttentionArgs& args, int64_t begin, int64_t end, float* memory) {
    Scratch scratch(args.kv.layout, memory);
    switch (args.kv.layout.type) {
        case KVType::f32: return store_items<float>(args, begin, end, scratch);
        case KVType::bf16: return store_items<bf16>(args, begin, end, scratch);
        case KVType::f16: return store_items<f16>(args, begin, end, scratch);
        case KVType::int8: return store_items<int8_t>(args, begin, end, scratch);
        case KVType::fp8: return store_items<octavo::fp8>(args, begin, end, scratch);
    }
}

void attend(const AttentionArgs& args, int64_t begin, int64_t end, float* memory) {
    Scratch scratch(args.kv.layout, memory);
    switch (args.kv.layout.type) {
        case KVType::f32: return attend_items<float>(args, begin, end, scratch);
        case KVType::bf16: return attend_items<bf16>(args, begin, end, scratch);
        case KVType::f16: return attend_items<f16>(args, begin, end, scratch);
        case KVType::int8: return attend_items<int8_t>(args, begin, end, scratch);
        case KVType::fp8: return attend_items<octavo::fp8>(args, begin, end, scratch);
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{store_partitions, attend, write_kv, rotate_tokens};

}  // namespace octavo::OCTAVO_ISA
