#pragma once
// Shared by the forward kernels for Hopper: the order of tiles, the key blocks that a tile's queries see, and masks, biases
// and dropout in the accumulators of a warpgroup (m64nN fragments, wgmma.cuh).
#include "attention/common/attention_dropout.cuh"
#include "common/math.cuh"
#include "common/wgmma.cuh"

// ---- tiles: ROWS queries of one head
struct Tile { int first, head, number, queries, keys, offset, first_query; };  // first: the first query; rest: Sequence

// Sets t to tile number `index` of row_blocks * all_heads; returns false if it has no queries. Tiles with many keys under a
// causal mask come first, within sections of heads whose keys and values fit in L2. Packed sequences: all_heads = heads, and
// sequence b has the row blocks from cu_q[b] / ROWS + b on, so that row_blocks = tokens / ROWS + sequences is enough; at
// most one row block per sequence is empty. across: adjacent tiles are the same head of different sequences, instead of
// different heads of the same sequence.
template <int ROWS> __device__ __forceinline__ bool tile_at(const Attention& a, int index, int row_blocks, int all_heads,
                                                              int section, bool across, Tile& t, int& first_key) {
    const int before = index / (row_blocks * section) * section, here = min(section, all_heads - before);
    const int rest = index - before * row_blocks, head = before + rest % here;
    int block = row_blocks - 1 - rest / here, number = across ? head % a.sequences : head / a.heads;
    if (a.cu_q) {
        int high = a.sequences - 1;
        number = 0;
        while (number < high) {
            const int middle = (number + high + 1) / 2;
            if (a.cu_q[middle] / ROWS + middle <= block) number = middle; else high = middle - 1;
        }
        block -= a.cu_q[number] / ROWS + number;
    }
    const Sequence s = sequence_at(a, number);
    t = {block * ROWS, across ? head / a.sequences : head % a.heads, number,
         s.queries, s.keys, s.offset, (int)s.first_query};
    first_key = (int)s.first_key;
    return t.first < t.queries;
}

// For ROWS queries from `first` on: key blocks begin .. end - 1 are seen by some query, and all keys of the blocks
// inner_begin .. inner_end - 1 by all queries, so that these need no mask.
struct Range { int begin, end, inner_begin, inner_end; };
template <bool BAND, int ROWS, int COLUMNS>
__device__ __forceinline__ Range key_range(const Attention& a, const Tile& t, int first) {
    int from = 0, to = first < t.queries ? t.keys : 0, inner_from = 0, inner_to = t.keys;
    if (BAND) {
        const int at = first + t.offset, last = min(first + ROWS, t.queries) - 1 + t.offset;
        from = max(0, at - a.left);
        to = min(to, last + a.right + 1);
        inner_from = max(0, last - a.left);
        inner_to = max(0, min(t.keys, at + a.right + 1));
    }
    if (to <= from) return {0, 0, 0, 0};
    return {from / COLUMNS, (to + COLUMNS - 1) / COLUMNS, (inner_from + COLUMNS - 1) / COLUMNS, inner_to / COLUMNS};
}

// ---- fragments: the row (of a thread's two) of element e, and its column relative to the thread's first column
__device__ __forceinline__ constexpr int row_of(int e) { return (e >> 1) & 1; }
__device__ __forceinline__ constexpr int column_of(int e) { return 8 * (e >> 2) + (e & 1); }

// Set columns from `high` on, or below `low`, to -inf; 0 and 1 are the thread's rows.
template <int R> __device__ __forceinline__ void mask_from(float (&s)[R], int high0, int high1) {
#pragma unroll
    for (int e = 0; e < R; ++e) if (column_of(e) >= (row_of(e) ? high1 : high0)) s[e] = NEG_INF;
}
template <int R> __device__ __forceinline__ void mask_below(float (&s)[R], int low0, int low1) {
#pragma unroll
    for (int e = 0; e < R; ++e) if (column_of(e) < (row_of(e) ? low1 : low0)) s[e] = NEG_INF;
}

// s * factor + bias, or s where a mask is true, with the bias read from global memory; j: the first key of the block.
template <typename X> __device__ __forceinline__ void add_bias(float& s, float factor, X x) { s = s * factor + (float)x; }
__device__ __forceinline__ void add_bias(float& s, float, bool seen) { s = seen ? s : NEG_INF; }
template <typename X, int R> __device__ __forceinline__ void add_read_bias(float (&s)[R], float factor, const Attention& a,
                                                                           const Tile& t, int i, int j) {
    const int first = j + fragment_column(0), last = t.queries - 1;
    const X* x = (const X*)a.bias_data + t.number * a.bias.batch + t.head * a.bias.head + first;
    const X *row0 = x + min(i, last) * a.bias.row, *row1 = x + min(i + 8, last) * a.bias.row;
    const bool two = a.bias.row != 0;
#pragma unroll
    for (int e = 0; e < R; ++e) {
        if (row_of(e)) continue;
        const bool inside = column_of(e) < t.keys - first;
        const X x0 = inside ? row0[column_of(e)] : X(), x1 = inside && two ? row1[column_of(e)] : x0;
        add_bias(s[e], factor, x0);
        add_bias(s[e + 2], factor, x1);
    }
}
// The same with the ROWS x 2 R tile of the bias in shared memory: a slab of bytes (mask), or slabs of 16-bit numbers.
// rows: ~0, or 0 where all queries share the first row.
template <int ROWS, int R> __device__ __forceinline__ void add_staged_mask(float (&s)[R], u32 tile, int row, int rows) {
#pragma unroll
    for (int e = 0; e < R; e += 2) {
        const int at = (row + 8 * row_of(e)) & rows, column = column_of(e) + 2 * (threadIdx.x % 4);
        const u32 seen = load_shared_u16(chunk_address<ROWS>(tile, at, column / 16) + column % 16);
        add_bias(s[e], 1.f, (seen & 0xff) != 0);
        add_bias(s[e + 1], 1.f, seen > 0xff);
    }
}
template <int ROWS>
__device__ __forceinline__ void load_staged_bias(u32 (&bias)[4], u32 tile, int row0, int rows, int k) {  // 16 columns
    const int lane = threadIdx.x % 32;
    ldmatrix(bias, chunk_address<ROWS>(tile, (row0 + (lane & 15)) & rows, 2 * k + (lane >> 4)));
}
template <int R> __device__ __forceinline__ void add_packed_bias(float (&s)[R], float factor, const u32 (&bias)[4], int k) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float2 pair = unpack_pair(scalar(), bias[n]);
        add_bias(s[8 * k + 2 * n], factor, pair.x);
        add_bias(s[8 * k + 2 * n + 1], factor, pair.y);
    }
}

// ---- dropout of 16 x 16 packed weights in the layout of an operand a
struct QueryWords { u32 factor[2], summand[2], bounds; };  // a lane's words, for columns 2c and 2c + 1 of every 8
__device__ __forceinline__ QueryWords query_words_of_lane(const Attention& a, const Tile& t, int i) {
    const u32* const words = query_words(a, t.number, t.head) + i / 16 * QUERY_WORDS;
    QueryWords q;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int place = query_place(i, fragment_column(n));
        q.factor[n] = __ldg(words + place);
        q.summand[n] = __ldg(words + place + 2);
    }
    q.bounds = __ldg(words + BOUNDS);
    return q;
}
__device__ __forceinline__ void apply_dropout(u32 (&p)[4], const QueryWords& q, uint2 key) {
    const Kept kept = {kept_bytes(q.factor[0], q.summand[0], key.x, q.bounds),
                       kept_bytes(q.factor[1], q.summand[1], key.y, q.bounds)};
#pragma unroll
    for (int n = 0; n < 4; ++n) p[n] &= pair_mask(kept, byte_of(n));
}

// Turns q k^T into logits (see `logit` in attention.cuh) except for the window and lengths; returns the factor > 0 by which
// they still have to be multiplied. i: this thread's first query, i + 8 its second; j: the first key of the block;
// bias_tile: the bias of the tile's queries and these keys in shared memory, or 0; STAGED: biases other than float are there.
template <int ROWS, bool STAGED, int R>
__device__ __forceinline__ float to_logits(float (&s)[R], const Attention& a, const Tile& t, int i, int j, u32 bias_tile) {
    float factor = a.scale;
    if (a.softcap > 0.f) {  // cap * tanh(x / cap), with an absolute error of a rounding of cap
        const float steep = 2.f * LOG2E * a.scale / a.softcap;
#pragma unroll
        for (int e = 0; e < R; ++e) s[e] = a.softcap - __fdividef(2.f * a.softcap, 1.f + exp2_fast(s[e] * steep));
        factor = 1.f;
    } else if (factor <= 0.f) {
#pragma unroll
        for (int e = 0; e < R; ++e) s[e] *= factor;
        factor = 1.f;
    }
    const int row = i - t.first, rows = a.bias.row ? ~0 : 0;
    if (bias_tile && a.bias_kind == 1) add_staged_mask<ROWS>(s, bias_tile, row, rows);
    else if (bias_tile) {
#pragma unroll
        for (int k = 0; k < R / 8; ++k) {
            u32 bias[4];
            load_staged_bias<ROWS>(bias, bias_tile, row - threadIdx.x % 32 / 4, rows, k);
            add_packed_bias(s, factor, bias, k);
        }
    } else if (!STAGED && a.bias_kind == 1) add_read_bias<bool>(s, factor, a, t, i, j);
    else if (a.bias_kind == 2) add_read_bias<float>(s, factor, a, t, i, j);
    else if (!STAGED && a.bias_kind == 3) add_read_bias<scalar>(s, factor, a, t, i, j);
    if (a.bias_kind > 1) factor = 1.f;
    if (a.slopes) {
        const float slope = slope_of(a, t.number, t.head);
        const int at = i + t.offset - j - fragment_column(0);
#pragma unroll
        for (int e = 0; e < R; ++e) s[e] = s[e] * factor - slope * fabsf((float)(at + 8 * row_of(e)) - column_of(e));
        factor = 1.f;
    }
    return factor;
}
