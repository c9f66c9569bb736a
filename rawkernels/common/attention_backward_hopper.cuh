#pragma once
// What the three launches of Hopper's attention backward share: tiles, and the side buffers' order.
#include "common/attention.cuh"

static_assert(WIDTH == 64 || WIDTH == 128, "flash_attention_backward_hopper: WIDTH is 64 or 128");
// queries and keys of a tile
constexpr int BM = WIDTH == 64 ? 128 : 64, BN = 128;

// A tile of keys of one KV head, and the blocks of queries that see them. The plan is an array of them, and a last one
// with first = -1.
struct alignas(16) Tile {
    int head, first, batch, key_row;             // first: of its sequence; key_row: in the arrays k, v
    int keys, key_rows, shift, query_row;        // of the sequence; shift: the query that stands at key 0
    int begin, blocks, row_block, unused[5];     // row_block: the sequence's first block in the side buffers
};

// Blocks of BM queries of all sequences, laid end to end; packed ones each begin a block of their own.
__device__ __forceinline__ int first_row_block(const Attention& a, const Sequence& s) {
    return a.cu_q ? (int)(s.first_query / BM) + s.number : s.number * ((a.queries + BM - 1) / BM);
}
