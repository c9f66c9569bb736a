// flash_attention_backward_hopper.cu for head sizes above 128: smaller tiles, and each warpgroup has half of the columns.
// Constants: scalar = f16, bf16; WIDTH = 256 (of tiles); SIZE = 192, 256 (both head sizes rounded up)
// Launch:    grid = (min(key tiles, SMs),), block = (384,), shared = SHARED bytes
// Arch: sm_90a
//
// A tile is 64 keys, a step 64 queries: registers have no room for more of dk and dv. The first consumer warpgroup computes
// P^T = exp2(K Q^T c - lse), the second at the same time dP^T = V dO^T, and then dS^T = P^T (dP^T - delta) from the rounded
// P^T. Both are exchanged through shared memory; then each warpgroup computes half of the columns of dV += P^T dO,
// dK += dS^T Q and dQ = dS K. Adding dq to global memory delays all other loads and stores of a multiprocessor. It is done
// in two parts, each overlapping with products, and the data that the next step reads first is loaded to registers before.
#include "attention/common/attention_backward_hopper.cuh"
#include "attention/common/backward_pipeline_hopper.cuh"

static_assert(WIDTH == 256 && (SIZE == 192 || SIZE == 256), "flash_attention_backward_hopper_wide.cu: SIZE is 192 or 256");
constexpr int HALF = WIDTH / 2;  // columns of a warpgroup; the second has fewer where SIZE is less
constexpr int P_BYTES = BN * BM * 2;
[[maybe_unused]] constexpr int SHARED = 2048 + 2 * STAGES * (Q_BYTES + ROWS_BYTES) + 2 * K_BYTES + 3 * P_BYTES;

// Loads a packed fragment of 64 x 64 numbers from a tile of ROWS rows, as store_tile wrote it.
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

// A step: a tile of keys with a block of queries of a head.
struct Step {
    int first, keys, shift, block, head;  // shift: the query at the position of the tile's first key
    __device__ __forceinline__ void next(u32 tile) {
        if (++block == field(tile, BEGIN) + field(tile, BLOCKS)) block = field(tile, BEGIN);
        if (block == field(tile, START)) ++head;
    }
};
// Computes P^T of a step and stores it to its tile.
__device__ __forceinline__ void store_weights(const Attention& a, const Step& at, float (&st)[32], const float2 (&lse)[8],
                                              u32 tile) {
    const float scale_log2 = a.scale * LOG2E;
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
// Computes dS^T from P^T in a tile and dP^T, and stores it to `tile`.
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
// Stores a warpgroup's columns of dV and dK, staged in the buffers of the values and the keys.
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
    bar_sync(ALL, CONSUMERS);  // keys, values and the tile's fields have been read
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

// Consumer warpgroup W.
template <int W> __device__ __forceinline__ void compute(const Shared& m, const Attention& a, const TensorMap& dk_map,
                                                         const TensorMap& dv_map, scalar* dk, scalar* dv, float* dq_sum,
                                                         int row_blocks) {
    constexpr int COLUMNS = SIZE - W * HALF < HALF ? SIZE - W * HALF : HALF;
    const u32 columns = W * HALF * 64 * 2;  // the offset of its columns in tiles of 64 rows
    const u32 own = W ? m.v : m.k, stream = W ? m.grad : m.q, rows_of_steps = W ? m.delta : m.lse;
    const u32 full = W ? m.grad_full : m.q_full;  // the full barriers of `stream`
    Ring ring;
    for (int round = 0;; ++round) {
        const u32 tile = tile_of(m, round);
        mbar_wait(m.tile_full + 8 * (round & 1), round / 2 & 1);
        Step current = {field(tile, FIRST), field(tile, KEYS)};
        if (current.first < 0) break;
        mbar_wait(m.k_full, round & 1);
        mbar_wait(m.v_full, round & 1);
        if ((a.cu_q || a.key_lengths) && current.first + BN > current.keys) clear_rows(m, current.keys - current.first);
        current.shift = current.first + field(tile, SHIFT);
        current.block = field(tile, START);
        current.head = field(tile, HEAD) * a.group;
        int left = field(tile, BLOCKS) * a.group;
        float dk_sum[COLUMNS / 2], dv_sum[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) dk_sum[i] = dv_sum[i] = 0.f;

        float st[32];  // S^T or dP^T
        float2 rows[8];
        if (left) mbar_wait(full + 8 * ring.stage, ring.parity);
        keep_live(st); wgmma_fence();
        product<K_MAJOR, K_MAJOR, BN, BM, SIZE>(st, own, stream + ring.stage * Q_BYTES);
        wgmma_commit(); wgmma_wait<0>(); keep_live(st);
        load_rows(rows, rows_of_steps + ring.stage * ROWS_BYTES);
#pragma unroll 1
        for (; left > 0; --left, current.next(tile)) {
            const u32 stage = ring.stage, p_tile = m.ds + (1 + stage) * P_BYTES;
            const long long part = ((long long)current.head * row_blocks + field(tile, ROW_BLOCK) + current.block) * 2 + W;
            float* to = dq_sum + part * (BM * HALF) + threadIdx.x % 128 * 4;
            if (W == 0) store_weights(a, current, st, rows, p_tile);
            bar_sync(ALL, CONSUMERS);  // P^T is complete
            mbar_wait(m.grad_full + 8 * stage, ring.parity);
            keep_live(dv_sum); wgmma_fence();
            product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dv_sum, p_tile, m.grad + stage * Q_BYTES + columns, true);
            wgmma_commit();
            if (W == 1) store_gradients(st, rows, p_tile, m.ds);
            bar_sync(ALL, CONSUMERS);  // dS^T is complete
            float dq[32];  // 64 columns at a time, for lack of registers
            mbar_wait(m.q_full + 8 * stage, ring.parity);
            keep_live(dq); wgmma_fence();
            product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, m.ds, m.k + columns);
            wgmma_commit();
            keep_live(dk_sum); wgmma_fence();
            product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dk_sum, m.ds, m.q + stage * Q_BYTES + columns, true);
            wgmma_commit();
            wgmma_wait<1>(); keep_live(dq);  // dV is complete too, dK still runs
            release(m.grad_empty + 8 * stage);
            add_to_memory(to, dq);
            if (COLUMNS > 64) {
                keep_live(dq); wgmma_fence();
                product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, m.ds, m.k + columns + BN * 128);
                wgmma_commit();
            }
            ring.next();
            // After the last step this product is computed and not used: with a branch ptxas would serialize all products.
            if (left > 1) mbar_wait(full + 8 * ring.stage, ring.parity);
            keep_live(st); wgmma_fence();
            product<K_MAJOR, K_MAJOR, BN, BM, SIZE>(st, own, stream + ring.stage * Q_BYTES);
            wgmma_commit();
            wgmma_wait<1>(); keep_live(dq);  // dK is complete too, the next step's product still runs
            release(m.q_empty + 8 * stage);  // before loads of the next stage, which it does not free
            load_rows(rows, rows_of_steps + ring.stage * ROWS_BYTES);  // before the additions to global memory
            if (COLUMNS > 64) add_to_memory(to + 32 * 128, dq);
            wgmma_wait<0>(); keep_live(st);
        }
        wgmma_wait<0>(); keep_live(dv_sum); keep_live(dk_sum);
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
    const float* lse,                            // (H, row_blocks, BM), times log2(e); inf for rows without keys or queries
    const float* delta,                          // (H, row_blocks, BM)
    float* dq_sum,                               // (H, row_blocks, BM * WIDTH) in the order of fragments; zeros
    scalar* dk,                                  // the array of dk_map
    scalar* dv,
    const Tile* plan,                            // (tiles + 1,)
    int* counter,                                // the next tile, or chain of tiles
    int tiles,
    int row_blocks) {
    const Shared m = shared_layout();  // dS^T at m.ds, two tiles of P^T after it
    init_barriers(m, CONSUMERS / 32 + 1, CONSUMERS / 32);

    if (warpgroup() == 0) {  // ---- producer
        decrease_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) load_all<true>(m, a, q_map, lse, k_map, plan, counter, tiles, row_blocks, q_map);
        if (threadIdx.x == 32) load_all<false>(m, a, dout_map, delta, v_map, plan, counter, tiles, row_blocks, q_map);
    } else if (warpgroup() == 1) {
        increase_registers<CONSUMER_REGISTERS>();
        compute<0>(m, a, dk_map, dv_map, dk, dv, dq_sum, row_blocks);
    } else {
        increase_registers<CONSUMER_REGISTERS>();
        compute<1>(m, a, dk_map, dv_map, dk, dv, dq_sum, row_blocks);
    }
}
