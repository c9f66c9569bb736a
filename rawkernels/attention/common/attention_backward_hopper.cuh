#pragma once
// What the launches of Hopper's attention backward share: tiles, the side buffers' order, and what a
// weight is beside the plain one.
#include "attention/common/attention_dropout.cuh"
#include "common/barrier.cuh"

static_assert(WIDTH == 64 || WIDTH == 128 || WIDTH == 256, "flash_attention_backward_hopper: WIDTH is 64, 128 or 256");
// queries and keys of a tile
constexpr int BM = WIDTH == 64 ? 128 : 64, BN = WIDTH == 256 ? 64 : 128;
constexpr float LOG2_E = 1.44269504f;

// A tile of keys of one KV head, and the blocks of queries that see them. The plan is an array of them, and a last one
// with first = -1.
struct alignas(16) Tile {
    int head, first, batch, key_row;             // first: of its sequence; key_row: in the arrays k, v
    int keys, key_rows, shift, query_row;        // of the sequence; shift: the query that stands at key 0
    int begin, blocks, start, row_block;         // blocks of queries, visited from start round to start
    int number, queries, open_from, open_to;     // of the sequence; row_block: its first block in the side buffers;
                                                 // open: blocks whose queries all see all keys of the tile
};

// Blocks of BM queries of all sequences, laid end to end; packed ones each begin a block of their own.
__device__ __forceinline__ int first_row_block(const Attention& a, const Sequence& s) {
    return a.cu_q ? (int)(s.first_query / BM) + s.number : s.number * ((a.queries + BM - 1) / BM);
}

// exp2 of a logit's distance from lse, 0 where a mask hides it; `bend` is the derivative by the softcap.
// penalty: of ALiBi; at: the logit's place in the bias.
__device__ __forceinline__ float weigh(const Attention& a, float dot, float lse, float penalty, long long at,
                                       bool seen, float& bend) {
    float x = dot * a.scale;
    bend = 1.f;
    if (a.softcap > 0.f) {
        const float e = exp2_fast(x * __fdividef(2.f * LOG2_E, a.softcap));
        const float t = 1.f - __fdividef(2.f, e + 1.f);  // tanh(x / softcap)
        bend = 1.f - t * t;
        x = a.softcap * t;
    }
    if (a.bias_kind && seen) {
        if (a.bias_kind == 1 && !((const bool*)a.bias_data)[at]) seen = false;
        if (a.bias_kind == 2) x += ((const float*)a.bias_data)[at];
        if (a.bias_kind == 3) x += (float)((const scalar*)a.bias_data)[at];
    }
    return seen ? exp2_fast((x - penalty) * LOG2_E - lse) : 0.f;
}
