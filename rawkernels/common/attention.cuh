#pragma once
// What the attention kernels for any GPU share: the problem, tiles in shared memory, logits, dropout.
// A block works on ROWS rows (queries, or keys in the gradient of k and v) against tiles of ROWS
// rows of the other kind. Four threads share a row: lane `quarter` of them takes the columns
// quarter, quarter + 4, ... of the logits, and every fourth group of four head columns.
#include "common/philox.cuh"

constexpr int ROWS = HEAD_DIM > 128 ? 16 : 32;
constexpr int THREADS = 4 * ROWS;
constexpr int PITCH = HEAD_DIM + 4;  // floats between rows of a tile: spreads rows over the banks
constexpr int WEIGHTS_PITCH = ROWS + 4;
constexpr int COLS = ROWS / 4;
constexpr float INF = -NEG_INF;

struct Strides { long long batch, row, head, column; };  // in elements; packed sequences: batch = 0

// Filled by gpuattn/ops/flash_attention.py (PROBLEM): the same fields in the same order.
struct Attention {
    Strides q, k, v, out, dout, dq, dk, dv, bias;
    long long lse_batch, lse_head;             // strides of lse and delta
    int heads, group;                          // query heads, and how many of them share a KV head
    int queries, keys;                         // of the longest sequence
    int head_dim, value_dim;
    int left, right, bottom_right;             // the window around the key a query stands at
    int bias_kind;                             // 0 none, 1 bool, 2 float, 3 scalar
    int slopes_batch;                          // stride of the ALiBi slopes
    float scale, softcap;                      // softcap 0: none
    float keep_scale;                          // 1 / (1 - p), 0 when all is dropped
    unsigned int threshold;                    // 16-bit numbers below it are kept
    unsigned int seed_low, seed_high, stream, step;
};

struct Sequence {
    int number, queries, keys, key_rows, offset;  // keys: visible ones of the key_rows
    long long first_query, first_key;
};

__device__ inline Sequence find_sequence(const Attention& a, int number, const int* cu_q, const int* cu_k,
                                         const int* key_lengths) {
    Sequence s = {number, a.queries, a.keys, a.keys, 0, 0, 0};
    if (cu_q) {
        s.first_query = cu_q[number];
        s.first_key = cu_k[number];
        s.queries = cu_q[number + 1] - cu_q[number];
        s.key_rows = cu_k[number + 1] - cu_k[number];
    }
    s.offset = a.bottom_right ? s.key_rows - s.queries : 0;
    s.keys = key_lengths ? max(0, min(s.key_rows, key_lengths[number])) : s.key_rows;
    return s;
}

// Tile, head and sequence of this block; `limit` is the most rows of a sequence.
struct Place { int first, head, number; };

__device__ inline Place find_place(int limit, int heads) {
    int tiles = (limit + ROWS - 1) / ROWS, rest = blockIdx.x / tiles;
    return {(int)(blockIdx.x % tiles) * ROWS, rest % heads, rest / heads};
}

__device__ inline const scalar* rows_of(const scalar* x, const Strides& s, int number, long long row, int head) {
    return x + number * s.batch + row * s.row + head * s.head;
}

// Copy `count` rows (at most ROWS) of `width` columns; zeros fill the rest of the tile.
__device__ inline void load_tile(float* tile, const scalar* rows, const Strides& s, int count, int width) {
    for (int e = threadIdx.x; e < ROWS * HEAD_DIM; e += THREADS) {
        int r = e / HEAD_DIM, c = e % HEAD_DIM;
        bool inside = r < count && c < width;
        tile[r * PITCH + c] = inside ? (float)rows[r * s.row + c * s.column] : 0.f;
    }
}

// s[n] = own . tile[quarter + 4 n]
__device__ inline void dot_rows(const float* own, const float* tile, int quarter, float (&s)[COLS]) {
#pragma unroll
    for (int n = 0; n < COLS; ++n) s[n] = 0.f;
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += 4) {
        float4 x = *(const float4*)(own + d);
#pragma unroll
        for (int n = 0; n < COLS; ++n) {
            float4 y = *(const float4*)(tile + (quarter + 4 * n) * PITCH + d);
            s[n] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
    }
}

// sum += weights[j] * tile[j] for j < count. Rows without weight do not count even if they hold NaN.
__device__ inline void add_rows(const float* weights, const float* tile, int count, int quarter,
                                float (&sum)[HEAD_DIM / 4]) {
    for (int j = 0; j < count; ++j) {
        float weight = weights[j];
        if (weight == 0.f) continue;
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 16; ++c) {
            float4 y = *(const float4*)(tile + j * PITCH + 4 * (quarter + 4 * c));
            sum[4 * c] += weight * y.x;
            sum[4 * c + 1] += weight * y.y;
            sum[4 * c + 2] += weight * y.z;
            sum[4 * c + 3] += weight * y.w;
        }
    }
}

__device__ inline void store_row(scalar* row, long long column_stride, int width, int quarter, float factor,
                                 const float (&sum)[HEAD_DIM / 4]) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 4; ++e) {
        int column = 4 * (quarter + 4 * (e / 4)) + e % 4;
        if (column < width) row[column * column_stride] = (scalar)(sum[e] * factor);
    }
}

// The logit of query i and key j, -inf where hidden; `bend` is its derivative by the softcap.
__device__ inline float logit(const Attention& a, const Sequence& s, float dot, int i, int j, int head,
                              const void* bias, float slope, float& bend) {
    int at = i + s.offset;
    bend = 1.f;
    if (i >= s.queries || j >= s.keys || j > at + a.right || j < at - a.left) return NEG_INF;
    float x = dot * a.scale;
    if (a.softcap > 0.f) {
        float t = tanhf(x / a.softcap);
        bend = 1.f - t * t;
        x = a.softcap * t;
    }
    if (a.bias_kind) {
        long long e = s.number * a.bias.batch + head * a.bias.head + i * a.bias.row + j * a.bias.column;
        if (a.bias_kind == 1 && !((const bool*)bias)[e]) return NEG_INF;
        if (a.bias_kind == 2) x += ((const float*)bias)[e];
        if (a.bias_kind == 3) x += (float)((const scalar*)bias)[e];
    }
    return x - slope * (float)abs(at - j);
}

// Draw the dropout bits of the tile at (i, j): keep[row * ROWS + column]. See attention_keep_mask.
__device__ inline void draw_keep(unsigned char* keep, const Attention& a, PhiloxKey key, int i, int j,
                                 const Sequence& s, int head) {
    unsigned int number = s.number * a.heads + head;
    for (int e = threadIdx.x; e < ROWS * ROWS / 8; e += THREADS) {
        int lane = e % 32, down = e / 32 / (ROWS / 16) * 16, across = e / 32 % (ROWS / 16) * 16;
        uint4 words = philox(key, (i + down) / 16 | (j + across) / 16 << 16, lane | number << 5);
        for (int half = 0; half < 8; ++half) {
            int row = down + lane / 4 + half / 2 % 2 * 8;
            int column = across + lane % 4 * 2 + half / 4 * 8 + half % 2;
            keep[row * ROWS + column] = philox_lane(words, half) < a.threshold;
        }
    }
}

// The reduction of `value` over the four threads of a row.
template <typename Op>
__device__ float row_reduce(float value, Op op) {
    value = op(value, __shfl_xor_sync(~0u, value, 1));
    return op(value, __shfl_xor_sync(~0u, value, 2));
}
