// Splits the work of the attention family over the threads, and binds it to Python.
#include "attention/attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "attention/blocks.h"
#include "attention/plan.h"
#include "binding.h"
#include "isa.h"
#include "program.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// Memory that a thread keeps from one call to the next.
class ThreadMemory {
   public:
    float* floats(int64_t count) {
        if (count > size_) {
            memory_.reset(new (std::align_val_t(64)) float[count]);
            size_ = count;
        }
        return memory_.get();
    }

   private:
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<float[], Free> memory_;
    int64_t size_ = 0;
};

thread_local ThreadMemory scratch;    // of whoever computes
thread_local ThreadMemory workspace;  // of the caller, read by all

KVLayout kv_layout(int type, int block_size, int num_kv_heads, int head_dim_k, int head_dim_v) {
    constexpr int kBytes[] = {4, 2, 2, 1, 1};
    KVLayout layout{KVType(type), block_size, num_kv_heads, head_dim_k, head_dim_v, 0, 0, 0, 0};
    int64_t scale_bytes = kBytes[type] == 1 ? sizeof(float) : 0;
    layout.k_head_bytes = block_size * (int64_t(head_dim_k) * kBytes[type] + scale_bytes);
    layout.v_head_bytes = block_size * (int64_t(head_dim_v) * kBytes[type] + scale_bytes);
    layout.k_block_bytes = num_kv_heads * layout.k_head_bytes;
    layout.v_block_bytes = num_kv_heads * layout.v_head_bytes;
    return layout;
}

using Kernel = void (*)(const AttentionArgs&, int64_t, int64_t, float*);

void run_chunks(const Chunks& chunks, const AttentionArgs& args, Kernel kernel) {
    parallel_for(int64_t(chunks.size()) - 1, [&](int64_t chunk, int) {
        kernel(args, chunks[chunk], chunks[chunk + 1], scratch.floats(attention_scratch_floats(args.kv.layout)));
    });
}

void paged_attention(const AttentionPlan& plan, uintptr_t q, int64_t q_stride, uintptr_t out, uintptr_t k, uintptr_t v,
                     int type, int head_dim_k, double scale, double soft_cap, uintptr_t sinks) {
    const AttentionShape& shape = plan.shape();
    AttentionArgs args{};
    plan.describe(args);
    args.q = at<const float>(q);
    args.q_stride = q_stride;
    args.out = at<float>(out);
    args.kv = {at<char>(k), at<char>(v),
               kv_layout(type, shape.block_size, shape.num_kv_heads, head_dim_k, shape.head_dim_v)};
    args.scale = float(scale);
    args.soft_cap = float(soft_cap);
    args.sinks = at<const float>(sinks);
    ReleaseGil unlocked(plan.cost() * (head_dim_k + shape.head_dim_v) * 2);
    if (plan.num_stored() > 0) {
        args.stored_out = workspace.floats(plan.stored_out_floats() + plan.stored_stats_floats());
        args.stored_stats = args.stored_out + plan.stored_out_floats();
        run_chunks(plan.stored_chunks(), args, isa().attention->store_partitions);
    }
    run_chunks(plan.tile_chunks(), args, isa().attention->attend);
    int64_t row = int64_t(shape.num_heads) * shape.head_dim_v, idle = plan.num_tokens() - plan.first_idle_token();
    if (idle > 0) memset(args.out + plan.first_idle_token() * row, 0, sizeof(float) * idle * row);
}

AttentionPlan plan_attention(uintptr_t block_tables, int64_t table_width, uintptr_t query_start_loc, uintptr_t seq_lens,
                             int64_t num_requests, int64_t num_tokens, int64_t num_blocks, int block_size,
                             int num_heads, int num_kv_heads, int head_dim_v, int window) {
    AttentionShape shape{num_heads, num_kv_heads, head_dim_v, block_size, window, num_threads(), num_blocks};
    StepMetadata step{at<const int32_t>(block_tables), table_width, num_requests, at<const int32_t>(query_start_loc),
                      at<const int32_t>(seq_lens), num_tokens};
    return AttentionPlan(shape, step);
}

// Tokens a chunk for work of so many floats a token: a quarter of what is worth a thread, or all of it.
template <class Function>
void for_tokens(int64_t num_tokens, int64_t floats_per_token, Function&& function) {
    constexpr int64_t kWorthAThread = 1 << 16;
    int64_t per_chunk = num_tokens;
    if (num_threads() > 1 && num_tokens * floats_per_token > kWorthAThread)
        per_chunk = std::max<int64_t>(1, kWorthAThread / 4 / floats_per_token);
    if (num_tokens == 0) return;
    parallel_for((num_tokens + per_chunk - 1) / per_chunk, [&](int64_t chunk, int) {
        function(chunk * per_chunk, std::min(num_tokens, (chunk + 1) * per_chunk));
    });
}

void check_range(const int64_t* values, int64_t count, int64_t end, const char* message) {
    uint64_t highest = 0;
    for (int64_t i = 0; i < count; ++i) highest = std::max(highest, uint64_t(values[i]));
    if (count > 0 && highest >= uint64_t(end)) throw std::out_of_range(message);
}

void write_kv(uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t k_cache, uintptr_t v_cache,
              int64_t num_blocks, int type, int block_size, int num_kv_heads, int head_dim_k, int head_dim_v,
              uintptr_t slots, int64_t num_tokens, uintptr_t q, int64_t q_stride, int num_heads, uintptr_t positions,
              uintptr_t cos_sin, int64_t max_positions, int rotated, bool is_interleaved) {
    KVLayout layout = kv_layout(type, block_size, num_kv_heads, head_dim_k, head_dim_v);
    WriteArgs args{at<const float>(k), at<const float>(v), k_stride, v_stride, at<const int64_t>(slots),
                   {at<char>(k_cache), at<char>(v_cache), layout}};
    RopeArgs rope{at<const int64_t>(positions), at<const float>(cos_sin), rotated, is_interleaved};
    RopeTensor query{at<const float>(q), at<float>(q), q_stride, q_stride, num_heads, head_dim_k};
    check_range(args.slots, num_tokens, num_blocks * block_size, "slot_mapping names a slot that the cache lacks");
    if (q) check_range(rope.positions, num_tokens, max_positions, "positions has one beyond cos_sin");
    int64_t floats = int64_t(num_kv_heads) * (head_dim_k + head_dim_v) + (q ? num_heads * head_dim_k : 0);
    for_tokens(num_tokens, floats, [&](int64_t begin, int64_t end) {
        if (q) isa().attention->rope(rope, query, begin, end);
        isa().attention->write_kv(args, q ? &rope : nullptr, begin, end, scratch.floats(write_scratch_floats(layout)));
    });
}

void rope(uintptr_t x, int64_t stride, uintptr_t out, int num_heads, int head_dim, int64_t num_tokens,
          uintptr_t positions, uintptr_t cos_sin, int64_t max_positions, int rotated, bool is_interleaved) {
    RopeArgs args{at<const int64_t>(positions), at<const float>(cos_sin), rotated, is_interleaved};
    int64_t row = int64_t(num_heads) * head_dim;
    RopeTensor tensor{at<const float>(x), at<float>(out), stride, row, num_heads, head_dim};
    check_range(args.positions, num_tokens, max_positions, "positions has one beyond cos_sin");
    for_tokens(num_tokens, row, [&](int64_t begin, int64_t end) { isa().attention->rope(args, tensor, begin, end); });
}

}  // namespace

void bind_attention(nb::module_& module) {
    nb::class_<AttentionPlan>(module, "AttentionPlan", "The work of one step's attention.")
        .def_prop_ro("address", [](const AttentionPlan& plan) { return reinterpret_cast<uintptr_t>(&plan); })
        .def_prop_ro("num_stored", &AttentionPlan::num_stored, "Partitions computed ahead: shared, or split off.");
    module.def("plan_attention", &plan_attention);
    define<&paged_attention>(module, "paged_attention");
    define<&write_kv>(module, "write_kv");
    define<&rope>(module, "rope");
    module.def("copy_blocks", [](uintptr_t src, int64_t num_src, uintptr_t dst, int64_t num_dst, int64_t block_bytes,
                                 uintptr_t pairs, int64_t num_pairs) {
        copy_blocks(at<const char>(src), num_src, at<char>(dst), num_dst, block_bytes, at<const int64_t>(pairs),
                    num_pairs);
    });
}

}  // namespace octavo
