#pragma once
// What both gradient kernels of mma.sync are made of: products of tiles in shared memory, and the way from logits to weights.
// HEAD_DIM and EXTRAS are constants of the file that includes this.
#include "common/attention_mma.cuh"

constexpr int STATS_BYTES = 8;  // of a query: lse / log(2) and delta

// ---- products; operands of the next 16 of the sum are fetched while those of the last are multiplied
// d = a b^T, both as [row][head column]; a, b: what this lane passes to ldmatrix, straight and crossed
struct Nothing { __device__ void operator()(int) const {} };
template <int A_ROWS, int B_ROWS, int M, int N, typename Meanwhile = Nothing>
__device__ __forceinline__ void multiply_rows(float (&d)[M][2 * N][4], u32 a, u32 b, Meanwhile meanwhile = {}) {
    u32 x[2][M][4], y[2][N][4];
#pragma unroll
    for (int k = -1; k < HEAD_DIM / 16; ++k) {
        if (k + 1 < HEAD_DIM / 16) {
#pragma unroll
            for (int m = 0; m < M; ++m) ldmatrix(x[(k + 1) % 2][m], moved<A_ROWS>(a, 16 * m, 16 * (k + 1)));
#pragma unroll
            for (int n = 0; n < N; ++n) ldmatrix(y[(k + 1) % 2][n], moved<B_ROWS>(b, 16 * n, 16 * (k + 1)));
        }
        if (k < 0) continue;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (k == 0)
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[m][2 * n][e] = d[m][2 * n + 1][e] = 0.f;
                mma_pair(d[m][2 * n], d[m][2 * n + 1], x[k % 2][m], y[k % 2][n]);
            }
        meanwhile(k);
    }
}
// d += a b over K; b as [k][head column], of which this warp's 16s are ACROSS apart; a as [row][k], or as [k][row] CROSSED
template <bool CROSSED, int K, int A_ROWS, int ACROSS, int M, int N>
__device__ __forceinline__ void add_product(float (&d)[M][2 * N][4], u32 a, u32 b) {
    u32 x[2][M][4], y[2][N][4];
#pragma unroll
    for (int k = -1; k < K / 16; ++k) {
        if (k + 1 < K / 16) {
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (CROSSED) ldmatrix_transposed(x[(k + 1) % 2][m], moved<A_ROWS>(a, 16 * (k + 1), 16 * m));
                else ldmatrix(x[(k + 1) % 2][m], moved<A_ROWS>(a, 16 * m, 16 * (k + 1)));
#pragma unroll
            for (int n = 0; n < N; ++n) ldmatrix_transposed(y[(k + 1) % 2][n], moved<K>(b, 16 * (k + 1), 16 * ACROSS * n));
        }
        if (k < 0) continue;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) mma_pair(d[m][2 * n], d[m][2 * n + 1], x[k % 2][m], y[k % 2][n]);
    }
}

// ---- from logits to weights
// What a block's logits have in common. i0, j0: the first query and key of this warp's logits.
struct Logits {
    const Attention& a;
    const Sequence& s;
    float* dbias;
    const Strides& dbias_strides;
    int head, i0, j0;
    u32 stats;      // of i0

    // whether the band or an end runs through these queries and keys
    __device__ __forceinline__ bool partial(int queries, int i, int keys, int j) const {
        const int at = i + s.offset;
        return i + queries > s.queries || j + keys > s.keys || j + keys - 1 > at + a.right || j < at + queries - 1 - a.left;
    }
    __device__ __forceinline__ int i() const { return i0 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int j() const { return j0 + threadIdx.x % 4 * 2; }

    // x = q k and dp = dout v become p, as it weighs v, and the gradient of x / scale
    template <int M, int N>
    __device__ __forceinline__ void weigh(float (&x)[M][N][4], float (&dp)[M][N][4], bool hides) const {
        const bool drops = a.threshold < 65536;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; n += 2) {  // 16 x 16 at a time, as random numbers come
                float (&logit)[2][4] = *(float (*)[2][4])&x[m][n], bend[2][4];
                apply_extras(a, s, head, i() + 16 * m, j() + 8 * n, logit, bend);
                if (hides) hide(a, s, i() + 16 * m, j() + 8 * n, logit);
                uint4 numbers;
                if (drops) numbers = draw(a, s, head, i0 + 16 * m, j0 + 8 * n);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const u32 at = anew((int)stats) + (16 * m + e / 2 % 2 * 8 + threadIdx.x % 32 / 4) * STATS_BYTES;
                    const float2 row = load_shared_float2(at);
                    const bool keeps = !drops || philox_lane(numbers, e) < a.threshold;
                    const float factor = keeps ? a.keep_scale : 0.f, p = exp2_fast(logit[e / 4][e % 4] - row.x);
                    float& ds = dp[m][n + e / 4][e % 4];
                    ds = p == 0.f ? 0.f : p * (ds * factor - row.y);
                    logit[e / 4][e % 4] = p * factor;
                }
                if (dbias) add_dbias(i() + 16 * m, j() + 8 * n, &dp[m][n]);
#pragma unroll
                for (int e = 0; e < 8; ++e) dp[m][n + e / 4][e % 4] *= bend[e / 4][e % 4];
            }
    }
    // ds of this lane's share of 16 x 16 logits from (i, j) on; outside the band and past the ends it is 0
    __device__ __forceinline__ void add_dbias(int i, int j, const float (*ds)[4]) const {
        i = anew(i), j = anew(j);
        const Strides& t = dbias_strides;
        const int row = (int)t.row, column = (int)t.column;
        float* target = dbias + s.number * t.batch + head * t.head + i * t.row + j * column;
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (ds[e / 4][e % 4] != 0.f)
                atomicAdd(target + e / 2 % 2 * 8 * row + (e / 4 * 8 + e % 2) * column, ds[e / 4][e % 4]);
    }

    // both products, and from them both weights; q and dout: a straight, k and v: b crossed, as multiply_rows takes them
    template <int Q_ROWS, int K_ROWS, int M, int N>
    __device__ __forceinline__ void compute(float (&x)[M][2 * N][4], float (&dp)[M][2 * N][4], u32 q, u32 dout,
                                            u32 k, u32 v, bool hides) const {
        multiply_rows<Q_ROWS, K_ROWS, M, N>(x, q, k);
        if constexpr (EXTRAS) {
            multiply_rows<Q_ROWS, K_ROWS, M, N>(dp, dout, v);
            weigh(x, dp, hides);
            return;
        }
        if (hides)
#pragma unroll
            for (int m = 0; m < M; ++m) hide(a, s, i() + 16 * m, j(), x[m]);
        float2 row[2 * M];
#pragma unroll
        for (int m = 0; m < 2 * M; ++m) row[m] = load_shared_float2(stats + (8 * m + threadIdx.x % 32 / 4) * STATS_BYTES);
        const float scale = a.scale * LOG2E;
        constexpr int PART = (M * N * 8 * 16 + HEAD_DIM - 1) / HEAD_DIM;  // exponentials while 16 columns are multiplied
        multiply_rows<Q_ROWS, K_ROWS, M, N>(dp, dout, v, [&](int step) {
#pragma unroll
            for (int n = 0; n < PART; ++n) {
                const int at = step * PART + n, m = at / (8 * N), e = at % 4;
                if (m >= M) break;
                float& value = x[m][at / 4 % (2 * N)][e];
                value = exp2_fast(value * scale - row[2 * m + e / 2].x);
            }
        });
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < 2 * N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[m][n][e] = x[m][n][e] * (dp[m][n][e] - row[2 * m + e / 2].y);
    }
};
template <int ROWS, int M, int N>
__device__ __forceinline__ void store_weights(u32 tile, int row, int column, const float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) store_fragment<ROWS>(tile, row + 16 * m, column + 8 * n, x[m][n]);
}
