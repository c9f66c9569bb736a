#pragma once
// Shared by the launches of attention's backward on Hopper: tiles, the layout of lse, delta and dq sums, and probabilities
// with bias, ALiBi or softcap.
#include "attention/common/attention_dropout.cuh"
#include "common/barrier.cuh"
#include "common/math.cuh"

static_assert(WIDTH == 64 || WIDTH == 128 || WIDTH == 256, "flash_attention_backward_hopper: WIDTH is 64, 128 or 256");
constexpr int BM = WIDTH == 64 ? 128 : 64;   // queries of a step
constexpr int BN = WIDTH == 256 ? 64 : 128;  // keys of a tile

// A tile of keys of one KV head, and the blocks of queries that see them. The plan is an array of tiles that ends with
// first = -1.
struct alignas(16) Tile {
    int head, first, batch, key_row;             // first: first key in the sequence; key_row: its row of k and v
    int keys, key_rows, shift, query_row;        // of the sequence; shift: the query at the position of key 0
    int begin, blocks, start, row_block;         // blocks of queries, visited cyclically from start;
                                                 // row_block: the sequence's first block in lse, delta and dq sums
    int number, queries, open_from, open_to;     // of the sequence; open: blocks that need no mask
};

// The first block of a sequence among the blocks of BM queries of all sequences. Packed sequences start new blocks.
__device__ __forceinline__ int first_row_block(const Attention& a, const Sequence& s) {
    return a.cu_q ? (int)(s.first_query / BM) + s.number : s.number * ((a.queries + BM - 1) / BM);
}

// exp2(logit - lse), 0 where masked. `softcap_grad` becomes the derivative of the softcap. penalty: of ALiBi; at: the
// element of the bias.
__device__ __forceinline__ float probability(const Attention& a, float dot, float lse, float penalty, long long at,
                                       bool seen, float& softcap_grad) {
    float x = dot * a.scale;
    softcap_grad = 1.f;
    if (a.softcap > 0.f) {
        const float e = exp2_fast(x * __fdividef(2.f * LOG2E, a.softcap));
        const float t = 1.f - __fdividef(2.f, e + 1.f);  // tanh(x / softcap)
        softcap_grad = 1.f - t * t;
        x = a.softcap * t;
    }
    if (a.bias_kind && seen) {
        if (a.bias_kind == 1 && !((const bool*)a.bias_data)[at]) seen = false;
        if (a.bias_kind == 2) x += ((const float*)a.bias_data)[at];
        if (a.bias_kind == 3) x += (float)((const scalar*)a.bias_data)[at];
    }
    return seen ? exp2_fast((x - penalty) * LOG2E - lse) : 0.f;
}
