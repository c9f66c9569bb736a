#pragma once
// Attention of eight columns over a group of 16 keys by mma.sync, from keys and values that are in the layout of its operands:
// a lane has 8 elements of each part, 32, of the keys g and g + 8, and of the values of four keys pairs of elements, words.
// A column is a query that sees them.
#include "attention/cache/columns.cuh"
#include "common/math.cuh"
#include "common/mma_sync.cuh"
#include "common/tile.cuh"

constexpr int GROUP = 16, COLUMNS = 8;

// logits = keys * query
template <int PARTS> __device__ void multiply(float (&logits)[4], const uint4 (&keys)[2][PARTS], const uint4 (&query)[PARTS]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) logits[i] = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const uint4 low = keys[0][p], high = keys[1][p];
        const u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
        mma(scalar(), logits, a, query[p].x, query[p].y);
        mma(scalar(), logits, b, query[p].z, query[p].w);
    }
}

// The weights of a group with these logits, to base 2, and what they change of the maximum, the sum and the sums of values.
template <int WORDS> __device__ void weigh(
    u32 (&weights)[2], const float (&logits)[4], float (&top)[2], float (&sum)[2], float (&acc)[WORDS][4]) {
    float base[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float most = most_of_columns(fmaxf(top[c], fmaxf(logits[c], logits[c + 2])));
        base[c] = most == NEG_INF ? 0.f : most;
        const float correction = exp2_fast(top[c] - base[c]);
        top[c] = most, sum[c] *= correction;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) acc[w][c] *= correction, acc[w][c + 2] *= correction;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float left = exp2_fast(logits[2 * half] - base[0]), right = exp2_fast(logits[2 * half + 1] - base[1]);
        sum[0] += left, sum[1] += right;
        weights[half] = movmatrix(pack_pair(scalar(), left, right));
    }
}

// acc += a word of 16 values, by weights of 8 columns.
__device__ void add(float (&acc)[4], const u32 (&words)[4], const u32 (&weights)[2]) {
    u32 a[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 even = words[2 * half], odd = words[2 * half + 1];
        a[2 * half] = permute_bytes(even, odd, 0x5410), a[2 * half + 1] = permute_bytes(even, odd, 0x7632);
    }
    mma(scalar(), acc, a, weights[0], weights[1]);
}
template <int WORDS> __device__ void add(float (&acc)[WORDS][4], const u32 (&values)[4][WORDS], const u32 (&weights)[2]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const u32 words[] = {values[0][w], values[1][w], values[2][w], values[3][w]};
        add(acc[w], words, weights);
    }
}
