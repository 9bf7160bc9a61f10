// Rows (token, head) of one KV head that are computed together, and what one partition gives for them.
#pragma once

#include "attention/micro_kernels.h"
#include "attention/softmax.h"

namespace octavo::OCTAVO_ISA {
namespace {

// What a thread works in; see attention_scratch_floats.
struct Scratch {
    float* q;       // panels [head_dim_k][rows of the panel], scaled
    float* scores;  // [kMaxRows][kScoreStride]
    float* mixed;   // [kMaxRows][head_dim_v] of the partition
    float* out;     // [kMaxRows][head_dim_v] of all partitions so far
    Stats* mixed_stats;
    Stats* stats;
    float* k_scales;  // [kScoreStride] of the partition's keys
    float* v_scales;
    float* k_block;  // keys and values of a group in float32
    float* v_block;

    Scratch(const KVLayout& kv, float* at) {
        auto take = [&](int64_t count) { float* part = at; at += count; return part; };
        q = take(kMaxRows * kv.head_dim_k);
        scores = take(kMaxRows * kScoreStride);
        mixed = take(kMaxRows * kv.head_dim_v);
        out = take(kMaxRows * kv.head_dim_v);
        mixed_stats = (Stats*)take(kMaxRows * 2);
        stats = (Stats*)take(kMaxRows * 2);
        k_scales = take(kScoreStride);
        v_scales = take(kScoreStride);
        k_block = take(int64_t(kMaxBlockSize) * kv.head_dim_k);
        v_block = take(int64_t(kMaxBlockSize) * kv.head_dim_v);
    }
};

// Heads of one KV head that are computed together: some or all of its group.
struct Unit {
    int kv_head, head, num_heads;

    Unit(const AttentionArgs& args, int index) {
        kv_head = index / args.units_per_group;
        int first = index % args.units_per_group * args.unit_heads;
        head = kv_head * args.group + first;
        num_heads = args.group - first < args.unit_heads ? args.group - first : args.unit_heads;
    }
};

struct RowTile {
    int num_rows = 0;
    int panel_rows = 1;  // of each panel but the last, which may have fewer
    int low[kMaxRows], high[kMaxRows];  // keys of the partition that a row may see; low >= high: none
    int first = kMaxPartition, last = 0;  // keys of the partition that some row may see
    int positions[kMaxRows];

    void add_token(const AttentionArgs& args, const Unit& unit, int64_t token, int position) {
        const float* from = args.q + token * args.q_stride + int64_t(unit.head) * args.kv.layout.head_dim_k;
        for (int h = 0; h < unit.num_heads; ++h, from += args.kv.layout.head_dim_k) {
            positions[num_rows] = position;
            sources[num_rows++] = from;
        }
    }

    // Panels of about the same number of rows.
    void make_panels() {
        int count = (num_rows + kMaxPanel - 1) / kMaxPanel;
        panel_rows = (num_rows + count - 1) / count;
    }

    int rows_of_panel(int row) const { return num_rows - row < panel_rows ? num_rows - row : panel_rows; }

    // Panels, transposed: [dims][rows of the panel].
    void pack_q(float scale, int dims, float* q) const {
        for (int row = 0; row < num_rows; row += panel_rows) {
            int rows = rows_of_panel(row);
            for (int r = 0; r < rows; ++r)
                for (int d = 0; d < dims; ++d) q[int64_t(row) * dims + d * rows + r] = sources[row + r][d] * scale;
        }
    }

    // Which keys of the partition that begins at position `start` each row sees. False: none at all.
    bool enter_partition(const AttentionArgs& args, int start) {
        first = kMaxPartition, last = 0;
        for (int row = 0; row < num_rows; ++row) {
            int begin = positions[row] - args.window + 1 - start, end = positions[row] + 1 - start;
            low[row] = begin > 0 ? begin : 0;
            high[row] = end < args.partition ? end : args.partition;
            if (low[row] >= high[row]) continue;
            if (low[row] < first) first = low[row];
            if (high[row] > last) last = high[row];
        }
        return first < last;
    }

    bool sees_any(int row) const { return low[row] < high[row]; }

   private:
    const float* sources[kMaxRows];
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
