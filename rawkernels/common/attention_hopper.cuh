#pragma once
// What Hopper's attention kernels share: which tile is the index-th, which key blocks its queries see, and what happens
// to logits and weights in the accumulators of a warpgroup (m64nN fragments, wgmma.cuh).
#include "common/attention.cuh"
#include "common/wgmma.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// ---- tiles: ROWS queries of one head
struct Tile { int first, head, number, queries, keys, offset, first_query; };  // the first query; the rest as in Sequence

// The index-th of row_blocks * all_heads tiles; false where it holds no query. Long causal tiles come first, inside
// sections of heads whose keys and values fit in L2. Packed: all_heads = heads, and sequence b owns the row blocks from
// cu_q[b] / ROWS + b on, so that row_blocks = tokens / ROWS + sequences suffice, at most one a sequence in vain.
template <int ROWS> __device__ __forceinline__ bool find_tile(const Attention& a, int index, int row_blocks, int all_heads,
                                                              int section, Tile& t, int& first_key) {
    const int before = index / (row_blocks * section) * section, here = min(section, all_heads - before);
    const int rest = index - before * row_blocks, head = before + rest % here;
    int block = row_blocks - 1 - rest / here, number = head / a.heads;
    if (a.cu_q) {
        int high = a.sequences - 1;
        number = 0;
        while (number < high) {
            const int middle = (number + high + 1) / 2;
            if (a.cu_q[middle] / ROWS + middle <= block) number = middle; else high = middle - 1;
        }
        block -= a.cu_q[number] / ROWS + number;
    }
    const Sequence s = find_sequence(a, number);
    t = {block * ROWS, head % a.heads, number, s.queries, s.keys, s.offset, (int)s.first_query};
    first_key = (int)s.first_key;
    return t.first < t.queries;
}

// Of ROWS queries from `first` on, some see keys of the blocks begin .. end - 1, all see all of inner_begin .. inner_end - 1.
struct Range { int begin, end, inner_begin, inner_end; };
template <bool BAND, int ROWS, int COLUMNS> __device__ __forceinline__ Range key_range(const Attention& a, const Tile& t, int first) {
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

// ---- fragments: element e of a thread is in its row (e >> 1) & 1, 8 (e >> 2) + (e & 1) columns past its first
__device__ __forceinline__ constexpr int row_of(int e) { return (e >> 1) & 1; }
__device__ __forceinline__ constexpr int column_of(int e) { return 8 * (e >> 2) + (e & 1); }

// Columns high, high + 1, ... of a row are not seen, nor those below low.
template <int R> __device__ __forceinline__ void hide_from(float (&s)[R], int high0, int high1) {
#pragma unroll
    for (int e = 0; e < R; ++e) if (column_of(e) >= (row_of(e) ? high1 : high0)) s[e] = NEG_INF;
}
template <int R> __device__ __forceinline__ void hide_below(float (&s)[R], int low0, int low1) {
#pragma unroll
    for (int e = 0; e < R; ++e) if (column_of(e) < (row_of(e) ? low1 : low0)) s[e] = NEG_INF;
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ float2 unpack_pair(bf16, u32 x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack_pair(f16, u32 x) {
    float2 y;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}

// cap * tanh(x / cap) to within a rounding of cap.
__device__ __forceinline__ float bend(float x, float cap, float two_over_cap_log2) {
    return cap - __fdividef(2.f * cap, 1.f + exp2_fast(x * two_over_cap_log2));
}

// q k^T to logits in natural units (attention.cuh, logit), but for what is hidden by the window and by lengths.
// i: this thread's two queries; j: its first key. bias_tile: where the bias of the tile's ROWS queries and of these keys
// is in shared memory, or 0: it is read by its strides.
template <int ROWS, int R> __device__ __forceinline__ void to_logits(float (&s)[R], const Attention& a, const Tile& t,
                                                                     const int (&i)[2], int j, u32 bias_tile) {
#pragma unroll
    for (int e = 0; e < R; ++e) s[e] *= a.scale;
    if (a.softcap > 0.f) {
        const float steep = 2.f * LOG2E / a.softcap;
#pragma unroll
        for (int e = 0; e < R; ++e) s[e] = bend(s[e], a.softcap, steep);
    }
    if (bias_tile) {
        const int lane = threadIdx.x % 32, row = i[0] - t.first - lane / 4;
#pragma unroll
        for (int k = 0; k < R / 8; ++k) {
            u32 word[4];
            ldmatrix(word, chunk_address<ROWS>(bias_tile, row + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 pair = unpack_pair(scalar(), word[n]);
                s[8 * k + 2 * n] += pair.x;
                s[8 * k + 2 * n + 1] += pair.y;
            }
        }
    } else if (a.bias_kind) {
        const long long start = t.number * a.bias.batch + t.head * a.bias.head;
#pragma unroll
        for (int e = 0; e < R; ++e) {
            const int row = i[row_of(e)], column = j + column_of(e);
            if (row >= t.queries || column >= t.keys) continue;
            const long long at = start + row * a.bias.row + column * a.bias.column;
            if (a.bias_kind == 1) s[e] = ((const bool*)a.bias_data)[at] ? s[e] : NEG_INF;
            else s[e] += a.bias_kind == 2 ? ((const float*)a.bias_data)[at] : (float)((const scalar*)a.bias_data)[at];
        }
    }
    if (a.slopes) {
        const float slope = slope_of(a, t.number, t.head);
        const float at[2] = {(float)(i[0] + t.offset - j), (float)(i[1] + t.offset - j)};
#pragma unroll
        for (int e = 0; e < R; ++e) s[e] -= slope * fabsf(at[row_of(e)] - column_of(e));
    }
}

// Dropped weights of packed accumulators become 0: one draw gives a lane its eight numbers of 16 x 16 weights.
// c0: i / 16 | j / 16 << 16 of the first of them; c1: lane | (sequence * H + head) << 5.
template <int STEPS> __device__ __forceinline__ void drop(u32 (&p)[STEPS][4], PhiloxKey key, u32 c0, u32 c1, u32 threshold) {
    const u32 bound = threshold << 16;  // of the upper half of a word; the lower half is shifted there
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const uint4 draw = philox(key, c0 + (k << 16), c1);
        const u32 word[4] = {draw.x, draw.y, draw.z, draw.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (word[n] >= bound) p[k][n] &= 0x0000ffffu;
            if (word[n] << 16 >= bound) p[k][n] &= 0xffff0000u;
        }
    }
}
