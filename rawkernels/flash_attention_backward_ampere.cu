// The gradient of attention on tensor cores by mma.sync (sm_80 and up): delta and lse by rows; then a block keeps OWN keys
// and visits the queries that see them, STEP at a time: four warps make p of q and k and keep dv, four make ds of dout and
// v and keep dk, all add dq to float32 in global memory; then dq is rounded. Without atomics dq comes from
// flash_attention_backward_ampere_dq.cu. Dao, "FlashAttention-2" (2023). Design and figures: notes/ampere-backward.md.
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 128; STAGES = 2; EXTRAS = false
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 64; STAGES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 64; OWN = 64; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = f16, bf16; HEAD_DIM = 128; OWN = 128; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = bf16; HEAD_DIM = 96; OWN = 128; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = bf16; HEAD_DIM = 192; OWN = 64; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = f16; HEAD_DIM = 256; OWN = 64; STEP = 64; STAGES = 2; EXTRAS = false, true
// Constants: scalar = bf16; HEAD_DIM = 128; OWN = 64; STEP = 64; STAGES = 1; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 256; OWN = 32; STEP = 32; STAGES = 1; EXTRAS = true
//   (both head sizes rounded up; gpuattn/ops/attention_ampere_backward.py: TILES; EXTRAS: softcap, bias, slopes, dropout)
// Launch:    rows, dq_store: grid = (ceil(longest queries / 16) * sequences,), block = (256,)
//            dkv: grid = (ceil(longest keys / OWN) * KV heads * sequences,), block = (256,), shared = DKV_BYTES
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/attention_backward_mma.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
// 16s of rows and columns that a warp has: of a step's logits, of the block's dk or dv, of a step's dq
constexpr int LOGITS_ACROSS = OWN > STEP ? 4 : 2, STEP_16 = STEP * LOGITS_ACROSS / 64, OWN_16 = OWN / 16 / LOGITS_ACROSS;
constexpr int SUM_ACROSS = OWN >= 128 ? 2 : 4, SUM_16 = OWN * SUM_ACROSS / 64, WIDTH_16 = HEAD_DIM / 16 / SUM_ACROSS;
constexpr int ADDERS = EXTRAS && HEAD_DIM <= 128 ? 4 : 8;  // warps that multiply dq: extras are enough work for p's
constexpr int DQ_ACROSS = HEAD_DIM / 16 % (32 * ADDERS / STEP) == 0 ? 32 * ADDERS / STEP : 2, DQ_WARPS = ADDERS / DQ_ACROSS;
constexpr int DQ_16 = STEP / 16 / DQ_WARPS, DQ_WIDTH_16 = HEAD_DIM / 16 / DQ_ACROSS;
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;
constexpr int OWN_BYTES = OWN * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES;
constexpr int WEIGHTS_BYTES = STEP * ((OWN + 63) / 64 * 128), WEIGHT_TILES = 3 + EXTRAS;  // p; ds, twice; bends
constexpr int DKV_BYTES = 2 * OWN_BYTES + STAGES * (2 * STEP_BYTES + STEP * STATS_BYTES) + WEIGHT_TILES * WEIGHTS_BYTES;

// ---- dq_sum (rows / UNIT, H, HEAD_DIM / 8 accumulators of mma)
__device__ __forceinline__ float* dq_unit(const Attention& a, float* dq_sum, long long row, int head) {
    return dq_sum + (row / UNIT * a.heads + head) * (UNIT * HEAD_DIM);
}
// One accumulator, such that lanes lie side by side.
__device__ __forceinline__ void add_fragment(float* sum, const float (&d)[4]) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(sum + 4 * lane), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]) : "memory");
#else
    for (int e = 0; e < 4; ++e) atomicAdd(sum + 32 * e + lane, d[e]);
#endif
}
// Of that accumulator, columns 2 t and 2 t + 1 of a row.
__device__ __forceinline__ float2 fragment_pair(const float* sum, int row, int t) {
    const int lane = row % 8 * 4 + t, e = row / 8 * 2;
#if __CUDA_ARCH__ >= 900
    return *(const float2*)(sum + 4 * lane + e);
#else
    return make_float2(sum[32 * e + lane], sum[32 * e + 32 + lane]);
#endif
}

constexpr int ROWS_THREADS = 256, ROWS_LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;
__device__ __forceinline__ float product_of_pairs(u32 x, u32 y) {
    scalar a, b, c, d;
    a.bits = (unsigned short)x, b.bits = (unsigned short)(x >> 16);
    c.bits = (unsigned short)y, d.bits = (unsigned short)(y >> 16);
    return (float)a * (float)c + (float)b * (float)d;
}

extern "C" __global__ void __launch_bounds__(256) flash_attention_rows(
    const Attention a,
    const scalar* __restrict__ out,   // (B, T, H, Dv), or (tokens, H, Dv) with cu_q, by strides
    const scalar* __restrict__ dout,  // (B, T, H, Dv)
    const float* __restrict__ lse,    // (B, H, T)
    const float* __restrict__ dlse,   // (B, H, T), or null
    float* __restrict__ stats,        // (H, rows, 2): lse / log(2), +inf where no key is seen or past the end; delta
    float* __restrict__ delta,        // (B, H, T) or null: rowsum(dout * out) - dlse
    long long rows,
    float* __restrict__ dq_sum) {     // becomes 0; or null
    const int units = (a.queries + UNIT - 1) / UNIT, first = blockIdx.x % units * UNIT;
    const Sequence s = find_sequence(a, blockIdx.x / units);
    if (first >= s.queries) return;
    if (dq_sum)
        for (int e = threadIdx.x; e < a.heads * (UNIT * HEAD_DIM / 4); e += ROWS_THREADS)
            ((float4*)dq_unit(a, dq_sum, first_row(a, s) + first, 0))[e] = make_float4(0.f, 0.f, 0.f, 0.f);
    const int column = threadIdx.x % ROWS_LANES * 8;
#pragma unroll 4
    for (int task = threadIdx.x / ROWS_LANES; task < UNIT * a.heads; task += ROWS_THREADS / ROWS_LANES) {
        const int i = first + task / a.heads, head = task % a.heads;
        const bool inside = i < s.queries;
        float sum = 0.f;
        if (inside && column < a.value_dim) {
            const uint4 x = *(const uint4*)(rows_of(out, a.out, s.number, s.first_query + i, head) + column);
            const uint4 y = *(const uint4*)(rows_of(dout, a.dout, s.number, s.first_query + i, head) + column);
            sum = (product_of_pairs(x.x, y.x) + product_of_pairs(x.y, y.y)) +
                  (product_of_pairs(x.z, y.z) + product_of_pairs(x.w, y.w));
        }
#pragma unroll
        for (int lane = ROWS_LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
        if (column > 0) continue;
        float scaled = INF;
        if (inside) {
            const long long e = s.number * a.lse_batch + head * a.lse_head + s.first_query + i;
            if (dlse) sum -= dlse[e];
            if (delta) delta[e] = sum;
            if (lse[e] != NEG_INF) scaled = lse[e] * LOG2E;
        }
        ((float2*)stats)[head * rows + first_row(a, s) + i] = make_float2(scaled, sum);
    }
}

// dq = scale * dq_sum, rounded
extern "C" __global__ void __launch_bounds__(256) flash_attention_dq_store(
    const Attention a,
    const float* __restrict__ dq_sum,
    scalar* __restrict__ dq) {        // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const int units = (a.queries + UNIT - 1) / UNIT, first = blockIdx.x % units * UNIT;
    const Sequence s = find_sequence(a, blockIdx.x / units);
    const int row = threadIdx.x % UNIT, i = first + row;
    if (i >= s.queries) return;
#pragma unroll 2
    for (int task = threadIdx.x / UNIT; task < a.heads * (HEAD_DIM / 8); task += ROWS_THREADS / UNIT) {
        const int head = task / (HEAD_DIM / 8), column = task % (HEAD_DIM / 8) * 8;
        if (column >= a.head_dim) continue;
        const float* sum = dq_unit(a, (float*)dq_sum, first_row(a, s) + first, head) + column * UNIT;
        u32 packed[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 x = fragment_pair(sum, row, t);
            packed[t] = pack_pair(scalar(), x.x * a.scale, x.y * a.scale);
        }
        scalar* target = dq + s.number * a.dq.batch + (s.first_query + i) * a.dq.row + head * a.dq.head + column;
        *(uint4*)target = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}

struct Queries { int head, i; };  // of a step: the head, and the first

// dq of a step's queries: ds (queries, keys) k, added to what other keys add
__device__ __forceinline__ void add_dq(const Attention& a, const Sequence& s, u32 ds, u32 k, float* dq_sum, Queries at) {
    const int warp = threadIdx.x / 32 % ADDERS, rows = warp / DQ_ACROSS * DQ_16 * 16, across = warp % DQ_ACROSS;
    float dq[DQ_16][2 * DQ_WIDTH_16][4] = {};
    add_product<false, OWN, STEP, DQ_ACROSS, DQ_16, DQ_WIDTH_16>(
        dq, moved<STEP>(straight(ds), rows, 0), moved<OWN>(straight(k), 0, 16 * across));
#pragma unroll
    for (int m = 0; m < DQ_16; ++m) {
        const int i = at.i + rows + 16 * m;
        if (i >= s.queries) break;
        float* unit = dq_unit(a, dq_sum, first_row(a, s) + i, at.head);
#pragma unroll
        for (int n = 0; n < 2 * DQ_WIDTH_16; ++n)
            add_fragment(unit + (2 * (across + DQ_ACROSS * (n / 2)) + n % 2) * 8 * UNIT, dq[m][n]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flash_attention_dkv(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ stats,      // as flash_attention_rows leaves them
    long long rows,
    float* __restrict__ dq_sum,           // 0 at first; or null
    float* __restrict__ dbias,            // of zeros, by strides; or null
    const Strides dbias_strides,
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv) {            // (B, S, Hk, Dv)
    const int tiles = (a.keys + OWN - 1) / OWN, kv_heads = a.heads / a.group;
    const int first = blockIdx.x % tiles * OWN, kv_head = blockIdx.x / tiles % kv_heads;
    const Sequence s = find_sequence(a, blockIdx.x / tiles / kv_heads);
    if (first >= s.key_rows) return;
    const int begin = max(0, first - s.offset - a.right) / STEP * STEP;
    const int end = first < s.keys ? min(s.queries, min(first + OWN, s.keys) - s.offset + a.left) : 0;
    const int per_head = max(0, (end - begin + STEP - 1) / STEP), steps = per_head * a.group;
    const auto queries = [&](int n) -> Queries {
        const int turn = n < per_head ? 0 : n / per_head;
        return {kv_head * a.group + turn, begin + (n - turn * per_head) * STEP};
    };

    const int warp = threadIdx.x / 32, rank = warp % 4;
    const bool weighs = warp < 4, adds = dq_sum && (ADDERS == WARPS || !weighs);
    const int sum_own = rank / SUM_ACROSS * SUM_16 * 16, across = rank % SUM_ACROSS;
    const u32 k_tile = shared_tiles(), v_tile = k_tile + OWN_BYTES, q_tiles = v_tile + OWN_BYTES;
    const u32 dout_tiles = q_tiles + STAGES * STEP_BYTES, p_tile = dout_tiles + STAGES * STEP_BYTES;
    const u32 ds_tiles = p_tile + WEIGHTS_BYTES, bend_tile = ds_tiles + 2 * WEIGHTS_BYTES;
    const u32 stats_tiles = p_tile + WEIGHT_TILES * WEIGHTS_BYTES;

    const auto load_step = [&](int n) {
        const Queries at = queries(n);
        const int left = s.queries - at.i, stage = n % STAGES;
        const long long row = s.first_query + at.i;
        load_tile<STEP, THREADS>(q_tiles + stage * STEP_BYTES, q, a.q, s, row, at.head, left, a.head_dim);
        load_tile<STEP, THREADS>(dout_tiles + stage * STEP_BYTES, dout, a.dout, s, row, at.head, left, a.value_dim);
        load_stats(stats_tiles + stage * STEP * STATS_BYTES, stats_of(a, s, stats, rows, at.head, at.i), STEP, left);
    };
    const long long row = s.first_key + first;
    load_tile<OWN, THREADS>(k_tile, k, a.k, s, row, kv_head, s.keys - first, a.head_dim);
    load_tile<OWN, THREADS>(v_tile, v, a.v, s, row, kv_head, s.keys - first, a.value_dim);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    float sum[SUM_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n <= steps; ++n) {
        // after this barrier the last step's ds are there, and nobody reads the tiles of that step any more
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();
        if (n + STAGES - 1 < steps) load_step(n + STAGES - 1);
        cp_async_commit();
        const auto last_dq = [&] {
            if (adds && n > 0)
                add_dq(a, s, ds_tiles + (n - 1) % 2 * WEIGHTS_BYTES, k_tile, dq_sum, queries(n - 1));
        };
        if (!weighs || n == steps) last_dq();
        if (n == steps) break;
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        const Queries at = queries(n);
        const int stage = n % STAGES, logits_rank = anew(rank);
        const int own = logits_rank / (4 / LOGITS_ACROSS) * OWN_16 * 16;
        const int step_row = logits_rank % (4 / LOGITS_ACROSS) * STEP_16 * 16;
        const u32 q_tile = q_tiles + stage * STEP_BYTES, dout_tile = dout_tiles + stage * STEP_BYTES;
        const u32 ds_tile = ds_tiles + n % 2 * WEIGHTS_BYTES;
        float x[STEP_16][2 * OWN_16][4];
        multiply_rows<STEP, OWN, STEP_16, OWN_16>(x, moved<STEP>(straight(weighs ? q_tile : dout_tile), step_row, 0),
                                                  moved<OWN>(crossed(weighs ? k_tile : v_tile), own, 0));
        const Logits logits = {a, s, dbias, dbias_strides, at.head, at.i + step_row, first + own,
                               stats_tiles + (stage * STEP + step_row) * STATS_BYTES};
        const bool hides = logits.partial(STEP, at.i, OWN, first);
        if (weighs) {
#pragma unroll
            for (int m = 0; m < STEP_16; ++m) {
                logits.weigh<STEP, OWN_16>(x[m], 16 * m, p_tile, bend_tile, step_row, own, hides);
                if (m == STEP_16 / 2 - 1) bar_arrive(9 + rank, 64);  // half of p for the warp that has the same dp
            }
            bar_arrive(5 + rank, 64);
        } else {
#pragma unroll
            for (int m = 0; m < STEP_16; ++m) {
                if (m == 0 && STEP_16 > 1) bar_sync(9 + rank, 64);
                if (m == STEP_16 / 2) bar_sync(5 + rank, 64);
                logits.differentiate<STEP, OWN_16>(x[m], 16 * m, p_tile, bend_tile, ds_tile, step_row, own);
            }
        }
        bar_sync(1 + warp / SUM_ACROSS, 32 * SUM_ACROSS);   // the warps of the same keys
        add_product<true, STEP, STEP, SUM_ACROSS, SUM_16, WIDTH_16, EXTRAS>(
            sum, moved<STEP>(crossed(weighs ? p_tile : ds_tile), 0, sum_own),
            moved<STEP>(straight(weighs ? dout_tile : q_tile), 0, 16 * across), weighs && a.threshold < 65536);
        if (weighs) last_dq();
    }

    cp_async_wait<0>();
    __syncthreads();
    const float factor = weighs ? a.keep_scale : a.scale;
    put_tile<OWN, SUM_ACROSS, SUM_16, WIDTH_16>(weighs ? v_tile : k_tile, sum_own, across, factor, sum);
    __syncthreads();
    const int count = s.key_rows - first;
    store_tile<OWN, THREADS>(k_tile, dk, a.dk, s, row, kv_head, count, a.head_dim);
    store_tile<OWN, THREADS>(v_tile, dv, a.dv, s, row, kv_head, count, a.value_dim);
}
