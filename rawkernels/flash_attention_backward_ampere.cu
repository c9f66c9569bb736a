// The gradient of attention on tensor cores by mma.sync (sm_80 and up): delta and lse by rows; then a block keeps OWN
// keys, dk and dv on chip and visits the queries that see them, STEP at a time, adding dq to float32 in global memory;
// then dq is rounded. Without atomics dq has a kernel of its own, that keeps OWN queries and visits keys.
// Dao, "FlashAttention-2" (2023). Design and figures: notes/ampere-backward.md.
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 128; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = false
// Constants: scalar = f16, bf16; HEAD_DIM = 64; OWN = 128; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 1; EXTRAS = true
// Constants: scalar = f16, bf16; HEAD_DIM = 128; OWN = 128; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = false, true
// Constants: scalar = bf16; HEAD_DIM = 96; OWN = 128; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 192; OWN = 64; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = true
// Constants: scalar = f16; HEAD_DIM = 256; OWN = 64; STEP = 64; WARPS = 8; STAGES = 2; DS_TILES = 2; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 128; OWN = 64; STEP = 64; WARPS = 8; STAGES = 1; DS_TILES = 1; EXTRAS = true
// Constants: scalar = bf16; HEAD_DIM = 256; OWN = 32; STEP = 32; WARPS = 4; STAGES = 1; DS_TILES = 1; EXTRAS = true
//   (both head sizes rounded up; gpuattn/ops/attention_ampere_backward.py: TILES; EXTRAS: softcap, bias, slopes, dropout)
// Launch:    rows, dq_store: grid = (ceil(longest queries / 16) * sequences,), block = (256,)
//            dkv: grid = (ceil(longest keys / OWN) * KV heads * sequences,), block = (32 WARPS,), shared = DKV_BYTES
//            dq: grid = (ceil(longest queries / OWN) * heads * sequences,), block = (32 WARPS,), shared = DQ_BYTES
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/attention_backward_mma.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int OWN_WARPS = OWN >= 64 ? OWN / 32 : 2, STEP_WARPS = WARPS / OWN_WARPS;  // the logits of a step, shared out
constexpr int OWN_16 = OWN / 16 / OWN_WARPS, STEP_16 = STEP / 16 / STEP_WARPS;       // 16s of rows of a warp
constexpr int WIDTH_16 = HEAD_DIM / 16 / STEP_WARPS;                                 // 16s of columns of its dk and dv
constexpr int DQ_ACROSS = HEAD_DIM / 16 % (32 * WARPS / STEP) == 0 ? 32 * WARPS / STEP : 2, DQ_WARPS = WARPS / DQ_ACROSS;
constexpr int DQ_16 = STEP / 16 / DQ_WARPS, DQ_WIDTH_16 = HEAD_DIM / 16 / DQ_ACROSS;  // of its part of a step's dq
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;
constexpr int OWN_BYTES = OWN * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES;
constexpr int WEIGHTS_BYTES = STEP * ((OWN + 63) / 64 * 128), DS_BYTES = OWN * ((STEP + 63) / 64 * 128);
constexpr int DKV_BYTES = 2 * OWN_BYTES + STAGES * (2 * STEP_BYTES + STEP * STATS_BYTES) + (1 + DS_TILES) * WEIGHTS_BYTES;
constexpr int DQ_BYTES = 2 * OWN_BYTES + STAGES * 2 * STEP_BYTES + DS_BYTES + OWN * STATS_BYTES;
constexpr int UNIT = 16;  // queries: the grain of stats and dq_sum
constexpr int ROWS_THREADS = 256, ROWS_LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;
static_assert(STEP_16 > 0 && DQ_16 > 0 && STEP_WARPS <= 4 && DQ_ACROSS <= 4 && HEAD_DIM / 16 % STEP_WARPS == 0 &&
              HEAD_DIM / 16 % DQ_ACROSS == 0, "flash_attention_backward_ampere.cu: OWN, STEP and WARPS do not share out");

// ---- stats (H, rows, 2) and dq_sum (rows / UNIT, H, HEAD_DIM / 8 accumulators of mma): sequences start at units
__device__ __forceinline__ long long first_row(const Attention& a, const Sequence& s) {
    return UNIT * (a.cu_q ? s.first_query / UNIT + s.number : (long long)s.number * ((a.queries + UNIT - 1) / UNIT));
}
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
    long long rows) {
    const int units = (a.queries + UNIT - 1) / UNIT, first = blockIdx.x % units * UNIT;
    const Sequence s = find_sequence(a, blockIdx.x / units);
    if (first >= s.queries) return;
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

// ---- tiles
// Start to copy `count` rows (at most ROWS) of `width` columns, from `row0` on; zeros fill the rest of the tile.
template <int ROWS>
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
// The accumulators of a warp's rows, times `factor`, into a tile of OWN rows; then all of it to global memory.
__device__ __forceinline__ void put_tile(u32 tile, int row, int across, float factor, float (&d)[OWN_16][2 * WIDTH_16][4]) {
#pragma unroll
    for (int m = 0; m < OWN_16; ++m)
#pragma unroll
        for (int n = 0; n < 2 * WIDTH_16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) d[m][n][e] *= factor;
            store_fragment<OWN>(tile, row + 16 * m, 16 * (across + STEP_WARPS * (n / 2)) + n % 2 * 8, d[m][n]);
        }
}
__device__ __forceinline__ void store_tile(u32 tile, scalar* x, const Strides& t, const Sequence& s, long long row0,
                                           int head, int count, int width) {
    scalar* rows = x + s.number * t.batch + row0 * t.row + head * t.head;
    const int chunk = threadIdx.x % 8;
    for (int row = threadIdx.x / 8; row < min(count, OWN); row += THREADS / 8)
#pragma unroll
        for (int column = 0; column < HEAD_DIM; column += 64)
            if (column + 8 * chunk < width) {
                const u32 source = chunk_address<OWN>(tile, row, column / 8 + chunk);
                *(uint4*)(rows + row * t.row + column + 8 * chunk) = load_shared_16(source);
            }
}

__device__ __forceinline__ const float* stats_of(const Attention& a, const Sequence& s, const float* stats, long long rows,
                                                 int head, int i) {
    return stats + STATS_BYTES / 4 * (head * rows + first_row(a, s) + i);
}

// dq of the queries from `i` on: ds (queries, keys) k, added to what other keys add
__device__ __forceinline__ void add_dq(const Attention& a, const Sequence& s, u32 ds, u32 k, float* dq_sum,
                                       int head, int i) {
    const int warp = threadIdx.x / 32, rows = warp / DQ_ACROSS * DQ_16 * 16, across = warp % DQ_ACROSS;
    float dq[DQ_16][2 * DQ_WIDTH_16][4] = {};
    add_product<false, OWN, STEP, DQ_ACROSS, DQ_16, DQ_WIDTH_16>(
        dq, moved<STEP>(straight(ds), rows, 0), moved<OWN>(straight(k), 0, 16 * across));
#pragma unroll
    for (int m = 0; m < DQ_16; ++m) {
        const int at = i + rows + 16 * m;
        if (at >= s.queries) break;
        float* unit = dq_unit(a, dq_sum, first_row(a, s) + at, head);
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
    float* __restrict__ dq_sum,           // of zeros, or null
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

    const int warp = threadIdx.x / 32, own = warp / STEP_WARPS * OWN_16 * 16, across = warp % STEP_WARPS;
    const int step_row = across * STEP_16 * 16;
    const u32 k_tile = shared_tiles(), v_tile = k_tile + OWN_BYTES, q_tiles = v_tile + OWN_BYTES;
    const u32 dout_tiles = q_tiles + STAGES * STEP_BYTES, p_tile = dout_tiles + STAGES * STEP_BYTES;
    const u32 ds_tiles = p_tile + WEIGHTS_BYTES, stats_tiles = ds_tiles + DS_TILES * WEIGHTS_BYTES;

    const auto load_step = [&](int n) {
        const int head = kv_head * a.group + n / per_head, i = begin + n % per_head * STEP, stage = n % STAGES;
        const long long at = s.first_query + i;
        load_tile<STEP>(q_tiles + stage * STEP_BYTES, q, a.q, s, at, head, s.queries - i, a.head_dim);
        load_tile<STEP>(dout_tiles + stage * STEP_BYTES, dout, a.dout, s, at, head, s.queries - i, a.value_dim);
        load_stats(stats_tiles + stage * STEP * STATS_BYTES, stats_of(a, s, stats, rows, head, i), STEP, s.queries - i);
    };
    const long long at = s.first_key + first;
    load_tile<OWN>(k_tile, k, a.k, s, at, kv_head, s.keys - first, a.head_dim);
    load_tile<OWN>(v_tile, v, a.v, s, at, kv_head, s.keys - first, a.value_dim);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    float dk_sum[OWN_16][2 * WIDTH_16][4] = {}, dv_sum[OWN_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n <= steps; ++n) {
        // after this barrier the last step's ds are there, and nobody reads the tiles of that step any more
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();
        const int next = n + STAGES - 1;
        if (next < steps) load_step(next);
        cp_async_commit();
        if (dq_sum && n > 0)
            add_dq(a, s, ds_tiles + (n - 1) % DS_TILES * WEIGHTS_BYTES, k_tile, dq_sum,
                   kv_head * a.group + (n - 1) / per_head, begin + (n - 1) % per_head * STEP);
        if (n == steps) break;
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        const int i = begin + n % per_head * STEP, stage = n % STAGES;
        const u32 q_tile = q_tiles + stage * STEP_BYTES, dout_tile = dout_tiles + stage * STEP_BYTES;
        const u32 ds_tile = ds_tiles + n % DS_TILES * WEIGHTS_BYTES;
        const Logits logits = {a, s, dbias, dbias_strides, kv_head * a.group + n / per_head, i + step_row,
                               first + own, stats_tiles + (stage * STEP + step_row) * STATS_BYTES};
        float x[STEP_16][2 * OWN_16][4], dp[STEP_16][2 * OWN_16][4];
        logits.compute<STEP, OWN, STEP_16, OWN_16>(
            x, dp, moved<STEP>(straight(q_tile), step_row, 0), moved<STEP>(straight(dout_tile), step_row, 0),
            moved<OWN>(crossed(k_tile), own, 0), moved<OWN>(crossed(v_tile), own, 0), logits.partial(STEP, i, OWN, first));
        if (STAGES == 2 && DS_TILES == 1) __syncthreads();  // until the last ds have been read
        store_weights<STEP>(p_tile, step_row, own, x);
        store_weights<STEP>(ds_tile, step_row, own, dp);
        bar_sync(1 + warp / STEP_WARPS, 32 * STEP_WARPS);   // the warps of the same keys
        add_product<true, STEP, STEP, STEP_WARPS, OWN_16, WIDTH_16>(
            dv_sum, moved<STEP>(crossed(p_tile), 0, own), moved<STEP>(straight(dout_tile), 0, 16 * across));
        add_product<true, STEP, STEP, STEP_WARPS, OWN_16, WIDTH_16>(
            dk_sum, moved<STEP>(crossed(ds_tile), 0, own), moved<STEP>(straight(q_tile), 0, 16 * across));
    }

    cp_async_wait<0>();
    __syncthreads();
    put_tile(k_tile, own, across, a.scale, dk_sum);
    put_tile(v_tile, own, across, 1.f, dv_sum);
    __syncthreads();
    const int count = s.key_rows - first;
    store_tile(k_tile, dk, a.dk, s, at, kv_head, count, a.head_dim);
    store_tile(v_tile, dv, a.dv, s, at, kv_head, count, a.value_dim);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flash_attention_dq(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ stats,      // as flash_attention_rows leaves them
    long long rows,
    scalar* __restrict__ dq) {            // (B, T, H, D)
    const int tiles = (a.queries + OWN - 1) / OWN, first = blockIdx.x % tiles * OWN, head = blockIdx.x / tiles % a.heads;
    const Sequence s = find_sequence(a, blockIdx.x / tiles / a.heads);
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
        load_tile<STEP>(k_tiles + stage * STEP_BYTES, k, a.k, s, at, kv_head, s.keys - j, a.head_dim);
        load_tile<STEP>(v_tiles + stage * STEP_BYTES, v, a.v, s, at, kv_head, s.keys - j, a.value_dim);
    };
    const long long at = s.first_query + first;
    load_tile<OWN>(q_tile, q, a.q, s, at, head, s.queries - first, a.head_dim);
    load_tile<OWN>(dout_tile, dout, a.dout, s, at, head, s.queries - first, a.value_dim);
    load_stats(stats_tile, stats_of(a, s, stats, rows, head, first), OWN, s.queries - first);
    if (STAGES == 2 && steps > 0) load_step(0);
    cp_async_commit();

    const Strides none = {};
    float dq_sum[OWN_16][2 * WIDTH_16][4] = {};
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        if (STAGES == 2) cp_async_wait<0>();
        __syncthreads();  // nobody reads the last step's tiles any more
        const int next = n + STAGES - 1;
        if (next < steps) load_step(next);
        cp_async_commit();
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        const int j = begin + n * STEP, stage = n % STAGES;
        const u32 k_tile = k_tiles + stage * STEP_BYTES, v_tile = v_tiles + stage * STEP_BYTES;
        const Logits logits = {a, s, nullptr, none, head, first + own, j + step_row, stats_tile + own * STATS_BYTES};
        float x[OWN_16][2 * STEP_16][4], ds[OWN_16][2 * STEP_16][4];
        logits.compute<OWN, STEP, OWN_16, STEP_16>(
            x, ds, moved<OWN>(straight(q_tile), own, 0), moved<OWN>(straight(dout_tile), own, 0),
            moved<STEP>(crossed(k_tile), step_row, 0), moved<STEP>(crossed(v_tile), step_row, 0),
            logits.partial(OWN, first, STEP, j));
        store_weights<OWN>(ds_tile, own, step_row, ds);
        bar_sync(1 + warp / STEP_WARPS, 32 * STEP_WARPS);   // the warps of the same queries
        add_product<false, STEP, OWN, STEP_WARPS, OWN_16, WIDTH_16>(
            dq_sum, moved<OWN>(straight(ds_tile), own, 0), moved<STEP>(straight(k_tile), 0, 16 * across));
    }

    cp_async_wait<0>();
    __syncthreads();
    put_tile(q_tile, own, across, a.scale, dq_sum);
    __syncthreads();
    store_tile(q_tile, dq, a.dq, s, at, head, s.queries - first, a.head_dim);
}
