// The gradient of attention by mma.sync with softcap, bias, ALiBi or dropout. A block owns OWN keys, keeps dk and dv on chip
// and loops over the queries that see the keys, STEP at a time, adding dq to float32 in global memory. flash_attention_dq
// computes dq without atomics, for all calls: a block owns OWN queries and loops over keys. Notes: notes/ampere-backward.md.
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 128; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = false
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 1; EXTRAS = true
// Constants: scalar = f16, bf16; HEAD_DIM = 128; OWN = 128; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2;
//   EXTRAS = false, true
// Constants: scalar = bf16; HEAD_DIM = 96; OWN = 128; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 192; OWN = 64; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = true
// Constants: scalar = f16; HEAD_DIM = 256; OWN = 64; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 128; OWN = 64; STEP = 64; WARPS = 8; STAGES = 1; DS_TILES = 1; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 256; OWN = 32; STEP = 32; WARPS = 4; STAGES = 1; DS_TILES = 1; EXTRAS = true
// Constants below sm_80: scalar = f16; HEAD_DIM = 64; OWN = 64; STEP = 64; WARPS = 8; STAGES = 1; DS_TILES = 1;
//   EXTRAS = false, true
// Constants below sm_80: scalar = f16; HEAD_DIM = 128; OWN = 64; STEP = 32; WARPS = 4; STAGES = 1; DS_TILES = 1;
//   EXTRAS = false, true
// Constants below sm_80: scalar = f16; HEAD_DIM = 192; OWN = 32; STEP = 32; WARPS = 4; STAGES = 1; DS_TILES = 1;
//   EXTRAS = true
//   (both head sizes rounded up; gpuattn/ops/attention/ampere.py: EXTRAS_TILES;
//   EXTRAS: softcap, bias, slopes, dropout)
// Launch:    dkv: grid = (ceil(longest keys / OWN) * KV heads * sequences,), block = (32 WARPS,), shared = DKV_BYTES
//            dq: grid = (ceil(longest queries / OWN) * heads * sequences,), block = (32 WARPS,), shared = DQ_BYTES
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_backward_mma.cuh"

static_assert(!BY_REGISTERS || STAGES == 1, "flash_attention_backward_ampere_extras.cu: registers hold the other step's tiles");
constexpr int THREADS = 32 * WARPS;
constexpr int OWN_WARPS = OWN >= 64 ? OWN / 32 : 2, STEP_WARPS = WARPS / OWN_WARPS;  // the warps' grid for a step's logits
constexpr int OWN_16 = OWN / 16 / OWN_WARPS, STEP_16 = STEP / 16 / STEP_WARPS;       // groups of 16 rows of a warp
constexpr int WIDTH_16 = HEAD_DIM / 16 / STEP_WARPS;                                 // groups of 16 columns of its dk and dv
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;
constexpr int OWN_BYTES = OWN * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES;
constexpr int WEIGHTS_BYTES = STEP * ((OWN + 63) / 64 * 128), DS_BYTES = OWN * ((STEP + 63) / 64 * 128);
constexpr int DKV_BYTES = 2 * OWN_BYTES + STAGES * (2 * STEP_BYTES + STEP * STATS_BYTES) + (1 + DS_TILES) * WEIGHTS_BYTES;
constexpr int DQ_BYTES = 2 * OWN_BYTES + STAGES * 2 * STEP_BYTES + DS_BYTES + OWN * STATS_BYTES;
static_assert(STEP_16 > 0 && STEP_WARPS <= 4 && HEAD_DIM / 16 % STEP_WARPS == 0,
              "flash_attention_backward_ampere_extras.cu: logits do not divide among the warps");

// d = a b^T, both as [row][head column]. a: lane_address of the tile, b: lane_address_swapped; `overlap` runs in each step.
struct NoOverlap { __device__ void operator()(int) const {} };
template <int A_ROWS, int B_ROWS, int M, int N, typename Overlap = NoOverlap>
__device__ __forceinline__ void multiply_rows(float (&d)[M][2 * N][4], u32 a, u32 b, Overlap overlap = {}) {
    u32 x[2][M][4], y[2][N][4];
#pragma unroll
    for (int k = -1; k < HEAD_DIM / 16; ++k) {
        if (k + 1 < HEAD_DIM / 16) {
#pragma unroll
            for (int m = 0; m < M; ++m) ldmatrix(x[(k + 1) % 2][m], offset_address<A_ROWS>(a, 16 * m, 16 * (k + 1)));
#pragma unroll
            for (int n = 0; n < N; ++n) ldmatrix(y[(k + 1) % 2][n], offset_address<B_ROWS>(b, 16 * n, 16 * (k + 1)));
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
        overlap(k);
    }
}

// ---- from logits to probabilities and their gradient
// Parameters of a step's logits. i0, j0: the first query and key of this warp's logits.
struct Logits {
    const Attention& a;
    const Sequence& s;
    float* dbias;
    const Strides& dbias_strides;
    int head, i0, j0;
    u32 stats;      // of i0

    __device__ __forceinline__ int i() const { return i0 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int j() const { return j0 + threadIdx.x % 4 * 2; }

    // Turns x = q k and dp = dout v into p after dropout and the gradient of the scaled products.
    template <int M, int N>
    __device__ __forceinline__ void softmax_gradient(float (&x)[M][N][4], float (&dp)[M][N][4], bool masked) const {
        const bool drops = a.query_words;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; n += 2) {  // 16 x 16 at a time, the unit of dropout
                float (&logit)[2][4] = *(float (*)[2][4])&x[m][n], softcap_grad[2][4];
                apply_extras(a, s, head, i() + 16 * m, j() + 8 * n, logit, softcap_grad);
                if (masked) apply_mask(a, s, i() + 16 * m, j() + 8 * n, logit);
                Kept words;
                if (drops) words = kept_of_lane_opaque(a, s, head, i() + 16 * m, j() + 8 * n);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const u32 at = opaque((int)stats) + (16 * m + e / 2 % 2 * 8 + threadIdx.x % 32 / 4) * STATS_BYTES;
                    const float2 row = load_shared_float2(at);
                    const bool keeps = !drops || kept(e % 2 ? words.odd : words.even, byte_of(e / 2));
                    const float factor = keeps ? a.keep_scale : 0.f, p = exp2_fast(logit[e / 4][e % 4] - row.x);
                    float& ds = dp[m][n + e / 4][e % 4];
                    ds = p == 0.f ? 0.f : p * (ds * factor - row.y);
                    logit[e / 4][e % 4] = p * factor;
                }
                if (dbias) add_dbias(i() + 16 * m, j() + 8 * n, &dp[m][n]);
#pragma unroll
                for (int e = 0; e < 8; ++e) dp[m][n + e / 4][e % 4] *= softcap_grad[e / 4][e % 4];
            }
    }
    // Adds ds of this lane's share of 16 x 16 logits from (i, j) on; ds is 0 where masked.
    __device__ __forceinline__ void add_dbias(int i, int j, const float (*ds)[4]) const {
        i = opaque(i), j = opaque(j);
        const Strides& t = dbias_strides;
        const int row = (int)t.row, column = (int)t.column;
        float* target = dbias + s.number * t.batch + head * t.head + i * t.row + j * column;
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (ds[e / 4][e % 4] != 0.f)
                atomicAdd(target + e / 2 % 2 * 8 * row + (e / 4 * 8 + e % 2) * column, ds[e / 4][e % 4]);
    }

    // Computes both products, then p and ds. q and dout are operands a, k and v operands b of multiply_rows.
    template <int Q_ROWS, int K_ROWS, int M, int N>
    __device__ __forceinline__ void compute(float (&x)[M][2 * N][4], float (&dp)[M][2 * N][4], u32 q, u32 dout,
                                            u32 k, u32 v, bool masked) const {
        multiply_rows<Q_ROWS, K_ROWS, M, N>(x, q, k);
        if constexpr (EXTRAS) {
            multiply_rows<Q_ROWS, K_ROWS, M, N>(dp, dout, v);
            softmax_gradient(x, dp, masked);
            return;
        }
        if (masked)
#pragma unroll
            for (int m = 0; m < M; ++m) apply_mask(a, s, i() + 16 * m, j(), x[m]);
        float2 row[2 * M];
#pragma unroll
        for (int m = 0; m < 2 * M; ++m) row[m] = load_shared_float2(stats + (8 * m + threadIdx.x % 32 / 4) * STATS_BYTES);
        const float scale = a.scale * LOG2E;
        constexpr int PART = (M * N * 8 * 16 + HEAD_DIM - 1) / HEAD_DIM;  // exponentials per step of the product
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

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flash_attention_dkv(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ stats,      // from flash_attention_rows
    long long rows,
    float* __restrict__ dq_sum,           // zeros, or null
    float* __restrict__ dbias,            // zeros, by strides; or null
    const Strides dbias_strides,
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv) {            // (B, S, Hk, Dv)
    const int tiles = (a.keys + OWN - 1) / OWN, kv_heads = a.heads / a.group;
    const int first = blockIdx.x % tiles * OWN, kv_head = blockIdx.x / tiles % kv_heads;
    const Sequence s = sequence_at(a, blockIdx.x / tiles / kv_heads);
    if (first >= s.key_rows) return;
    const int begin = max(0, first - s.offset - a.right) / STEP * STEP;
    const int end = first < s.keys ? min(s.queries, min(first + OWN, s.keys) - s.offset + a.left) : 0;
    const int per_head = max(0, (end - begin + STEP - 1) / STEP), steps = per_head * a.group;

    const int warp = threadIdx.x / 32, own = warp / STEP_WARPS * OWN_16 * 16, across = warp % STEP_WARPS;
    const int step_row = across * STEP_16 * 16;
    const u32 k_tile = shared_tiles(), v_tile = k_tile + OWN_BYTES, q_tiles = v_tile + OWN_BYTES;
    const u32 dout_tiles = q_tiles + STAGES * STEP_BYTES, p_tile = dout_tiles + STAGES * STEP_BYTES;
    const u32 ds_tiles = p_tile + WEIGHTS_BYTES, stats_tiles = ds_tiles + DS_TILES * WEIGHTS_BYTES;

    const auto load_step = [&](int n) {
        const int head = kv_head * a.group + n / per_head, i = begin + n % per_head * STEP, stage = n % STAGES;
        const long long at = s.first_query + i;
        load_tile<STEP, THREADS>(q_tiles + stage * STEP_BYTES, q, a.q, s, at, head, s.queries - i, a.head_dim);
        load_tile<STEP, THREADS>(dout_tiles + stage * STEP_BYTES, dout, a.dout, s, at, head, s.queries - i, a.value_dim);
        load_stats(stats_tiles + stage * STEP * STATS_BYTES, stats_of(a, s, stats, rows, head, i), STEP, s.queries - i);
    };
    StepCopies<STEP, THREADS, true> copies;
    const auto start_step = [&](int n) {
        const int head = kv_head * a.group + n / per_head, i = begin + n % per_head * STEP;
        const long long at = s.first_query + i;
        start_tile<STEP, THREADS>(copies.x, q, a.q, s, at, head, s.queries - i, a.head_dim);
        start_tile<STEP, THREADS>(copies.y, dout, a.dout, s, at, head, s.queries - i, a.value_dim);
        copies.start_stats(stats_of(a, s, stats, rows, head, i), s.queries - i);
    };
    const long long at = s.first_key + first;
    load_tile<OWN, THREADS>(k_tile, k, a.k, s, at, kv_head, s.keys - first, a.head_dim);
    load_tile<OWN, THREADS>(v_tile, v, a.v, s, at, kv_head, s.keys - first, a.value_dim);
    if (BY_REGISTERS && steps > 0) start_step(0);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    float dk_sum[OWN_16][2 * WIDTH_16][4] = {}, dv_sum[OWN_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n <= steps; ++n) {
        // after this barrier ds of the previous step is complete, and the tiles of that step have been read
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();
        const int next = n + STAGES - 1;
        if (BY_REGISTERS && n < steps) copies.finish(q_tiles, dout_tiles, stats_tiles);
        if (!BY_REGISTERS && next < steps) load_step(next);
        cp_async_commit();
        if (dq_sum && n > 0)
            add_dq<OWN, STEP, WARPS>(a, s, ds_tiles + (n - 1) % DS_TILES * WEIGHTS_BYTES, k_tile, dq_sum,
                   kv_head * a.group + (n - 1) / per_head, begin + (n - 1) % per_head * STEP);
        if (n == steps) break;
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        if (BY_REGISTERS && n + 1 < steps) start_step(n + 1);
        const int i = begin + n % per_head * STEP, stage = n % STAGES;
        const u32 q_tile = q_tiles + stage * STEP_BYTES, dout_tile = dout_tiles + stage * STEP_BYTES;
        const u32 ds_tile = ds_tiles + n % DS_TILES * WEIGHTS_BYTES;
        const Logits logits = {a, s, dbias, dbias_strides, kv_head * a.group + n / per_head, i + step_row,
                               first + own, stats_tiles + (stage * STEP + step_row) * STATS_BYTES};
        float x[STEP_16][2 * OWN_16][4], dp[STEP_16][2 * OWN_16][4];
        logits.compute<STEP, OWN, STEP_16, OWN_16>(
            x, dp, offset_address<STEP>(lane_address(q_tile), step_row, 0),
            offset_address<STEP>(lane_address(dout_tile), step_row, 0),
            offset_address<OWN>(lane_address_swapped(k_tile), own, 0),
            offset_address<OWN>(lane_address_swapped(v_tile), own, 0), is_partial(a, s, STEP, i, OWN, first));
        if (STAGES == 2 && DS_TILES == 1) __syncthreads();  // ds of the previous step has been read
        store_weights<STEP>(p_tile, step_row, own, x);
        store_weights<STEP>(ds_tile, step_row, own, dp);
        bar_sync(1 + warp / STEP_WARPS, 32 * STEP_WARPS);   // the warps with the same keys
        add_product<true, STEP, STEP, STEP_WARPS, OWN_16, WIDTH_16>(
            dv_sum, offset_address<STEP>(lane_address_swapped(p_tile), 0, own),
            offset_address<STEP>(lane_address(dout_tile), 0, 16 * across));
        add_product<true, STEP, STEP, STEP_WARPS, OWN_16, WIDTH_16>(
            dk_sum, offset_address<STEP>(lane_address_swapped(ds_tile), 0, own),
            offset_address<STEP>(lane_address(q_tile), 0, 16 * across));
    }

    cp_async_wait<0>();
    __syncthreads();
    stage_tile<OWN, STEP_WARPS, OWN_16, WIDTH_16>(k_tile, own, across, a.scale, dk_sum);
    stage_tile<OWN, STEP_WARPS, OWN_16, WIDTH_16>(v_tile, own, across, 1.f, dv_sum);
    __syncthreads();
    const int count = s.key_rows - first;
    store_tile<OWN, THREADS>(k_tile, dk, a.dk, s, at, kv_head, count, a.head_dim);
    store_tile<OWN, THREADS>(v_tile, dv, a.dv, s, at, kv_head, count, a.value_dim);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flash_attention_dq(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ stats,      // from flash_attention_rows
    long long rows,
    scalar* __restrict__ dq) {            // (B, T, H, D)
    const int tiles = (a.queries + OWN - 1) / OWN, first = blockIdx.x % tiles * OWN, head = blockIdx.x / tiles % a.heads;
    const Sequence s = sequence_at(a, blockIdx.x / tiles / a.heads);
    if (first >= s.queries) return;
    const int kv_head = head / a.group, last = min(first + OWN, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / STEP * STEP, end = min(s.keys, last + s.offset + a.right + 1);
    const int steps = max(0, (end - begin + STEP - 1) / STEP);

    const int warp = threadIdx.x / 32, own = warp / STEP_WARPS * OWN_16 * 16, across = warp % STEP_WARPS;
    const int step_row = across * STEP_16 * 16;
    const u32 q_tile = shared_tiles(), dout_tile = q_tile + OWN_BYTES, k_tiles = dout_tile + OWN_BYTES;
    const u32 v_tiles = k_tiles + STAGES * STEP_BYTES, ds_tile = v_tiles + STAGES * STEP_BYTES;
    const u32 stats_tile = ds_tile + DS_BYTES;

    const auto load_step = [&](int n) {
        const int j = begin + n * STEP, stage = n % STAGES;
        const long long at = s.first_key + j;
        load_tile<STEP, THREADS>(k_tiles + stage * STEP_BYTES, k, a.k, s, at, kv_head, s.keys - j, a.head_dim);
        load_tile<STEP, THREADS>(v_tiles + stage * STEP_BYTES, v, a.v, s, at, kv_head, s.keys - j, a.value_dim);
    };
    StepCopies<STEP, THREADS, false> copies;
    const auto start_step = [&](int n) {
        const int j = begin + n * STEP;
        start_tile<STEP, THREADS>(copies.x, k, a.k, s, s.first_key + j, kv_head, s.keys - j, a.head_dim);
        start_tile<STEP, THREADS>(copies.y, v, a.v, s, s.first_key + j, kv_head, s.keys - j, a.value_dim);
    };
    const long long at = s.first_query + first;
    load_tile<OWN, THREADS>(q_tile, q, a.q, s, at, head, s.queries - first, a.head_dim);
    load_tile<OWN, THREADS>(dout_tile, dout, a.dout, s, at, head, s.queries - first, a.value_dim);
    load_stats(stats_tile, stats_of(a, s, stats, rows, head, first), OWN, s.queries - first);
    if (BY_REGISTERS && steps > 0) start_step(0);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    const Strides none = {};
    float dq_sum[OWN_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();  // the previous step's tiles have been read
        const int next = n + STAGES - 1;
        if (BY_REGISTERS) copies.finish(k_tiles, v_tiles, 0);
        if (!BY_REGISTERS && next < steps) load_step(next);
        cp_async_commit();
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        if (BY_REGISTERS && n + 1 < steps) start_step(n + 1);
        const int j = begin + n * STEP, stage = n % STAGES;
        const u32 k_tile = k_tiles + stage * STEP_BYTES, v_tile = v_tiles + stage * STEP_BYTES;
        const Logits logits = {a, s, nullptr, none, head, first + own, j + step_row, stats_tile + own * STATS_BYTES};
        float x[OWN_16][2 * STEP_16][4], ds[OWN_16][2 * STEP_16][4];
        logits.compute<OWN, STEP, OWN_16, STEP_16>(
            x, ds, offset_address<OWN>(lane_address(q_tile), own, 0), offset_address<OWN>(lane_address(dout_tile), own, 0),
            offset_address<STEP>(lane_address_swapped(k_tile), step_row, 0),
            offset_address<STEP>(lane_address_swapped(v_tile), step_row, 0),
            is_partial(a, s, OWN, first, STEP, j));
        store_weights<OWN>(ds_tile, own, step_row, ds);
        bar_sync(1 + warp / STEP_WARPS, 32 * STEP_WARPS);   // the warps with the same queries
        add_product<false, STEP, OWN, STEP_WARPS, OWN_16, WIDTH_16>(
            dq_sum, offset_address<OWN>(lane_address(ds_tile), own, 0),
            offset_address<STEP>(lane_address(k_tile), 0, 16 * across));
    }

    cp_async_wait<0>();
    __syncthreads();
    stage_tile<OWN, STEP_WARPS, OWN_16, WIDTH_16>(q_tile, own, across, a.scale, dq_sum);
    __syncthreads();
    store_tile<OWN, THREADS>(q_tile, dq, a.dq, s, at, head, s.queries - first, a.head_dim);
}
