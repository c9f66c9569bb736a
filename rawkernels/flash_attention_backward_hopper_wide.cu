// flash_attention_backward_hopper.cu for head sizes above 128: smaller tiles, and a warpgroup has half of the columns.
// Constants: scalar = f16, bf16; WIDTH = 256 (both head sizes rounded up)
// Launch:    grid = (min(key tiles, SMs),), block = (384,), shared = SHARED bytes
// Arch: sm_90a
//
// A tile is 64 keys, a step 64 queries: of dk and dv more do not fit in registers. The first warpgroup computes
// P^T = exp2(K Q^T c - lse), the second dP^T = V dO^T meanwhile, and dS^T = P^T (dP^T - delta) from the rounded P^T.
// Both pass through shared memory; then each warpgroup has half of the columns of dV += P^T dO, dK += dS^T Q, dQ = dS K.
#include "common/attention_backward_hopper.cuh"
#include "common/backward_pipeline_hopper.cuh"

static_assert(WIDTH == 256, "flash_attention_backward_hopper_wide.cu: WIDTH is 256");
constexpr int HALF = WIDTH / 2, SLABS = HALF / 64;  // columns of a warpgroup
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
    init_barriers(m);

    if (warpgroup() == 0) {  // ---- producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) load_keys_and_queries(m, a, k_map, q_map, lse, plan, counter, tiles, row_blocks, q_map);
        if (threadIdx.x == 32) load_values_and_gradients(m, a, v_map, dout_map, delta, row_blocks);
    } else {  // ---- consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int w = warpgroup() - 1, thread = threadIdx.x % 128, warp_row = thread / 32 * 16;
        const float scale_log2 = a.scale * LOG2_E;
        Ring ring;
        for (int round = 0;; ++round) {
            mbar_wait(m.k_full, round & 1);
            const int first = field(m.tile, FIRST), keys = field(m.tile, KEYS);
            if (first < 0) break;
            mbar_wait(m.v_full, round & 1);
            if ((a.cu_q || a.key_lengths) && first + BN > keys) clear_rows(m, keys - first);
            const int shift = first + field(m.tile, SHIFT);  // the query that stands at the tile's first key
            const int steps = field(m.tile, BLOCKS) * a.group;
            int block = field(m.tile, START), head = field(m.tile, HEAD) * a.group;
            float dk_sum[HALF / 2], dv_sum[HALF / 2];
#pragma unroll
            for (int i = 0; i < HALF / 2; ++i) dk_sum[i] = dv_sum[i] = 0.f;

            u32 stage_before = 0;
#pragma unroll 1
            for (int i = 0; i < steps; ++i, ring.next()) {
                const u32 q = m.q + ring.stage * Q_BYTES, grad = m.grad + ring.stage * Q_BYTES;
                const u32 p_tile = m.ds + (1 + ring.stage) * P_BYTES;
                float st[32];  // S^T or dP^T
                mbar_wait((w ? m.grad_full : m.q_full) + 8 * ring.stage, ring.parity);
                hold(st); wgmma_fence();
                product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(st, w ? m.v : m.k, w ? grad : q);
                wgmma_commit(); wgmma_wait<0>(); hold(st);  // and dK of the last step
                if (i) release(m.q_empty + 8 * stage_before);

                const u32 column = 8 * (thread % 4);
                if (w == 0) {
                    const bool masked = first + BN > keys || shift + BN - 1 > block * BM + a.right
                                        || shift < block * BM + BM - 1 - a.left;
                    u32 p[4][4];
#pragma unroll
                    for (int n = 0; n < 32; n += 4) {
                        const float2 x = load_shared_float2(m.lse + ring.stage * ROWS_BYTES + 32 * (n >> 2) + column);
#pragma unroll
                        for (int e = 0; e < 4; ++e) st[n + e] = exp2_fast(st[n + e] * scale_log2 - (e % 2 ? x.y : x.x));
                    }
                    if (masked) {
#pragma unroll
                        for (int n = 0; n < 32; ++n) {
                            const int row = fragment_row(n), at = shift + row - block * BM - fragment_column(n);
                            if (at > a.right || at < -a.left || first + row >= keys) st[n] = 0.f;
                        }
                    }
                    pack(p, st);
                    store_tile<BN>(p_tile, warp_row, p);
                    fence_async_proxy();
                }
                bar_sync(ALL, CONSUMERS);  // P^T is there
                mbar_wait(m.grad_full + 8 * ring.stage, ring.parity);
                hold(dv_sum); wgmma_fence();
                product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dv_sum, p_tile, grad + w * SLABS * BM * 128, true);
                wgmma_commit();
                if (w == 1) {
                    u32 p[4][4], ds[4][4];
                    load_fragment<BN>(p, p_tile, warp_row);
#pragma unroll
                    for (int n = 0; n < 32; n += 4) {
                        const float2 x = load_shared_float2(m.delta + ring.stage * ROWS_BYTES + 32 * (n >> 2) + column);
#pragma unroll
                        for (int e = 0; e < 4; e += 2) {
                            const u32 pair = p[n / 8][n / 4 % 2 * 2 + e / 2];
                            ds[n / 8][n / 4 % 2 * 2 + e / 2] = pack_pair(scalar(), unrounded(pair, 0) * (st[n + e] - x.x),
                                                                         unrounded(pair, 1) * (st[n + e + 1] - x.y));
                        }
                    }
                    store_tile<BN>(m.ds, warp_row, ds);
                    fence_async_proxy();
                }
                bar_sync(ALL, CONSUMERS);  // dS^T is there
                float dq[HALF / 2];
                mbar_wait(m.q_full + 8 * ring.stage, ring.parity);
                hold(dq); wgmma_fence();
                product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, m.ds, m.k + w * SLABS * BN * 128);
                wgmma_commit();
                hold(dk_sum); wgmma_fence();
                product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dk_sum, m.ds, q + w * SLABS * BM * 128, true);
                wgmma_commit();
                wgmma_wait<1>(); hold(dq); hold(dv_sum);  // dK runs into the next step
                release(m.grad_empty + 8 * ring.stage);
                stage_before = ring.stage;

                const long long part = ((long long)head * row_blocks + field(m.tile, ROW_BLOCK) + block) * 2 + w;
                add_to_memory(dq_sum + part * (BM * HALF) + thread * 4, dq);
                if (++block == field(m.tile, BEGIN) + field(m.tile, BLOCKS)) block = field(m.tile, BEGIN);
                if (block == field(m.tile, START)) ++head;
            }

            wgmma_wait<0>(); hold(dv_sum); hold(dk_sum);
            if (steps) release(m.q_empty + 8 * stage_before);
            // dV and dK leave through the values and the keys
            const int kv_head = field(m.tile, HEAD), batch = field(m.tile, BATCH), at = field(m.tile, KEY_ROW);
            const int key_rows = field(m.tile, KEY_ROWS) - first;
            const bool whole = !a.cu_q || key_rows >= BN;
            u32 values[HALF / 16][4], rounded[HALF / 16][4];
            pack(values, dv_sum);
#pragma unroll
            for (int i = 0; i < HALF / 2; ++i) dk_sum[i] *= a.scale;
            pack(rounded, dk_sum);
            bar_sync(ALL, CONSUMERS);  // nobody reads them any more, nor the tile
            if (whole) {
                store_tile<BN>(m.v + w * SLABS * BN * 128, warp_row, values);
                store_tile<BN>(m.k + w * SLABS * BN * 128, warp_row, rounded);
                fence_async_proxy();
                bar_sync(OWN + w, 128);
                if (thread == 0) {
                    for (int c = w * SLABS; c < (w + 1) * SLABS; ++c) {
                        tma_store(dv_map, m.v + c * BN * 128, 64 * c, at, kv_head, batch);
                        tma_store(dk_map, m.k + c * BN * 128, 64 * c, at, kv_head, batch);
                    }
                    bulk_commit();
                    bulk_wait_read();
                }
                bar_sync(OWN + w, 128);
            } else {
                store_rows(dv + at * a.dv.row + kv_head * a.dv.head, a.dv, key_rows, w * HALF, a.value_dim, values);
                store_rows(dk + at * a.dk.row + kv_head * a.dk.head, a.dk, key_rows, w * HALF, a.head_dim, rounded);
            }
            release(m.k_empty);
            release(m.v_empty);
        }
        if (thread == 0) bulk_wait();
    }
}
