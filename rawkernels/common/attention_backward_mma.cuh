#pragma once
// What both gradient kernels of mma.sync are made of: products of tiles in shared memory, and the way from logits to
// weights.
// HEAD_DIM and EXTRAS are constants of the file that includes this.
#include "common/attention_mma.cuh"

constexpr int STATS_BYTES = 8;  // of a query: lse / log(2) and delta

__device__ __forceinline__ u32 positive_pair(bf16, u32 x) {
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0));
    return r;
}
__device__ __forceinline__ u32 positive_pair(f16, u32 x) {
    u32 r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0));
    return r;
}

// ---- products; operands of the next 16 of the sum are fetched while those of the last are multiplied
// d = a b^T, both as [row][head column]; a, b: what this lane passes to ldmatrix, straight and crossed
struct Nothing { __device__ void operator()(int) const {} };
template <int A_ROWS, int B_ROWS, int M, int N, typename Meanwhile = Nothing>
__device__ __forceinline__ void multiply_rows(float (&d)[M][2 * N][4], u32 a, u32 b, Meanwhile meanwhile = {}) {
    u32 x[M][4], y[2][N][4];  // of a each 16 rows as soon as they have been used: registers are few
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix(x[m], moved<A_ROWS>(a, 16 * m, 0));
#pragma unroll
    for (int n = 0; n < N; ++n) ldmatrix(y[0][n], moved<B_ROWS>(b, 16 * n, 0));
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        const bool more = k + 1 < HEAD_DIM / 16;
        if (more)
#pragma unroll
            for (int n = 0; n < N; ++n) ldmatrix(y[(k + 1) % 2][n], moved<B_ROWS>(b, 16 * n, 16 * (k + 1)));
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (k == 0)
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[m][2 * n][e] = d[m][2 * n + 1][e] = 0.f;
                mma_pair(d[m][2 * n], d[m][2 * n + 1], x[m], y[k % 2][n]);
            }
            if (more) ldmatrix(x[m], moved<A_ROWS>(a, 16 * m, 16 * (k + 1)));
        }
        meanwhile(k);
    }
}
// d += a b over K; b as [k][head column], of which this warp's 16s are ACROSS apart; a as [row][k], or as [k][row] CROSSED.
// POSITIVE: where `clears`, negative numbers of a count as 0.
template <bool CROSSED, int K, int A_ROWS, int ACROSS, int M, int N, bool POSITIVE = false>
__device__ __forceinline__ void add_product(float (&d)[M][2 * N][4], u32 a, u32 b, bool clears = false) {
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
        for (int m = 0; m < M; ++m) {
            if (POSITIVE && clears)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[k % 2][m][e] = positive_pair(scalar(), x[k % 2][m][e]);
#pragma unroll
            for (int n = 0; n < N; ++n) mma_pair(d[m][2 * n], d[m][2 * n + 1], x[k % 2][m], y[k % 2][n]);
        }
    }
}

// ---- tiles, and numbers of queries
// stats (H, rows, 2) and dq_sum (rows / UNIT, H, ..): sequences start at units of rows
constexpr int UNIT = 16;
__device__ __forceinline__ long long first_row(const Attention& a, const Sequence& s) {
    return UNIT * (a.cu_q ? s.first_query / UNIT + s.number : (long long)s.number * ((a.queries + UNIT - 1) / UNIT));
}
__device__ __forceinline__ const float* stats_of(const Attention& a, const Sequence& s, const float* stats, long long rows,
                                                 int head, int i) {
    return stats + STATS_BYTES / 4 * (head * rows + first_row(a, s) + i);
}
// Start to copy `count` rows (at most ROWS) of `width` columns, from `row0` on; zeros fill the rest of the tile.
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

// Two neighbouring accumulators into a tile of ROWS rows, rounded to 16 bits; row a multiple of 8, column of 16.
template <int ROWS> __device__ __forceinline__ void store_fragments(u32 tile, int row, int column, const float (&left)[4],
                                                                    const float (&right)[4]) {
#if __CUDA_ARCH__ >= 900
    u32 r[4];
    pack(r, left, right);
    stmatrix(moved<ROWS>(straight(tile), row, column), r);
#else
    store_fragment<ROWS>(tile, row, column, left);
    store_fragment<ROWS>(tile, row, column + 8, right);
#endif
}
// The accumulators of a warp's rows, times `factor`, into a tile of ROWS rows; then all of it to global memory.
template <int ROWS, int ACROSS, int M, int N>
__device__ __forceinline__ void put_tile(u32 tile, int row, int across, float factor, float (&d)[M][2 * N][4]) {
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
                *(uint4*)(rows + row * t.row + column + 8 * chunk) = load_shared_16(source);
            }
}

// ---- from logits to weights
__device__ __forceinline__ float2 unpack_pair(bf16, u32 x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack_pair(f16, u32 x) {
    float2 r;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
}
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

    // q k of 16 queries, `row` of these logits, become p, at (i, j) of a tile of ROWS queries; dropped ones are negative.
    // `bends`: a tile of the logits' derivatives by what the softcap was given.
    template <int ROWS, int N>
    __device__ __forceinline__ void weigh(float (&x)[2 * N][4], int row, u32 tile, u32 bends, int i, int j,
                                          bool hides) const {
        if (!EXTRAS && hides) hide(a, s, this->i() + row, this->j(), x);
        const float scale = EXTRAS ? 1.f : a.scale * LOG2E, lse[2] = {row_stats(row).x, row_stats(row + 8).x};
#pragma unroll
        for (int n = 0; n < N; ++n) {  // 16 x 16 at a time, as random numbers come
            float (&p)[2][4] = *(float (*)[2][4])&x[2 * n];
            if constexpr (EXTRAS) {
                float bend[2][4];
                apply_extras(a, s, head, this->i() + row, this->j() + 16 * n, p, bend);
                if (hides) hide(a, s, this->i() + row, this->j() + 16 * n, p);
                if (a.softcap > 0.f) store_fragments<ROWS>(anew((int)bends), i + row, j + 16 * n, bend[0], bend[1]);
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) p[e / 4][e % 4] = exp2_fast(p[e / 4][e % 4] * scale - lse[e / 2 % 2]);
            if (EXTRAS && a.threshold < 65536) {
                const uint4 numbers = draw(a, s, head, i0 + row, j0 + 16 * n);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (philox_lane(numbers, e) >= a.threshold) p[e / 4][e % 4] *= -1.f;
            }
            store_fragments<ROWS>(tile, i + row, j + 16 * n, p[0], p[1]);
        }
    }
    // dout v of the same queries become the gradient of x / scale, at (i, j) of `tile`.
    template <int ROWS, int N>
    __device__ __forceinline__ void differentiate(float (&x)[2 * N][4], int row, u32 weights, u32 bends, u32 tile, int i,
                                                  int j) const {
        const float delta[2] = {row_stats(row).y, row_stats(row + 8).y};
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float (&ds)[2][4] = *(float (*)[2][4])&x[2 * n];
            u32 packed[4];
            ldmatrix(packed, moved<ROWS>(straight(weights), i + row, j + 16 * n));
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const float2 p = unpack_pair(scalar(), packed[e / 2]);
                ds[e / 4][e % 4] = derivative(p.x, ds[e / 4][e % 4], delta[e / 2 % 2]);
                ds[e / 4][e % 4 + 1] = derivative(p.y, ds[e / 4][e % 4 + 1], delta[e / 2 % 2]);
            }
            if constexpr (EXTRAS) {
                if (dbias) add_dbias(this->i() + row, this->j() + 16 * n, ds);
                if (a.softcap > 0.f) {
                    ldmatrix(packed, moved<ROWS>(straight(anew((int)bends)), i + row, j + 16 * n));
#pragma unroll
                    for (int e = 0; e < 8; e += 2) {
                        const float2 bend = unpack_pair(scalar(), packed[e / 2]);
                        ds[e / 4][e % 4] *= bend.x, ds[e / 4][e % 4 + 1] *= bend.y;
                    }
                }
            }
            store_fragments<ROWS>(tile, i + row, j + 16 * n, ds[0], ds[1]);
        }
    }
    __device__ __forceinline__ float derivative(float p, float dp, float delta) const {
        if (!EXTRAS) return p * (dp - delta);
        const float factor = __float_as_int(p) < 0 ? 0.f : a.keep_scale;
        return p == 0.f ? 0.f : fabsf(p) * (dp * factor - delta);
    }
    // of query i0 + row + lane / 4: lse / log(2) and delta
    __device__ __forceinline__ float2 row_stats(int row) const {
        return load_shared_float2(anew((int)stats) + (row + threadIdx.x % 32 / 4) * STATS_BYTES);
    }

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
