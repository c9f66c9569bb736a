// flash_attention_backward_hopper.cu for head sizes above 128: smaller tiles, and a warpgroup has half of the columns.
// Constants: scalar = f16, bf16; WIDTH = 256 (of tiles); SIZE = 192, 256 (both head sizes rounded up)
// Launch:    grid = (min(key tiles, SMs),), block = (384,), shared = SHARED bytes
// Arch: sm_90a
//
// A tile is 64 keys, a step 64 queries: of dk and dv more do not fit in registers. The first warpgroup computes
// P^T = exp2(K Q^T c - lse), the second dP^T = V dO^T meanwhile, and dS^T = P^T (dP^T - delta) from the rounded P^T.
// Both pass through shared memory; then each warpgroup has half of the columns of dV += P^T dO, dK += dS^T Q, dQ = dS K.
// Adding dq to memory is in the way of all that a multiprocessor loads and stores: it goes in two parts, each beside
// products of the step or the next, and what the next step reads first is in registers before.
#include "attention/common/attention_backward_hopper.cuh"
#include "attention/common/backward_pipeline_hopper.cuh"

static_assert(WIDTH == 256 && (SIZE == 192 || SIZE == 256), "flash_attention_backward_hopper_wide.cu: too wide");
constexpr int HALF = WIDTH / 2;  // columns of a warpgroup; the second has fewer where SIZE is less
constexpr int P_BYTES = BN * BM * 2;
[[maybe_unused]] constexpr int SHARED = 2048 + 2 * STAGES * (Q_BYTES + ROWS_BYTES) + 2 * K_BYTES + 3 * P_BYTES;

// A packed fragment of 64 x 64 numbers back from a tile of ROWS rows: what store_tile wrote.
template <int ROWS> __device__ __forceinline__ void load_fragment(u32 (&p)[4][4], u32 tile, int row0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; ++k) ldmatrix(p[k], chunk_address<ROWS>(tile, row0 + (lane & 15), 2 * k + (lane >> 4)));
}
__device__ __forceinline__ float unrounded(u32 pair, int half) {
    scalar x;
    x.bits = (unsigned short)(pair >> 16 * half);
    return (float)x;
}
__device__ __forceinline__ void load_rows(float2 (&x)[8], u32 from) {  // lse or delta of a step
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = load_shared_float2(from + 32 * i + 8 * (threadIdx.x % 4));
}

// A tile of keys, and the step that is next.
struct Place {
    int first, keys, shift, block, head;  // shift: the query that stands at the tile's first key
    __device__ __forceinline__ void next(u32 tile) {
        if (++block == field(tile, BEGIN) + field(tile, BLOCKS)) block = field(tile, BEGIN);
        if (block == field(tile, START)) ++head;
    }
};
// P^T of a step into its tile.
__device__ __forceinline__ void store_weights(const Attention& a, const Place& at, float (&st)[32], const float2 (&lse)[8],
                                              u32 tile) {
    const float scale_log2 = a.scale * LOG2_E;
    const int query = at.block * BM;
#pragma unroll
    for (int n = 0; n < 32; ++n) st[n] = exp2_fast(st[n] * scale_log2 - (n % 2 ? lse[n / 4].y : lse[n / 4].x));
    if (at.first + BN > at.keys || at.shift + BN - 1 > query + a.right || at.shift < query + BM - 1 - a.left) {
#pragma unroll
        for (int n = 0; n < 32; ++n) {
            const int row = fragment_row(n), distance = at.shift + row - query - fragment_column(n);
            if (distance > a.right || distance < -a.left || at.first + row >= at.keys) st[n] = 0.f;
        }
    }
    u32 p[4][4];
    pack(p, st);
    store_tile<BN>(tile, threadIdx.x % 128 / 32 * 16, p);
    fence_async_proxy();
}
// dS^T from P^T in a tile and dP^T.
__device__ __forceinline__ void store_gradients(const float (&dst)[32], const float2 (&delta)[8], u32 p_tile, u32 tile) {
    const int row0 = threadIdx.x % 128 / 32 * 16;
    u32 p[4][4], ds[4][4];
    load_fragment<BN>(p, p_tile, row0);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const u32 pair = p[n / 4][n % 4];
        const float2 x = delta[n / 2];
        ds[n / 4][n % 4] = pack_pair(scalar(), unrounded(pair, 0) * (dst[2 * n] - x.x),
                                     unrounded(pair, 1) * (dst[2 * n + 1] - x.y));
    }
    store_tile<BN>(tile, row0, ds);
    fence_async_proxy();
}
// A warpgroup's columns of dV and dK leave through the values and the keys.
template <int W, int R>
__device__ __forceinline__ void store_sums(const Shared& m, const Attention& a, u32 tile, const TensorMap& dk_map,
                                           const TensorMap& dv_map, scalar* dk, scalar* dv, float (&dk_sum)[R],
                                           const float (&dv_sum)[R]) {
    constexpr int FIRST_SLAB = W * HALF / 64;
    const int thread = threadIdx.x % 128, warp_row = thread / 32 * 16;
    const int kv_head = field(tile, HEAD), batch = field(tile, BATCH), at = field(tile, KEY_ROW);
    const int key_rows = field(tile, KEY_ROWS) - field(tile, FIRST);
    const bool whole = !a.cu_q || key_rows >= BN;
    u32 values[R / 8][4], rounded[R / 8][4];
    pack(values, dv_sum);
#pragma unroll
    for (int i = 0; i < R; ++i) dk_sum[i] *= a.scale;
    pack(rounded, dk_sum);
    bar_sync(ALL, CONSUMERS);  // nobody reads them any more, nor the tile
    if (whole) {
        store_tile<BN>(m.v + FIRST_SLAB * BN * 128, warp_row, values);
        store_tile<BN>(m.k + FIRST_SLAB * BN * 128, warp_row, rounded);
        fence_async_proxy();
        bar_sync(OWN + W, 128);
        if (thread == 0) {
            for (int c = FIRST_SLAB; c < FIRST_SLAB + R / 32; ++c) {
                tma_store(dv_map, m.v + c * BN * 128, 64 * c, at, kv_head, batch);
                tma_store(dk_map, m.k + c * BN * 128, 64 * c, at, kv_head, batch);
            }
            bulk_commit();
            bulk_wait_read();
        }
        bar_sync(OWN + W, 128);
    } else {
        store_rows(dv + at * a.dv.row + kv_head * a.dv.head, a.dv, key_rows, W * HALF, a.value_dim, values);
        store_rows(dk + at * a.dk.row + kv_head * a.dk.head, a.dk, key_rows, W * HALF, a.head_dim, rounded);
    }
    release(m.k_empty);
    release(m.v_empty);
}

// What the W-th of the warpgroups that compute does.
template <int W> __device__ __forceinline__ void compute(const Shared& m, const Attention& a, const TensorMap& dk_map,
                                                         const TensorMap& dv_map, scalar* dk, scalar* dv, float* dq_sum,
                                                         int row_blocks) {
    constexpr int COLUMNS = SIZE - W * HALF < HALF ? SIZE - W * HALF : HALF;
    const u32 columns = W * HALF * 64 * 2;  // where they begin in tiles of 64 rows
    const u32 own = W ? m.v : m.k, stream = W ? m.grad : m.q, rows_of_steps = W ? m.delta : m.lse;
    const u32 full = W ? m.grad_full : m.q_full;  // of what it multiplies by its values or keys
    Ring ring;
    for (int round = 0;; ++round) {
        const u32 tile = tile_of(m, round);
        mbar_wait(m.tile_full + 8 * (round & 1), round / 2 & 1);
        Place place = {field(tile, FIRST), field(tile, KEYS)};
        if (place.first < 0) break;
        mbar_wait(m.k_full, round & 1);
        mbar_wait(m.v_full, round & 1);
        if ((a.cu_q || a.key_lengths) && place.first + BN > place.keys) clear_rows(m, place.keys - place.first);
        place.shift = place.first + field(tile, SHIFT);
        place.block = field(tile, START);
        place.head = field(tile, HEAD) * a.group;
        int left = field(tile, BLOCKS) * a.group;
        float dk_sum[COLUMNS / 2], dv_sum[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) dk_sum[i] = dv_sum[i] = 0.f;

        float st[32];  // S^T or dP^T
        float2 rows[8];
        if (left) mbar_wait(full + 8 * ring.stage, ring.parity);
        hold(st); wgmma_fence();
        product<K_MAJOR, K_MAJOR, BN, BM, SIZE>(st, own, stream + ring.stage * Q_BYTES);
        wgmma_commit(); wgmma_wait<0>(); hold(st);
        load_rows(rows, rows_of_steps + ring.stage * ROWS_BYTES);
#pragma unroll 1
        for (; left > 0; --left, place.next(tile)) {
            const u32 stage = ring.stage, p_tile = m.ds + (1 + stage) * P_BYTES;
            const long long part = ((long long)place.head * row_blocks + field(tile, ROW_BLOCK) + place.block) * 2 + W;
            float* to = dq_sum + part * (BM * HALF) + threadIdx.x % 128 * 4;
            if (W == 0) store_weights(a, place, st, rows, p_tile);
            bar_sync(ALL, CONSUMERS);  // P^T is there
            mbar_wait(m.grad_full + 8 * stage, ring.parity);
            hold(dv_sum); wgmma_fence();
            product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dv_sum, p_tile, m.grad + stage * Q_BYTES + columns, true);
            wgmma_commit();
            if (W == 1) store_gradients(st, rows, p_tile, m.ds);
            bar_sync(ALL, CONSUMERS);  // dS^T is there
            float dq[32];  // 64 columns at a time: there are no registers for more
            mbar_wait(m.q_full + 8 * stage, ring.parity);
            hold(dq); wgmma_fence();
            product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, m.ds, m.k + columns);
            wgmma_commit();
            hold(dk_sum); wgmma_fence();
            product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dk_sum, m.ds, m.q + stage * Q_BYTES + columns, true);
            wgmma_commit();
            wgmma_wait<1>(); hold(dq);  // dV is there too, dK runs
            release(m.grad_empty + 8 * stage);
            add_to_memory(to, dq);
            if (COLUMNS > 64) {
                hold(dq); wgmma_fence();
                product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, m.ds, m.k + columns + BN * 128);
                wgmma_commit();
            }
            ring.next();
            // behind the last step a product of whatever is there: ptxas serialises all of them for a branch
            if (left > 1) mbar_wait(full + 8 * ring.stage, ring.parity);
            hold(st); wgmma_fence();
            product<K_MAJOR, K_MAJOR, BN, BM, SIZE>(st, own, stream + ring.stage * Q_BYTES);
            wgmma_commit();
            wgmma_wait<1>(); hold(dq);  // dK is there too, the next step's product runs
            load_rows(rows, rows_of_steps + ring.stage * ROWS_BYTES);  // before what follows is in the way
            release(m.q_empty + 8 * stage);
            if (COLUMNS > 64) add_to_memory(to + 32 * 128, dq);
            wgmma_wait<0>(); hold(st);
        }
        wgmma_wait<0>(); hold(dv_sum); hold(dk_sum);
        store_sums<W>(m, a, tile, dk_map, dv_map, dk, dv, dk_sum, dv_sum);
    }
    if (threadIdx.x % 128 == 0) bulk_wait();
}

extern "C" __global__ void __launch_bounds__(384, 1) flash_attention_backward_wide(
    const __grid_constant__ TensorMap q_map,     // (B, T, H, D) or (tokens, H, D); boxes of BM rows
    const __grid_constant__ TensorMap dout_map,  // (B, T, H, Dv); boxes of BM rows
    const __grid_constant__ TensorMap k_map,     // (B, S, Hk, D); boxes of BN rows
    const __grid_constant__ TensorMap v_map,     // (B, S, Hk, Dv); boxes of BN rows
    const __grid_constant__ TensorMap dk_map,    // like k; boxes of 64 rows
    const __grid_constant__ TensorMap dv_map,    // like v; boxes of 64 rows
    const __grid_constant__ Attention a,
    const float* lse,                            // (H, row_blocks, BM), times log2 e; inf: a row without keys or queries
    const float* delta,                          // (H, row_blocks, BM)
    float* dq_sum,                               // (H, row_blocks, BM * WIDTH) in the order of fragments, zeros before
    scalar* dk,                                  // where dk_map points
    scalar* dv,
    const Tile* plan,                            // (tiles + 1,)
    int* counter,                                // 0
    int tiles,
    int row_blocks) {
    const Shared m = shared_layout();  // dS^T at ds, two tiles of P^T behind it
    init_barriers(m, CONSUMERS / 32);

    if (warpgroup() == 0) {  // ---- producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) load_all<true>(m, a, q_map, lse, k_map, plan, counter, tiles, row_blocks, q_map);
        if (threadIdx.x == 32) load_all<false>(m, a, dout_map, delta, v_map, plan, counter, tiles, row_blocks, q_map);
    } else if (warpgroup() == 1) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        compute<0>(m, a, dk_map, dv_map, dk, dv, dq_sum, row_blocks);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        compute<1>(m, a, dk_map, dv_map, dk, dv, dq_sum, row_blocks);
    }
}
