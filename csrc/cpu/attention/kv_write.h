// Rotary embedding, and the KV of new tokens into the cache: K transposed within its block.
#pragma once

#include "attention/softmax.h"

namespace octavo::OCTAVO_ISA {
namespace {

// One head. from and to may be the same. One function for all callers, so that they contract alike.
__attribute__((noinline)) void rotate(const float* from, float* to, const float* cos, int rotated, int dims,
                                      bool is_interleaved) {
    int half = rotated / 2;
    const float* sin = cos + half;
    int i = 0;
    if (is_interleaved) {
        for (; i < half; ++i) {
            float x = from[2 * i], y = from[2 * i + 1];
            to[2 * i] = x * cos[i] - y * sin[i];
            to[2 * i + 1] = y * cos[i] + x * sin[i];
        }
    } else {
        for (; i + kNarrow <= half; i += kNarrow) {
            auto x = load<kNarrow>(from + i), y = load<kNarrow>(from + half + i);
            auto c = load<kNarrow>(cos + i), s = load<kNarrow>(sin + i);
            store<kNarrow>(to + i, x * c - y * s);
            store<kNarrow>(to + half + i, y * c + x * s);
        }
        for (; i < half; ++i) {
            float x = from[i], y = from[half + i];
            to[i] = x * cos[i] - y * sin[i];
            to[half + i] = y * cos[i] + x * sin[i];
        }
    }
    if (from != to) memcpy(to + rotated, from + rotated, sizeof(float) * (dims - rotated));
}

void rotate_tokens(const RopeArgs& args, const RopeTensor& tensor, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        const float* cos_sin = args.cos_sin + args.positions[token] * args.rotated;
        const float* from = tensor.x + token * tensor.stride;
        float* to = tensor.out + token * tensor.out_stride;
        for (int h = 0; h < tensor.num_heads; ++h, from += tensor.head_dim, to += tensor.head_dim)
            rotate(from, to, cos_sin, args.rotated, tensor.head_dim, args.is_interleaved);
    }
}

// The largest magnitude; infinity or NaN where there is one.
OCTAVO_INLINE float largest(const float* x, int dims) {
    I<kNarrow> highest = {};  // magnitudes order like their bits
    for (int i = 0; i < dims; i += kNarrow) {
        I<kNarrow> bits = (I<kNarrow>)load<kNarrow>(x + i) & 0x7fffffff;
        I<kNarrow> is_higher = (I<kNarrow>)(bits > highest);
        highest = (is_higher & bits) | (~is_higher & highest);
    }
    int32_t bits = 0;
    for (int i = 0; i < kNarrow; ++i) bits = highest[i] > bits ? highest[i] : bits;
    float maximum;
    memcpy(&maximum, &bits, sizeof maximum);
    return maximum;
}

// x in the cache's dtype. Returns the scale of the 8-bit ones: what makes the largest magnitude the largest there is.
// NaN and infinity in x make the scale such, and so whatever is read back.
template <class T>
OCTAVO_INLINE float encode(const float* x, int dims, T* to) {
    for (int i = 0; i < dims; i += kNarrow) store<kNarrow>(to + i, load<kNarrow>(x + i));
    return 0.0f;
}
OCTAVO_INLINE float encode(const float* x, int dims, int8_t* to) {
    float scale = largest(x, dims) / 127.0f;
    for (int i = 0; i < dims; ++i) {
        float value = scale > 0.0f ? x[i] / scale : 0.0f;
        value = value < 127.0f ? value : 127.0f;
        value = value > -127.0f ? value : -127.0f;
        to[i] = (int8_t)(int)((value + kRounder) - kRounder);
    }
    return scale;
}
OCTAVO_INLINE float encode(const float* x, int dims, fp8* to) {
    float scale = largest(x, dims) / 448.0f;
    for (int i = 0; i < dims; i += kNarrow) {
        F<kNarrow> values = scale > 0.0f ? load<kNarrow>(x + i) / scale : F<kNarrow>{};
        store<kNarrow>(to + i, vmax<kNarrow>(vmin<kNarrow>(values, splat<kNarrow>(448.0f)), splat<kNarrow>(-448.0f)));
    }
    return scale;
}

template <class T>
struct KVWriter {
    const WriteArgs& args;
    const RopeArgs* rope;
    float* rotated;  // [head_dim_k]
    T* encoded;      // [max(head_dim_k, head_dim_v)]

    void write_k(const float* x, int64_t token, char* head, int offset) const {
        const KVLayout& layout = args.kv.layout;
        int dims = layout.head_dim_k, size = layout.block_size;
        if (rope) {
            const float* cos_sin = rope->cos_sin + rope->positions[token] * rope->rotated;
            rotate(x, rotated, cos_sin, rope->rotated, dims, rope->is_interleaved);
            x = rotated;
        }
        float scale = encode(x, dims, encoded);
        T* to = (T*)head + offset;
        for (int d = 0; d < dims; ++d) to[int64_t(d) * size] = encoded[d];
        if constexpr (sizeof(T) == 1) memcpy(head + dims * size + offset * sizeof(float), &scale, sizeof scale);
    }

    void write_v(const float* x, char* head, int offset) const {
        int dims = args.kv.layout.head_dim_v;
        float scale = encode(x, dims, encoded);
        memcpy((T*)head + int64_t(offset) * dims, encoded, dims * sizeof(T));
        if constexpr (sizeof(T) == 1)
            memcpy(head + dims * args.kv.layout.block_size + offset * sizeof(float), &scale, sizeof scale);
    }

    void write_token(int64_t token) const {
        const KVLayout& layout = args.kv.layout;
        int64_t slot = args.slots[token], block = slot / layout.block_size;
        int offset = int(slot - block * layout.block_size);
        for (int g = 0; g < layout.num_kv_heads; ++g) {
            write_k(args.k + token * args.k_stride + int64_t(g) * layout.head_dim_k, token,
                    args.kv.k + block * layout.k_block_bytes + g * layout.k_head_bytes, offset);
            write_v(args.v + token * args.v_stride + int64_t(g) * layout.head_dim_v,
                    args.kv.v + block * layout.v_block_bytes + g * layout.v_head_bytes, offset);
        }
    }
};

template <class T>
void write_tokens(const WriteArgs& args, const RopeArgs* rope, int64_t begin, int64_t end, float* scratch) {
    KVWriter<T> writer{args, rope, scratch, (T*)(scratch + args.kv.layout.head_dim_k)};
    for (int64_t token = begin; token < end; ++token) writer.write_token(token);
}

void write_kv(const WriteArgs& args, const RopeArgs* rope, int64_t begin, int64_t end, float* scratch) {
    switch (args.kv.layout.type) {
        case KVType::f32: return write_tokens<float>(args, rope, begin, end, scratch);
        case KVType::bf16: return write_tokens<bf16>(args, rope, begin, end, scratch);
        case KVType::f16: return write_tokens<f16>(args, rope, begin, end, scratch);
        case KVType::int8: return write_tokens<int8_t>(args, rope, begin, end, scratch);
        case KVType::fp8: return write_tokens<octavo::fp8>(args, rope, begin, end, scratch);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
