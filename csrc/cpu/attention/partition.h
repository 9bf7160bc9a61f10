// One partition of the KV for a tile of rows: scores, softmax, weighted values.
#pragma once

#include "attention/row_tile.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kMaxBlocks = kMaxPartition / 8;
constexpr int kMaxStrips = kMaxPartition / 4 + kStripGroup;

OCTAVO_INLINE int min_of(int a, int b) { return a < b ? a : b; }
OCTAVO_INLINE int max_of(int a, int b) { return a > b ? a : b; }

// Addresses of the blocks of a partition, for one KV head; only of those that some row sees: the block table holds
// nothing of use beyond.
template <class T>
struct PartitionBlocks {
    int first, last;  // blocks
    const T* k[kMaxBlocks];
    const T* v[kMaxBlocks];

    PartitionBlocks(const KVMemory& kv, const int32_t* blocks, int kv_head, int first_key, int last_key) {
        const KVLayout& layout = kv.layout;
        first = first_key / layout.block_size;
        last = (last_key + layout.block_size - 1) / layout.block_size;
        for (int i = first; i < last; ++i) {
            k[i] = (const T*)(kv.k + blocks[i] * layout.k_block_bytes + kv_head * layout.k_head_bytes);
            v[i] = (const T*)(kv.v + blocks[i] * layout.v_block_bytes + kv_head * layout.v_head_bytes);
        }
    }
};

// The computation of one partition; what `run` leaves is in scratch.mixed and scratch.mixed_stats.
template <class T>
class Partition {
   public:
    Partition(const AttentionArgs& args, const Unit& unit, const RowTile& rows, const Scratch& scratch,
              const int32_t* blocks)
        : args_(args), layout_(args.kv.layout), rows_(rows), scratch_(scratch),
          blocks_(args.kv, blocks, unit.kv_head, rows.first, rows.last) {}

    void run() {
        if constexpr (sizeof(T) == 1) gather_scales();
        if (kFloats > 8 && layout_.block_size % kFloats != 0)
            score<8>();
        else
            score<kFloats>();
        softmax();
        mix();
    }

   private:
    static constexpr bool kHasScales = sizeof(T) == 1;
    // With several panels of rows, it pays to convert keys and values once for all of them.
    bool converts() const { return sizeof(T) < 4 && rows_.num_rows > 2 * kMaxPanel; }

    void gather_scales() {
        int size = layout_.block_size;
        for (int b = blocks_.first; b < blocks_.last; ++b) {
            memcpy(scratch_.k_scales + b * size, blocks_.k[b] + size * layout_.head_dim_k, size * sizeof(float));
            memcpy(scratch_.v_scales + b * size, blocks_.v[b] + size * layout_.head_dim_v, size * sizeof(float));
        }
    }

    // While keys are scored, their V and the next K come to the cache.
    template <int W>
    void score() {
        const T* keys[kMaxStrips];
        const char *key_pieces[kMaxStrips], *value_pieces[kMaxStrips];  // a strip's share of its block
        int size = layout_.block_size, begin = rows_.first / W, end = (rows_.last + W - 1) / W, count = end - begin;
        int block = begin * W / size, offset = begin * W - block * size;
        for (int i = 0; i < count + kStripGroup; ++i) {
            keys[i] = blocks_.k[block] + offset;
            key_pieces[i] = (const char*)(blocks_.k[block] + offset * layout_.head_dim_k);
            value_pieces[i] = (const char*)(blocks_.v[block] + offset * layout_.head_dim_v);
            if (i + 1 >= count) continue;  // the last one again, to fill its group
            offset += W;
            if (offset == size) ++block, offset = 0;
        }
        Fetch fetch;
        fetch.value_bytes = W * int64_t(sizeof(T)) * layout_.head_dim_v;
        fetch.key_bytes = W * int64_t(sizeof(T)) * layout_.head_dim_k;
        for (int i = 0; i < count; i += kStripGroup) {
            fetch.values = value_pieces + i;
            fetch.keys = key_pieces + min_of(i + kStripGroup, count);
            Strips<T> strips{keys + i, size, layout_.head_dim_k, fetch};
            score_strips<W>(strips, min_of(kStripGroup, count - i), scratch_.scores + (begin + i) * W);
        }
    }

    template <int W>
    void score_strips(const Strips<T>& strips, int count, float* scores) {
        if (!converts()) {
            score_group<T, W>(scratch_.q, rows_.num_rows, rows_.panel_rows, strips, count, scores);
            return;
        }
        constexpr int kStride = kStripGroup * W;
        const float* converted[kStripGroup];
        for (int c = 0; c < kStripGroup; ++c) {
            converted[c] = scratch_.k_block + c * W;
            for (int d = 0; d < strips.dims; ++d)
                store<W>(scratch_.k_block + d * kStride + c * W, load<W>(strips.keys[c] + d * strips.stride));
        }
        Strips<float> wide{converted, kStride, strips.dims, strips.fetch};
        score_group<float, W>(scratch_.q, rows_.num_rows, rows_.panel_rows, wide, count, scores);
    }

    // First the maxima of all rows, so that the exponentials of one row need not wait for its own.
    void softmax() {
        const float* k_scales = kHasScales ? scratch_.k_scales : nullptr;
        const float* v_scales = kHasScales ? scratch_.v_scales : nullptr;
        for (int row = 0; row < rows_.num_rows; ++row) {
            if (!rows_.sees_any(row)) continue;
            int low = rows_.low[row], high = rows_.high[row];
            if (kHasScales || args_.soft_cap != 0.0f)
                transform_scores(scores(row), low, high, k_scales, args_.soft_cap);
            scratch_.mixed_stats[row].maximum = mask_and_maximum(scores(row), low, high);
        }
        for (int row = 0; row < rows_.num_rows; ++row) {
            if (!rows_.sees_any(row)) continue;
            Stats& stats = scratch_.mixed_stats[row];
            stats.sum = exponentiate(scores(row), rows_.low[row], rows_.high[row], stats.maximum, v_scales);
        }
    }

    void mix() {
        memset(scratch_.mixed, 0, sizeof(float) * rows_.num_rows * layout_.head_dim_v);
        int size = layout_.block_size, blocks_at_once = max_of(1, 64 / size);
        for (int b = blocks_.first; b < blocks_.last; b += blocks_at_once) {
            int begin = max_of(b * size, rows_.first);
            int end = min_of(min_of(b + blocks_at_once, blocks_.last) * size, rows_.last);
            if (!converts()) {
                mix_keys(Values<T>{blocks_.v, size, layout_.head_dim_v}, begin, end);
                continue;
            }
            convert_values(b, min_of(b + blocks_at_once, blocks_.last));
            // one long block, addressed as if it began with the partition's first key
            const float* block = scratch_.v_block - int64_t(b) * size * layout_.head_dim_v;
            mix_keys(Values<float>{&block, kMaxPartition, layout_.head_dim_v}, begin, end);
        }
    }

    void convert_values(int begin, int end) {
        int64_t count = int64_t(layout_.block_size) * layout_.head_dim_v;
        float* to = scratch_.v_block;
        for (int b = begin; b < end; ++b, to += count)
            convert(blocks_.v[b], count, to);
    }

    // A block has at least 8 keys of heads that are multiples of 8.
    static OCTAVO_INLINE void convert(const T* from, int64_t count, float* to) {
        for (int64_t i = 0; i < count; i += kFloats) store<kFloats>(to + i, load<kFloats>(from + i));
    }

    // Rows of a panel take the keys that all of them see together, the few others each by itself, in order.
    template <class S>
    void mix_keys(const Values<S>& v, int begin, int end) {
        for (int row = 0; row < rows_.num_rows; row += rows_.panel_rows) {
            int count = rows_.rows_of_panel(row), low = begin, high = end;
            for (int r = row; r < row + count; ++r) {
                low = max_of(low, rows_.low[r]);
                high = min_of(high, rows_.high[r]);
            }
            if (low >= high) low = high = end;
            for (int r = row; r < row + count; ++r)
                mix_one(v, r, max_of(begin, rows_.low[r]), min_of(low, rows_.high[r]));
            if (low < high) mix_rows<S>(count, scores(row), v, low, high, mixed(row));
            for (int r = row; r < row + count; ++r)
                mix_one(v, r, max_of(high, rows_.low[r]), min_of(end, rows_.high[r]));
        }
    }

    template <class S>
    void mix_one(const Values<S>& v, int row, int begin, int end) {
        if (begin < end) mix_rows<S>(1, scores(row), v, begin, end, mixed(row));
    }

    float* scores(int row) const { return scratch_.scores + row * kScoreStride; }
    float* mixed(int row) const { return scratch_.mixed + int64_t(row) * layout_.head_dim_v; }

    const AttentionArgs& args_;
    const KVLayout& layout_;
    const RowTile& rows_;
    const Scratch& scratch_;
    const PartitionBlocks<T> blocks_;
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
