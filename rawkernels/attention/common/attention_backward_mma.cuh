#pragma once
// Shared by the backward kernels that use mma.sync: statistics of queries, tiles in shared memory, products of tiles.
// HEAD_DIM is a constant of the including file.
#include "attention/common/attention_mma.cuh"
#include "common/global_memory.cuh"

constexpr int STATS_BYTES = 8;  // lse / log(2) and delta of a query
// In stats (H, rows, 2) and dq_sum (rows / UNIT, H, ...) each sequence starts at a multiple of UNIT rows.
constexpr int UNIT = 16;
__device__ __forceinline__ long long first_row(const Attention& a, const Sequence& s) {
    return UNIT * (a.cu_q ? s.first_query / UNIT + s.number : (long long)s.number * ((a.queries + UNIT - 1) / UNIT));
}
__device__ __forceinline__ const float* stats_of(const Attention& a, const Sequence& s, const float* stats, long long rows,
                                                 int head, int i) {
    return stats + STATS_BYTES / 4 * (head * rows + first_row(a, s) + i);
}

// ---- dq_sum (rows / UNIT, H, HEAD_DIM / 8 accumulators of mma)
__device__ __forceinline__ float* dq_unit(const Attention& a, float* dq_sum, long long row, int head) {
    return dq_sum + (row / UNIT * a.heads + head) * (UNIT * HEAD_DIM);
}
// Adds one accumulator, with the lanes at adjacent addresses.
__device__ __forceinline__ void add_fragment(float* sum, const float (&d)[4]) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    add_global(sum + 4 * lane, d[0], d[1], d[2], d[3]);
#else
    for (int e = 0; e < 4; ++e) atomicAdd(sum + 32 * e + lane, d[e]);
#endif
}
// Loads columns 2 t and 2 t + 1 of a row of such an accumulator.
__device__ __forceinline__ float2 fragment_pair(const float* sum, int row, int t) {
    const int lane = row % 8 * 4 + t, e = row / 8 * 2;
#if __CUDA_ARCH__ >= 900
    return *(const float2*)(sum + 4 * lane + e);
#else
    return make_float2(sum[32 * e + lane], sum[32 * e + 32 + lane]);
#endif
}

// ---- tiles
// Where copies are BY_REGISTERS, the tiles of a step are loaded by start_tile during the step before it and stored by
// finish_tile: shared memory has no room for two steps.
template <int ROWS, int THREADS> using Copies = Copy[(ROWS * 8 + THREADS - 1) / THREADS][(HEAD_DIM + 63) / 64];
template <int ROWS, int THREADS>
__device__ __forceinline__ void start_tile(Copies<ROWS, THREADS>& copies, const scalar* x, const Strides& t, const Sequence& s,
                                           long long row0, int head, int count, int width) {
    const scalar* rows = rows_of(x, t, s.number, row0, head);
    const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += THREADS / 8)
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 64)
            copies[i / (THREADS / 8)][column / 64].start(0, rows + (i + first) * t.row + column + 8 * chunk,
                                                         (i + first < count) & (column + 8 * chunk < width));
}
template <int ROWS, int THREADS>
__device__ __forceinline__ void finish_tile(const Copies<ROWS, THREADS>& copies, u32 tile) {
    const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += THREADS / 8)
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 64)
            copies[i / (THREADS / 8)][column / 64].finish(chunk_address<ROWS>(tile, i + first, column / 8 + chunk));
}
// Starts to copy `count` rows (at most ROWS) of `width` columns, from `row0` on; the rest of the tile becomes zeros.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const scalar* x, const Strides& t, const Sequence& s, long long row0,
                                          int head, int count, int width) {
    const scalar* rows = rows_of(x, t, s.number, row0, head);
    const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
#pragma unroll
    for (int row = first; row < ROWS; row += THREADS / 8)
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 64)
            cp_async(chunk_address<ROWS>(tile, row, column / 8 + chunk), rows + row * t.row + column + 8 * chunk,
                     (row < count) & (column + 8 * chunk < width));
}
__device__ __forceinline__ void load_stats(u32 tile, const float* stats, int size, int count) {
    const int row = 2 * threadIdx.x;
    if (row < size) cp_async(tile + row * STATS_BYTES, stats + 2 * row, row < count);
}

// The tiles of a step, by registers: two arrays and, with STATS, the statistics of their rows.
template <int STEP, int THREADS, bool STATS> struct StepCopies {
    Copies<STEP, THREADS> x, y;
    Copy stats;
    __device__ __forceinline__ void start_stats(const float* from, int count) {
        const int row = 2 * threadIdx.x;
        if (row < STEP) stats.start(0, from + 2 * row, row < count);
    }
    __device__ __forceinline__ void finish(u32 x_tile, u32 y_tile, u32 stats_tile) const {
        finish_tile<STEP, THREADS>(x, x_tile);
        finish_tile<STEP, THREADS>(y, y_tile);
        if (STATS && 2 * threadIdx.x < STEP) stats.finish(stats_tile + 2 * threadIdx.x * STATS_BYTES);
    }
};

// Stores two adjacent accumulators, rounded to 16 bits, to a tile of ROWS rows; row is a multiple of 8, column of 16.
template <int ROWS> __device__ __forceinline__ void store_fragments(u32 tile, int row, int column, const float (&left)[4],
                                                                    const float (&right)[4]) {
#if __CUDA_ARCH__ >= 900
    u32 r[4];
    pack(r, left, right);
    stmatrix(offset_address<ROWS>(lane_address(tile), row, column), r);
#else
    store_fragment<ROWS>(tile, row, column, left);
    store_fragment<ROWS>(tile, row, column + 8, right);
#endif
}
// stage_tile: stores the accumulators of a warp's rows, times `factor`, to a tile of ROWS rows; store_tile: stores the tile to
// global memory.
template <int ROWS, int ACROSS, int M, int N>
__device__ __forceinline__ void stage_tile(u32 tile, int row, int across, float factor, float (&d)[M][2 * N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int e = 0; e < 8; ++e) d[m][2 * n + e / 4][e % 4] *= factor;
            store_fragments<ROWS>(tile, row + 16 * m, 16 * (across + ACROSS * n), d[m][2 * n], d[m][2 * n + 1]);
        }
}
template <int ROWS, int THREADS>
__device__ __forceinline__ void store_tile(u32 tile, scalar* x, const Strides& t, const Sequence& s, long long row0,
                                           int head, int count, int width) {
    scalar* rows = x + s.number * t.batch + row0 * t.row + head * t.head;
    const int chunk = threadIdx.x % 8;
    for (int row = threadIdx.x / 8; row < min(count, ROWS); row += THREADS / 8)
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 64)
            if (column + 8 * chunk < width) {
                const u32 source = chunk_address<ROWS>(tile, row, column / 8 + chunk);
                *(uint4*)(rows + row * t.row + column + 8 * chunk) = load_shared_uint4(source);
            }
}

// ---- products; the operands of the next 16 of K are loaded while the current ones are multiplied
// d += a b over K. b is [k][head column], this warp has every ACROSS-th group of 16 columns; a is [row][k], or [k][row] if
// TRANSPOSED.
template <bool TRANSPOSED, int K, int A_ROWS, int ACROSS, int M, int N>
__device__ __forceinline__ void add_product(float (&d)[M][2 * N][4], u32 a, u32 b) {
    u32 x[2][M][4], y[2][N][4];
#pragma unroll
    for (int k = -1; k < K / 16; ++k) {
        if (k + 1 < K / 16) {
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (TRANSPOSED) ldmatrix_transposed(x[(k + 1) % 2][m], offset_address<A_ROWS>(a, 16 * (k + 1), 16 * m));
                else ldmatrix(x[(k + 1) % 2][m], offset_address<A_ROWS>(a, 16 * m, 16 * (k + 1)));
#pragma unroll
            for (int n = 0; n < N; ++n)
                ldmatrix_transposed(y[(k + 1) % 2][n], offset_address<K>(b, 16 * (k + 1), 16 * ACROSS * n));
        }
        if (k < 0) continue;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) mma_pair(d[m][2 * n], d[m][2 * n + 1], x[k % 2][m], y[k % 2][n]);
    }
}

// dq_sum += ds (queries, keys) k, for STEP queries from i on.
template <int OWN, int STEP, int WARPS>
__device__ __forceinline__ void add_dq(const Attention& a, const Sequence& s, u32 ds, u32 k, float* dq_sum, int head,
                                       int i) {
    constexpr int ACROSS = HEAD_DIM / 16 % (32 * WARPS / STEP) == 0 ? 32 * WARPS / STEP : 16 * WARPS / STEP;  // warps, each 16s of columns
    constexpr int M = STEP / 16 * ACROSS / WARPS, N = HEAD_DIM / 16 / ACROSS;
    static_assert(M > 0 && ACROSS <= 8 && HEAD_DIM / 16 % ACROSS == 0,
                  "attention_backward_mma.cuh: dq does not divide among the warps");
    const int warp = threadIdx.x / 32, rows = warp / ACROSS * M * 16, across = warp % ACROSS;
    float dq[M][2 * N][4] = {};
    add_product<false, OWN, STEP, ACROSS, M, N>(
        dq, offset_address<STEP>(lane_address(ds), rows, 0), offset_address<OWN>(lane_address(k), 0, 16 * across));
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const int at = i + rows + 16 * m;
        if (at >= s.queries) break;
        float* unit = dq_unit(a, dq_sum, first_row(a, s) + at, head);
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) add_fragment(unit + (2 * (across + ACROSS * (n / 2)) + n % 2) * 8 * UNIT, dq[m][n]);
    }
}

// Whether these queries and keys need the mask of the window or of an end.
__device__ __forceinline__ bool is_partial(const Attention& a, const Sequence& s, int queries, int i, int keys, int j) {
    const int at = i + s.offset;
    return i + queries > s.queries || j + keys > s.keys || j + keys - 1 > at + a.right || j < at + queries - 1 - a.left;
}
