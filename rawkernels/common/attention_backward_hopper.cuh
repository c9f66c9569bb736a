#pragma once
// What the launches of Hopper's attention backward share: tiles, the side buffers' order, and what a
// weight is beside the plain one.
#include "common/attention.cuh"
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

// Which of this thread's 32 numbers of P^T are kept, from queries i0 and keys j0 of its warp on; both multiples of 16.
// P^T lies transposed in registers, so what a lane wants others draw: lanes l and l ^ 4 draw, as lanes L and L ^ 4, the
// numbers of either, l the ones of queries with the parity of l / 4.
__device__ __forceinline__ u32 keep_bits(const Attention& a, const PhiloxKey& key, int i0, int j0, int sheet) {
    const u32 lane = threadIdx.x % 32, drawn = lane / 8 | (lane & 4) | lane % 4 << 3 | (u32)sheet << 5;
    // Two 16-bit numbers at once: which are below the threshold? Where it has no bit 15, of their complements.
    const u32 flip = a.threshold < 0x8000 ? ~0u : 0u, rest = (flip ? a.threshold : 0x10000 - a.threshold) * 0x10001;
    u32 even = 0, odd = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const uint4 x = philox(key, (u32)(i0 / 16 + t) | (u32)(j0 / 16) << 16, drawn);
        const u32 numbers[4] = {x.x, x.z, x.y, x.w};
        u32 bits = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const u32 y = numbers[n] ^ flip;
            bits |= ((y & 0x7fff7fff) + rest & y & 0x80008000) >> (15 - 2 * n);
        }
        even |= (bits & 0xff) << 8 * t;
        odd |= bits >> 16 << 8 * t;
        asm volatile("" : "+r"(even), "+r"(odd));  // now, not where they are asked for
    }
    const u32 other = __shfl_xor_sync(~0u, lane & 4 ? even : odd, 4);
    return (lane & 4 ? odd << 1 | other : even | other << 1) ^ ~flip;
}
