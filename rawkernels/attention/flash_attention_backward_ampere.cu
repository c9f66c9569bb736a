// The gradient of attention by mma.sync, with only a scale and a window between products and probabilities. A
// block owns OWN keys and loops over the queries that see them, STEP at a time. Four warps compute p from q and k and
// accumulate dv, four compute ds from dout and v and accumulate dk; all add dq to float32 in global memory.
// flash_attention_backward_ampere_rows.cu runs before and after. Dao, "FlashAttention-2" (2023). Design and figures:
// notes/ampere-backward.md.
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 128; STAGES = 2
// Constants: scalar = f16, bf16; HEAD_DIM = 128; OWN = 128; STEP = 64; STAGES = 2
// Constants: scalar = bf16; HEAD_DIM = 64, 128; OWN = 64; STEP = 64; STAGES = 2
// Constants: scalar = bf16; HEAD_DIM = 64, 96; OWN = 128; STEP = 64; STAGES = 2
// Constants: scalar = bf16; HEAD_DIM = 192; OWN = 64; STEP = 64; STAGES = 2
// Constants: scalar = f16; HEAD_DIM = 256; OWN = 64; STEP = 64; STAGES = 2
// Constants: scalar = bf16; HEAD_DIM = 128, 256; OWN = 64; STEP = 64; STAGES = 1
// Constants: scalar = bf16; HEAD_DIM = 256; OWN = 32; STEP = 32; STAGES = 1
// Constants below sm_80: scalar = f16; HEAD_DIM = 64; OWN = 64; STEP = 64; STAGES = 1
// Constants below sm_80: scalar = f16; HEAD_DIM = 128; OWN = 64; STEP = 32; STAGES = 1
// Constants below sm_80: scalar = f16; HEAD_DIM = 192; OWN = 32; STEP = 32; STAGES = 1
//   (both head sizes rounded up; gpuattn/ops/attention/ampere.py: TILES)
// Launch:    grid = (ceil(longest keys / OWN) * KV heads * sequences,), block = (256,), shared = DKV_BYTES
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_backward_mma.cuh"

static_assert(!BY_REGISTERS || STAGES == 1, "flash_attention_backward_ampere.cu: registers hold the tiles of the other step");
constexpr int WARPS = 8, THREADS = 32 * WARPS;
// Groups of 16 rows and columns of a warp, of a step's logits and of the block's dk or dv.
constexpr int LOGITS_ACROSS = OWN > STEP ? 4 : 2, STEP_16 = STEP * LOGITS_ACROSS / 64, OWN_16 = OWN / 16 / LOGITS_ACROSS;
constexpr int SUM_ACROSS = OWN >= 128 ? 2 : 4, SUM_16 = OWN * SUM_ACROSS / 64, WIDTH_16 = HEAD_DIM / 16 / SUM_ACROSS;
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;
constexpr int OWN_BYTES = OWN * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES, WEIGHTS_BYTES = STEP * ((OWN + 63) / 64 * 128);
constexpr int DKV_BYTES = 2 * OWN_BYTES + STAGES * (2 * STEP_BYTES + STEP * STATS_BYTES) + 3 * WEIGHTS_BYTES;

// d = a b^T for this warp's logits, both as [row][head column]. a: lane_address of the tile, b: lane_address_swapped.
__device__ __forceinline__ void multiply_rows(float (&d)[STEP_16][2 * OWN_16][4], u32 a, u32 b) {
    u32 x[STEP_16][4], y[2][OWN_16][4];  // 16 rows of a are loaded when the previous ones have been used, to save registers
#pragma unroll
    for (int m = 0; m < STEP_16; ++m) ldmatrix(x[m], offset_address<STEP>(a, 16 * m, 0));
#pragma unroll
    for (int n = 0; n < OWN_16; ++n) ldmatrix(y[0][n], offset_address<OWN>(b, 16 * n, 0));
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        const bool more = k + 1 < HEAD_DIM / 16;
        if (more)
#pragma unroll
            for (int n = 0; n < OWN_16; ++n) ldmatrix(y[(k + 1) % 2][n], offset_address<OWN>(b, 16 * n, 16 * (k + 1)));
#pragma unroll
        for (int m = 0; m < STEP_16; ++m) {
#pragma unroll
            for (int n = 0; n < OWN_16; ++n) {
                if (k == 0)
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[m][2 * n][e] = d[m][2 * n + 1][e] = 0.f;
                mma_pair(d[m][2 * n], d[m][2 * n + 1], x[m], y[k % 2][n]);
            }
            if (more) ldmatrix(x[m], offset_address<STEP>(a, 16 * m, 16 * (k + 1)));
        }
    }
}

// Turns q k of 16 queries into p and stores it at (row, column) of a tile of STEP queries. stats: of this lane's first query.
__device__ __forceinline__ void probabilities(float (&x)[2 * OWN_16][4], float scale, u32 stats, u32 tile, int row,
                                              int column) {
    const float lse[2] = {load_shared_float2(stats).x, load_shared_float2(stats + 8 * STATS_BYTES).x};
#pragma unroll
    for (int n = 0; n < 2 * OWN_16; n += 2) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[n + e / 4][e % 4] = exp2_fast(x[n + e / 4][e % 4] * scale - lse[e / 2 % 2]);
        store_fragments<STEP>(tile, row, column + 8 * n, x[n], x[n + 1]);
    }
}
// Turns dout v of the same queries into ds and stores it at the same position of `tile`.
__device__ __forceinline__ void compute_ds(float (&x)[2 * OWN_16][4], u32 stats, u32 weights, u32 tile, int row,
                                              int column) {
    const float delta[2] = {load_shared_float2(stats).y, load_shared_float2(stats + 8 * STATS_BYTES).y};
#pragma unroll
    for (int n = 0; n < 2 * OWN_16; n += 2) {
        u32 packed[4];
        ldmatrix(packed, offset_address<STEP>(lane_address(weights), row, column + 8 * n));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 p = unpack_pair(scalar(), packed[e]);
            float* ds = &x[n + e / 2][e % 2 * 2];
            ds[0] = p.x * (ds[0] - delta[e % 2]), ds[1] = p.y * (ds[1] - delta[e % 2]);
        }
        store_fragments<STEP>(tile, row, column + 8 * n, x[n], x[n + 1]);
    }
}

struct Queries { int head, i; };  // of a step: the head and the first query

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flash_attention_dkv(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ stats,      // from flash_attention_rows
    long long rows,
    float* __restrict__ dq_sum,           // zeros, or null
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv) {            // (B, S, Hk, Dv)
    const int tiles = (a.keys + OWN - 1) / OWN, kv_heads = a.heads / a.group;
    const int first = blockIdx.x % tiles * OWN, kv_head = blockIdx.x / tiles % kv_heads;
    const Sequence s = sequence_at(a, blockIdx.x / tiles / kv_heads);
    if (first >= s.key_rows) return;
    const int begin = max(0, first - s.offset - a.right) / STEP * STEP;
    const int end = first < s.keys ? min(s.queries, min(first + OWN, s.keys) - s.offset + a.left) : 0;
    const int per_head = max(0, (end - begin + STEP - 1) / STEP), steps = per_head * a.group;
    const auto queries = [&](int n) -> Queries {
        const int turn = n < per_head ? 0 : n / per_head;
        return {kv_head * a.group + turn, begin + (n - turn * per_head) * STEP};
    };

    const int warp = threadIdx.x / 32, rank = warp % 4;
    const bool computes_p = warp < 4;
    const int own = rank / (4 / LOGITS_ACROSS) * OWN_16 * 16, step_row = rank % (4 / LOGITS_ACROSS) * STEP_16 * 16;
    const int sum_own = rank / SUM_ACROSS * SUM_16 * 16, across = rank % SUM_ACROSS;
    const u32 k_tile = shared_tiles(), v_tile = k_tile + OWN_BYTES, q_tiles = v_tile + OWN_BYTES;
    const u32 dout_tiles = q_tiles + STAGES * STEP_BYTES, p_tile = dout_tiles + STAGES * STEP_BYTES;
    const u32 ds_tiles = p_tile + WEIGHTS_BYTES, stats_tiles = ds_tiles + 2 * WEIGHTS_BYTES;

    const auto load_step = [&](int n) {
        const Queries at = queries(n);
        const int left = s.queries - at.i, stage = n % STAGES;
        const long long row = s.first_query + at.i;
        load_tile<STEP, THREADS>(q_tiles + stage * STEP_BYTES, q, a.q, s, row, at.head, left, a.head_dim);
        load_tile<STEP, THREADS>(dout_tiles + stage * STEP_BYTES, dout, a.dout, s, row, at.head, left, a.value_dim);
        load_stats(stats_tiles + stage * STEP * STATS_BYTES, stats_of(a, s, stats, rows, at.head, at.i), STEP, left);
    };
    StepCopies<STEP, THREADS, true> copies;
    const auto start_step = [&](int n) {
        const Queries at = queries(n);
        const int left = s.queries - at.i;
        start_tile<STEP, THREADS>(copies.x, q, a.q, s, s.first_query + at.i, at.head, left, a.head_dim);
        start_tile<STEP, THREADS>(copies.y, dout, a.dout, s, s.first_query + at.i, at.head, left, a.value_dim);
        copies.start_stats(stats_of(a, s, stats, rows, at.head, at.i), left);
    };
    const long long row = s.first_key + first;
    load_tile<OWN, THREADS>(k_tile, k, a.k, s, row, kv_head, s.keys - first, a.head_dim);
    load_tile<OWN, THREADS>(v_tile, v, a.v, s, row, kv_head, s.keys - first, a.value_dim);
    if (BY_REGISTERS && steps > 0) start_step(0);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    float sum[SUM_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n <= steps; ++n) {
        // after this barrier ds of the previous step is complete, and the tiles of that step have been read
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();
        if (BY_REGISTERS && n < steps) copies.finish(q_tiles, dout_tiles, stats_tiles);
        if (!BY_REGISTERS && n + STAGES - 1 < steps) load_step(n + STAGES - 1);
        cp_async_commit();
        const auto last_dq = [&] {
            if (!dq_sum || n == 0) return;
            const Queries last = queries(n - 1);
            add_dq<OWN, STEP, WARPS>(a, s, ds_tiles + (n - 1) % 2 * WEIGHTS_BYTES, k_tile, dq_sum, last.head, last.i);
        };
        if (!computes_p || n == steps) last_dq();
        if (n == steps) break;
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        if (BY_REGISTERS && n + 1 < steps) start_step(n + 1);
        const Queries at = queries(n);
        const int stage = n % STAGES;
        const u32 q_tile = q_tiles + stage * STEP_BYTES, dout_tile = dout_tiles + stage * STEP_BYTES;
        const u32 ds_tile = ds_tiles + n % 2 * WEIGHTS_BYTES;
        float x[STEP_16][2 * OWN_16][4];
        multiply_rows(x, offset_address<STEP>(lane_address(computes_p ? q_tile : dout_tile), step_row, 0),
                      offset_address<OWN>(lane_address_swapped(computes_p ? k_tile : v_tile), own, 0));
        const int lane = opaque((int)threadIdx.x) % 32;
        const u32 row_stats = stats_tiles + (stage * STEP + step_row + lane / 4) * STATS_BYTES;
        if (computes_p) {
            const bool masked = is_partial(a, s, STEP, at.i, OWN, first);
#pragma unroll
            for (int m = 0; m < STEP_16; ++m) {
                const int row = step_row + 16 * m;
                if (masked) apply_mask(a, s, at.i + row + lane / 4, first + own + lane % 4 * 2, x[m]);
                probabilities(x[m], a.scale * LOG2E, row_stats + 16 * m * STATS_BYTES, p_tile, row, own);
                if (m == STEP_16 / 2 - 1) bar_arrive(9 + rank, 64);  // half of p is complete for the warp with the same dp
            }
            bar_arrive(5 + rank, 64);
        } else {
#pragma unroll
            for (int m = 0; m < STEP_16; ++m) {
                if (m == 0 && STEP_16 > 1) bar_sync(9 + rank, 64);
                if (m == STEP_16 / 2) bar_sync(5 + rank, 64);
                compute_ds(x[m], row_stats + 16 * m * STATS_BYTES, p_tile, ds_tile, step_row + 16 * m, own);
            }
        }
        bar_sync(1 + warp / SUM_ACROSS, 32 * SUM_ACROSS);   // the warps with the same keys
        add_product<true, STEP, STEP, SUM_ACROSS, SUM_16, WIDTH_16>(
            sum, offset_address<STEP>(lane_address_swapped(computes_p ? p_tile : ds_tile), 0, sum_own),
            offset_address<STEP>(lane_address(computes_p ? dout_tile : q_tile), 0, 16 * across));
        if (computes_p) last_dq();
    }

    cp_async_wait<0>();
    __syncthreads();
    const float factor = computes_p ? 1.f : a.scale;
    stage_tile<OWN, SUM_ACROSS, SUM_16, WIDTH_16>(computes_p ? v_tile : k_tile, sum_own, across, factor, sum);
    __syncthreads();
    const int count = s.key_rows - first;
    store_tile<OWN, THREADS>(k_tile, dk, a.dk, s, row, kv_head, count, a.head_dim);
    store_tile<OWN, THREADS>(v_tile, dv, a.dv, s, row, kv_head, count, a.value_dim);
}
