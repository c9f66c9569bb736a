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
//            dkv: grid = (ceil(longest keys / OWN) * KV heads * sequences,), at most one block a multiprocessor where
//            STAYS, block = (256,), shared = DKV_BYTES
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/attention_backward_mma.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr bool STAYS = !EXTRAS && __CUDA_ARCH__ == 900;  // blocks go from tile to tile; elsewhere registers do not suffice
// 16s of rows and columns that a warp has: of a step's logits, of the block's dk or dv, of a step's dq
constexpr int LOGITS_ACROSS = OWN > STEP ? 4 : 2, STEP_16 = STEP * LOGITS_ACROSS / 64, OWN_16 = OWN / 16 / LOGITS_ACROSS;
constexpr int SUM_ACROSS = OWN >= 128 ? 2 : 4, SUM_16 = OWN * SUM_ACROSS / 64, WIDTH_16 = HEAD_DIM / 16 / SUM_ACROSS;
constexpr int DQ_ACROSS = HEAD_DIM / 16 % (32 * WARPS / STEP) == 0 ? 32 * WARPS / STEP : 2, DQ_WARPS = WARPS / DQ_ACROSS;
constexpr int DQ_16 = STEP / 16 / DQ_WARPS, DQ_WIDTH_16 = HEAD_DIM / 16 / DQ_ACROSS;
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;
constexpr int OWN_BYTES = OWN * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES;
constexpr int WEIGHTS_BYTES = STEP * ((OWN + 63) / 64 * 128), WEIGHT_TILES = 3 + EXTRAS;  // p; ds, twice; bends
constexpr int PATCH_BYTES = 16 * 128, PATCHES_BYTES = WARPS * PATCH_BYTES;                 // in their place at the end
constexpr int BETWEEN_BYTES = WEIGHT_TILES * WEIGHTS_BYTES < PATCHES_BYTES ? PATCHES_BYTES : WEIGHT_TILES * WEIGHTS_BYTES;
constexpr int DKV_BYTES = 2 * OWN_BYTES + STAGES * (2 * STEP_BYTES + STEP * STATS_BYTES) + BETWEEN_BYTES + 16;

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
    float* __restrict__ dq_sum,       // becomes 0; or null
    int* __restrict__ taken) {        // becomes 0
    if (blockIdx.x == 0 && threadIdx.x == 0) *taken = 0;
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

// A warp's dk or dv, times `factor`, to global memory, 16 x 16 at a time through `patch`.
using Sums = float[SUM_16][2 * WIDTH_16][4];
__device__ __forceinline__ void store_sums(u32 patch, scalar* x, const Strides& t, const Sequence& s, int first, int head,
                                           int across, int count, int width, float factor, Sums& d) {
    const int lane = threadIdx.x % 32, row = lane / 2;
    scalar* rows = x + s.number * t.batch + (s.first_key + first + row) * t.row + head * t.head;
#pragma unroll
    for (int m = 0; m < SUM_16; ++m)
#pragma unroll
        for (int n = 0; n < WIDTH_16; ++n) {
            const int column = 16 * (across + SUM_ACROSS * n) + lane % 2 * 8;
#pragma unroll
            for (int e = 0; e < 8; ++e) d[m][2 * n + e / 4][e % 4] *= factor;
            __syncwarp();
            store_fragments<16>(patch, 0, 16 * (n % 4), d[m][2 * n], d[m][2 * n + 1]);
#pragma unroll
            for (int e = 0; e < 8; ++e) d[m][2 * n + e / 4][e % 4] = 0.f;
            __syncwarp();
            if (16 * m + row < count && column < width)
                *(uint4*)(rows + 16 * m * t.row + column) =
                    load_shared_16(chunk_address<16>(patch, row, n % 4 * 2 + lane % 2));
        }
}

struct Queries { int head, i; };  // of a step: the head, and the first
// A block's keys, and the queries that see them.
struct KeyTile {
    Sequence s;
    int first, kv_head, begin, per_head, steps;

    __device__ __forceinline__ Queries queries(int step, int group) const {
        const int turn = step < per_head ? 0 : step / per_head;
        return {kv_head * group + turn, begin + (step - turn * per_head) * STEP};
    }
};
__device__ __forceinline__ KeyTile key_tile(const Attention& a, int number) {
    const int tiles = (a.keys + OWN - 1) / OWN, kv_heads = a.heads / a.group;
    KeyTile t = {find_sequence(a, number / tiles / kv_heads), number % tiles * OWN, number / tiles % kv_heads};
    t.begin = max(0, t.first - t.s.offset - a.right) / STEP * STEP;
    const int end = t.first < t.s.keys ? min(t.s.queries, min(t.first + OWN, t.s.keys) - t.s.offset + a.left) : 0;
    t.per_head = max(0, (end - t.begin + STEP - 1) / STEP), t.steps = t.per_head * a.group;
    return t;
}

// dq of the queries from `i` on: ds (queries, keys) k, added to what other keys add
__device__ __forceinline__ void add_dq(const Attention& a, const Sequence& s, u32 ds, u32 k, float* dq_sum,
                                       Queries at) {
    const int warp = threadIdx.x / 32, rows = warp / DQ_ACROSS * DQ_16 * 16, across = warp % DQ_ACROSS;
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
    int* __restrict__ taken,              // 0: key tiles that blocks have taken beside their first
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv) {            // (B, S, Hk, Dv)
    const int tiles = (a.keys + OWN - 1) / OWN * (a.heads / a.group) * a.sequences;
    const int warp = threadIdx.x / 32, rank = warp % 4;
    const bool weighs = warp < 4;
    const int own = rank / (4 / LOGITS_ACROSS) * OWN_16 * 16, step_row = rank % (4 / LOGITS_ACROSS) * STEP_16 * 16;
    const int sum_own = rank / SUM_ACROSS * SUM_16 * 16, across = rank % SUM_ACROSS;
    const u32 k_tile = shared_tiles(), v_tile = k_tile + OWN_BYTES, q_tiles = v_tile + OWN_BYTES;
    const u32 dout_tiles = q_tiles + STAGES * STEP_BYTES, p_tile = dout_tiles + STAGES * STEP_BYTES;
    const u32 ds_tiles = p_tile + WEIGHTS_BYTES, bend_tile = ds_tiles + 2 * WEIGHTS_BYTES;
    const u32 stats_tiles = p_tile + BETWEEN_BYTES, next_tile = stats_tiles + STAGES * STEP * STATS_BYTES;

    const auto load_step = [&](const KeyTile& t, int n) {
        const Queries at = t.queries(n, a.group);
        const int left = t.s.queries - at.i, stage = n % STAGES;
        const long long row = t.s.first_query + at.i;
        load_tile<STEP, THREADS>(q_tiles + stage * STEP_BYTES, q, a.q, t.s, row, at.head, left, a.head_dim);
        load_tile<STEP, THREADS>(dout_tiles + stage * STEP_BYTES, dout, a.dout, t.s, row, at.head, left, a.value_dim);
        load_stats(stats_tiles + stage * STEP * STATS_BYTES, stats_of(a, t.s, stats, rows, at.head, at.i), STEP, left);
    };
    // all but K
    const auto load_first = [&](const KeyTile& t) {
        load_tile<OWN, THREADS>(v_tile, v, a.v, t.s, t.s.first_key + t.first, t.kv_head, t.s.keys - t.first, a.value_dim);
        if (STAGES == 2 && t.steps > 0) load_step(t, 0);
    };
    const auto load_k = [&](const KeyTile& t) {
        load_tile<OWN, THREADS>(k_tile, k, a.k, t.s, t.s.first_key + t.first, t.kv_head, t.s.keys - t.first, a.head_dim);
        cp_async_commit();
    };

    int number = blockIdx.x;
    KeyTile tile = key_tile(a, number);
    load_first(tile);
    load_k(tile);
    Sums sum = {};
    if (STAYS && threadIdx.x == 0) store_shared(next_tile, atomicAdd(taken, 1) + gridDim.x);
#pragma unroll 1
    for (int n = 0;; ++n) {
        const bool ends = n == tile.steps;
        // after this barrier the last step's ds are there, and nobody reads the tiles of that step any more
        if (STAGES == 2 || ends) cp_async_wait<0>();
        __syncthreads();
        if (n + STAGES - 1 < tile.steps) {
            load_step(tile, n + STAGES - 1);
            cp_async_commit();
        }
        const auto last_dq = [&] {
            if (dq_sum && n > 0)
                add_dq(a, tile.s, ds_tiles + (n - 1) % 2 * WEIGHTS_BYTES, k_tile, dq_sum, tile.queries(n - 1, a.group));
        };
        KeyTile next;
        if (ends) {
            number = STAYS ? __shfl_sync(~0u, load_shared(next_tile), 0) : tiles;
            if (number < tiles) {
                next = key_tile(a, number);
                load_first(next);
            }
        }
        if (!weighs || ends) last_dq();
        if (ends) {
            __syncthreads();
            if (STAYS && threadIdx.x == 0) store_shared(next_tile, atomicAdd(taken, 1) + gridDim.x);
            if (number < tiles) load_k(next);
            const int first = tile.first + sum_own, count = tile.s.key_rows - first;
            store_sums(p_tile + warp * PATCH_BYTES, weighs ? dv : dk, weighs ? a.dv : a.dk, tile.s, first, tile.kv_head,
                       across, count, weighs ? a.value_dim : a.head_dim, weighs ? a.keep_scale : a.scale, sum);
            if (number >= tiles) break;
            tile = next;
            n = -1;
            continue;
        }
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        const Queries at = tile.queries(n, a.group);
        const int stage = n % STAGES;
        const u32 q_tile = q_tiles + stage * STEP_BYTES, dout_tile = dout_tiles + stage * STEP_BYTES;
        const u32 ds_tile = ds_tiles + n % 2 * WEIGHTS_BYTES;
        float x[STEP_16][2 * OWN_16][4];
        multiply_rows<STEP, OWN, STEP_16, OWN_16>(x, moved<STEP>(straight(weighs ? q_tile : dout_tile), step_row, 0),
                                                  moved<OWN>(crossed(weighs ? k_tile : v_tile), own, 0));
        const Logits logits = {a, tile.s, dbias, dbias_strides, at.head, at.i + step_row, tile.first + own,
                               stats_tiles + (stage * STEP + step_row) * STATS_BYTES};
        const bool hides = logits.partial(STEP, at.i, OWN, tile.first);
        if (weighs) {
#pragma unroll
            for (int m = 0; m < STEP_16; ++m) {
                logits.weigh<STEP, OWN_16>(x[m], 16 * m, p_tile, bend_tile, step_row, own, hides);
                if (m == STEP_16 / 2 - 1) bar_arrive(9 + rank, 64);
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
}
