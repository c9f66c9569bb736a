#pragma once
// What the attention kernels for any GPU share: tiles in shared memory, dropout.
// A block works on ROWS rows (queries, or keys in the gradient of k and v) against tiles of ROWS
// rows of the other kind. Four threads share a row: lane `quarter` of them takes the columns
// quarter, quarter + 4, ... of the logits, and every fourth group of four head columns.
#include "common/attention.cuh"

constexpr int ROWS = HEAD_DIM > 128 ? 16 : 32;
constexpr int THREADS = 4 * ROWS;
constexpr int PITCH = HEAD_DIM + 4;  // floats between rows of a tile: spreads rows over the banks
constexpr int WEIGHTS_PITCH = ROWS + 4;
constexpr int COLS = ROWS / 4;

// Tile, head and sequence of this block; `limit` is the most rows of a sequence.
struct Place { int first, head, number; };

__device__ inline Place find_place(int limit, int heads) {
    int tiles = (limit + ROWS - 1) / ROWS, rest = blockIdx.x / tiles;
    return {(int)(blockIdx.x % tiles) * ROWS, rest % heads, rest / heads};
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
