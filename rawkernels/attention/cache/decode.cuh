#pragma once
// Shared by the kernels of decode attention: the problem, the work of a block, and the address of a key in the cache.
#include "attention/common/attention.cuh"
#include "common/index.cuh"
#include "common/math.cuh"

constexpr int SPLIT_KEYS = 64;  // splits are multiples of it

// Filled by gpuattn/ops/attention/decode_attention.py (PROBLEM): the same fields in the same order.
struct Decode {
    Strides q, k, v;              // for caches, batch is the stride from sequence to sequence or from page to page
    long long outputs;            // B * T * H
    const int* lengths;           // (N,): keys that the last query sees
    const int* pages;             // (N, max_pages), or null
    const short* slots;           // (N, keys), or null
    const float *slopes, *sink;   // (H,) or (B, H); (H,); or null
    long long* flag;              // records a page or a slot out of range
    int sharers, queries;         // rows of q per sequence of the cache; tokens of each
    int heads, kv_heads, group;   // group: query heads per KV head
    int rows;                     // sharers * queries * group: query rows that share keys
    int keys;                     // capacity of the cache per sequence
    int head_dim, value_dim;
    int page, page_count, max_pages, beam;
    int window, slopes_batch;
    int splits, chunk;            // keys of a split; 0: an equal share of the sequence
    float scale, softcap;         // softcap 0: none
};

// A block's rows and keys. Heads vary fastest, so that adjacent blocks read adjacent memory.
struct Work { int number, kv_head, first_row, rows, split, length, first, last; };

template <int ROWS>
__device__ inline Work work_at(const Decode& a) {
    Work w;
    int x = blockIdx.x;
    w.kv_head = x % a.kv_heads, x /= a.kv_heads;
    const int row_blocks = (a.rows + ROWS - 1) / ROWS;
    w.first_row = x % row_blocks * ROWS, x /= row_blocks;
    w.rows = min(ROWS, a.rows - w.first_row);
    w.split = x % a.splits, w.number = x / a.splits;
    w.length = max(0, min(a.lengths[w.number], a.keys));
    const int begin = max(0, w.length - a.queries - a.window), span = w.length - begin;
    int chunk = a.chunk;
    if (chunk == 0) chunk = (span + a.splits * SPLIT_KEYS - 1) / (a.splits * SPLIT_KEYS) * SPLIT_KEYS;
    w.first = min(w.length, begin + w.split * chunk);
    w.last = min(w.length, w.first + chunk);
    return w;
}

// A query: its row of q, its token, its head, and the key at its position.
struct Query { int batch, token, head, at; };

__device__ inline Query query_at(const Decode& a, const Work& w, int row) {
    row += w.first_row;
    const int token = row / a.group % a.queries;
    return {w.number * a.sharers + row / (a.group * a.queries), token, w.kv_head * a.group + row % a.group,
            w.length - a.queries + token};
}

__device__ inline long long output_of(const Decode& a, const Query& q) {
    return ((long long)q.batch * a.queries + q.token) * a.heads + q.head;
}

// The row (dense or slots) or page of the cache that holds key j of a sequence.
__device__ inline int outer_index(const Decode& a, int number, int j) {
    int outer = number;
    if (a.pages) {
        outer = a.pages[(long long)number * a.max_pages + j / a.page];
        if (out_of_range(outer, a.page_count, a.flag)) outer = 0;
    } else if (a.slots) {
        int slot = a.slots[(long long)number * a.keys + j];
        if (out_of_range(slot, a.beam, a.flag)) slot = 0;
        outer = number / a.beam * a.beam + slot;
    }
    return outer;
}

// The offsets of a key and its value, in elements from the start of the caches.
struct Spot { long long k, v; };

__device__ inline Spot spot_at(const Decode& a, int outer, int j, int head) {
    const long long inner = a.pages ? j % a.page : j;
    return {outer * a.k.batch + inner * a.k.row + head * a.k.head,
            outer * a.v.batch + inner * a.v.row + head * a.v.head};
}

// The softmax uses base 2: logits are multiplied by log2(e).
__device__ __forceinline__ float scaled_logit(const Decode& a, float dot) {
    const float x = dot * a.scale;
    return LOG2E * (a.softcap > 0.f ? a.softcap * tanhf(x / a.softcap) : x);
}
__device__ inline float slope_of(const Decode& a, const Query& q) {
    return a.slopes ? LOG2E * a.slopes[q.batch * a.slopes_batch + q.head] : 0.f;
}
__device__ inline float sink_of(const Decode& a, const Work& w, const Query& q) {
    return a.sink && w.split == 0 ? LOG2E * a.sink[q.head] : NEG_INF;  // only in the first split
}
// The number to subtract before exp2: `top`, or 0 where no key was seen.
__device__ __forceinline__ float finite_or_zero(float top) { return top == NEG_INF ? 0.f : top; }

// Stores an element of the result to the output or, with several splits, to this split's part.
__device__ inline void store_value(const Decode& a, const Work& w, const Query& q, int column, float x, scalar* out,
                                   float* parts) {
    const long long at = output_of(a, q) * a.value_dim + column;
    if (a.splits > 1) parts[w.split * a.outputs * a.value_dim + at] = x;
    else out[at] = (scalar)x;
}
__device__ inline void store_lse(const Decode& a, const Work& w, const Query& q, float value, float* lse, float* parts_lse) {
    if (a.splits > 1) parts_lse[w.split * a.outputs + output_of(a, q)] = value;
    else lse[((long long)q.batch * a.heads + q.head) * a.queries + q.token] = value;
}
