// The gradient of attention on Hopper, second of three launches: dk and dv by key tiles, dq summed in fp32.
// (first and third: flash_attention_backward_hopper_rows.cu)
// Constants: scalar = f16, bf16; WIDTH = 64, 128 (both head sizes rounded up)
// Launch:    grid = (min(key tiles, SMs),), block = (384,), shared = SHARED bytes
// Arch: sm_90a
//
// A block takes tiles of BN keys of one KV head from a counter, longest first. Keys and values stay in shared memory;
// queries, dout, lse and delta pass by. One thread loads; two warpgroups of 64 keys compute, everything transposed:
//   S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(S^T c - lse),  dS^T = P^T (dP^T - delta),
//   dV += P^T dO and dK += dS^T Q from registers,  dQ = dS K by way of shared memory.
// The product for dK runs on into the next step, while dQ is added to memory.
#include "common/attention_backward_hopper.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int HALVES = BM / 64, STAGES = 2, CONSUMERS = 256;
constexpr int Q_BYTES = BM * WIDTH * 2, K_BYTES = BN * WIDTH * 2, DS_BYTES = BN * BM * 2, ROWS_BYTES = BM * 4;
[[maybe_unused]] constexpr int SHARED = 1024 + 1024 + 4 * ROWS_BYTES + 2 * K_BYTES + 2 * STAGES * Q_BYTES + 2 * DS_BYTES;
enum { ALL = 1, OWN = 2 };  // named barriers: of all consumers; one per warpgroup

struct Shared {
    u32 q_full, q_empty, grad_full, grad_empty, k_full, k_empty, v_full, v_empty, tile;
    u32 lse, delta, k, v, q, grad, ds;
};
__device__ __forceinline__ Shared shared_layout() {
    Shared m;
    m.q_full = shared_base();
    m.q_empty = m.q_full + 8 * STAGES;
    m.grad_full = m.q_empty + 8 * STAGES;
    m.grad_empty = m.grad_full + 8 * STAGES;
    m.k_full = m.grad_empty + 8 * STAGES;
    m.k_empty = m.k_full + 8;
    m.v_full = m.k_full + 16;
    m.v_empty = m.k_full + 24;
    m.tile = m.k_full + 64;
    m.lse = m.q_full + 1024;
    m.delta = m.lse + 2 * ROWS_BYTES;
    m.k = m.lse + 4 * ROWS_BYTES;
    m.v = m.k + K_BYTES;
    m.q = m.v + K_BYTES;
    m.grad = m.q + STAGES * Q_BYTES;
    m.ds = m.grad + STAGES * Q_BYTES;
    return m;
}

__device__ __forceinline__ void load_tile(u32 tile, const TensorMap& map, u32 bar, int rows, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < WIDTH / 64; ++c) tma_load(tile + c * rows * 128, map, bar, 64 * c, row, head, batch);
}
__device__ __forceinline__ int field(u32 tile, int number) { return (int)load_shared(tile + 4 * number); }
enum { HEAD, FIRST, BATCH, KEY_ROW, KEYS, KEY_ROWS, SHIFT, QUERY_ROW, BEGIN, BLOCKS, ROW_BLOCK };  // of a Tile

// Ring of STAGES: the barrier of a step's stage, and the parity of its round.
__device__ __forceinline__ u32 stage_bar(u32 bars, int step) { return bars + 8 * (step % STAGES); }
__device__ __forceinline__ u32 parity(int step) { return step / STAGES & 1; }
__device__ __forceinline__ void release(u32 bar) { if (threadIdx.x % 32 == 0) mbar_arrive(bar); }  // once a warp

__device__ __forceinline__ void add_to_memory(float* to, const float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i += 4)
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to + i * 128), "f"(d[i]), "f"(d[i + 1]), "f"(d[i + 2]), "f"(d[i + 3]) : "memory");
}

// All queries of a tile with their lse, or dout with delta.
template <bool QUERIES>
__device__ __forceinline__ void load_steps(const Shared& m, const Attention& a, const TensorMap& map, const float* rows, int& step,
                                           int row_blocks) {
    for (int n = 0, head = field(m.tile, HEAD) * a.group; n < a.group; ++n, ++head)
        for (int block = field(m.tile, BEGIN), left = field(m.tile, BLOCKS); left > 0; --left, ++block, ++step) {
            const u32 stage = step % STAGES, full = (QUERIES ? m.q_full : m.grad_full) + 8 * stage;
            mbar_wait((QUERIES ? m.q_empty : m.grad_empty) + 8 * stage, parity(step) ^ 1);
            mbar_expect(full, Q_BYTES + ROWS_BYTES);
            load_tile((QUERIES ? m.q : m.grad) + stage * Q_BYTES, map, full, BM, field(m.tile, QUERY_ROW) + block * BM, head,
                      field(m.tile, BATCH));
            bulk_load((QUERIES ? m.lse : m.delta) + stage * ROWS_BYTES,
                      rows + (head * row_blocks + field(m.tile, ROW_BLOCK) + block) * BM, ROWS_BYTES, full);
        }
}

// The rows of a gradient that lie in its sequence, where a whole tile would write into the next one.
__device__ __forceinline__ void store_rows(scalar* to, const Strides& step, int rows, int columns, const u32 (&p)[WIDTH / 16][4]) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i += 2) {
        const int row = fragment_row(i), column = fragment_column(i);
        if (row < rows && column < columns) *(u32*)(to + row * step.row + column) = p[i / 8][i / 2 % 4];
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) flash_attention_backward(
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
    const Shared m = shared_layout();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(m.q_full + 8 * i, 1);
            mbar_init(m.grad_full + 8 * i, 1);
            mbar_init(m.q_empty + 8 * i, CONSUMERS / 32);
            mbar_init(m.grad_empty + 8 * i, CONSUMERS / 32);
        }
        mbar_init(m.k_full, 1);
        mbar_init(m.v_full, 1);
        mbar_init(m.k_empty, CONSUMERS / 32 + 1);  // and the second loader
        mbar_init(m.v_empty, CONSUMERS / 32);
        mbar_init_done();
    }
    __syncthreads();

    if (warpgroup() == 0) {  // ---- producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {  // tiles and keys, queries and lse
            int step = 0, index = blockIdx.x;
            for (u32 round = 0;; round ^= 1) {
                mbar_wait(m.k_empty, round ^ 1);
                const bool more = index < tiles;
                const Tile* tile = plan + (more ? index : tiles);
                mbar_expect(m.k_full, (more ? K_BYTES : 0) + (int)sizeof(Tile));
                bulk_load(m.tile, tile, sizeof(Tile), m.k_full);
                if (!more) break;
                load_tile(m.k, k_map, m.k_full, BN, tile->key_row, tile->head, tile->batch);
                index = gridDim.x + atomicAdd(counter, 1);
                mbar_wait(m.k_full, round);
                load_steps<true>(m, a, q_map, lse, step, row_blocks);
            }
        } else if (threadIdx.x == 32) {  // values, dout and delta
            int step = 0;
            for (u32 round = 0;; round ^= 1) {
                mbar_wait(m.k_full, round);
                if (field(m.tile, FIRST) < 0) break;
                mbar_wait(m.v_empty, round ^ 1);
                mbar_expect(m.v_full, K_BYTES);
                load_tile(m.v, v_map, m.v_full, BN, field(m.tile, KEY_ROW), field(m.tile, HEAD), field(m.tile, BATCH));
                load_steps<false>(m, a, dout_map, delta, step, row_blocks);
                mbar_arrive(m.k_empty);
            }
        }
    } else {  // ---- consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int w = warpgroup() - 1, thread = threadIdx.x % 128, warp_row = 64 * w + thread / 32 * 16;
        const float scale_log2 = a.scale * 1.44269504f;
        int step = 0;
        for (int round = 0;; ++round) {
            mbar_wait(m.k_full, round & 1);
            const int first = field(m.tile, FIRST), keys = field(m.tile, KEYS);
            if (first < 0) break;
            mbar_wait(m.v_full, round & 1);
            if ((a.cu_q || a.key_lengths) && first + BN > keys) {  // what lies there may be NaN
                for (int c = threadIdx.x - 128; c < BN * WIDTH / 8; c += CONSUMERS) {
                    const int row = c % BN;
                    if (first + row < keys) continue;
                    store_shared(chunk_address<BN>(m.k, row, c / BN), 0.f, 0.f, 0.f, 0.f);
                    store_shared(chunk_address<BN>(m.v, row, c / BN), 0.f, 0.f, 0.f, 0.f);
                }
                fence_async_proxy();
                bar_sync(ALL, CONSUMERS);
            }
            const int begin = field(m.tile, BEGIN), end = begin + field(m.tile, BLOCKS), steps = (end - begin) * a.group;
            const int shift = first + field(m.tile, SHIFT);  // the query that stands at the tile's first key
            int block = begin;
            float* sums_of_head = dq_sum + ((long long)field(m.tile, HEAD) * a.group * row_blocks + field(m.tile, ROW_BLOCK)) * (BM * WIDTH);
            float dk_sum[WIDTH / 2], dv_sum[WIDTH / 2];
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) dk_sum[i] = dv_sum[i] = 0.f;

#pragma unroll 1
            for (int i = 0; i < steps; ++i, ++step) {
                const u32 stage = step % STAGES, q = m.q + stage * Q_BYTES, grad = m.grad + stage * Q_BYTES;
                const u32 ds_tile = m.ds + stage * DS_BYTES;
                float st[BM / 2], dst[BM / 2];
                u32 p[HALVES][4][4], ds[HALVES][4][4];
                mbar_wait(stage_bar(m.q_full, step), parity(step));
                hold(st); wgmma_fence();
                product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(st, m.k + w * 64 * 128, q);
                wgmma_commit();
                mbar_wait(stage_bar(m.grad_full, step), parity(step));
                hold(dst); wgmma_fence();
                product<K_MAJOR, K_MAJOR, BN, BM, WIDTH>(dst, m.v + w * 64 * 128, grad);
                wgmma_commit();
                wgmma_wait<1>(); hold(st);  // S^T is there, dP^T runs
                if (i) release(stage_bar(m.q_empty, step - 1));

                const u32 column = 8 * (thread % 4);
                const bool masked = first + BN > keys || shift + BN - 1 > block * BM + a.right
                                    || shift < block * BM + BM - 1 - a.left;
                int low[2], high[2];
                if (masked) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int row = warp_row + thread % 32 / 4 + 8 * r, at = shift + row - block * BM - 2 * (thread % 4);
                        low[r] = at - a.right;
                        high[r] = first + row < keys ? at + a.left : -1;
                    }
                }
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
#pragma unroll
                    for (int i = 32 * h; i < 32 * h + 32; i += 4) {
                        const float2 x = load_shared_float2(m.lse + stage * ROWS_BYTES + 32 * (i >> 2) + column);
                        st[i] = exp2_fast(st[i] * scale_log2 - x.x);
                        st[i + 1] = exp2_fast(st[i + 1] * scale_log2 - x.y);
                        st[i + 2] = exp2_fast(st[i + 2] * scale_log2 - x.x);
                        st[i + 3] = exp2_fast(st[i + 3] * scale_log2 - x.y);
                    }
                    if (masked) {
#pragma unroll
                        for (int i = 32 * h; i < 32 * h + 32; ++i) {
                            const int r = i >> 1 & 1, at = 8 * (i >> 2) + (i & 1);
                            if (at < low[r] || at > high[r]) st[i] = 0.f;
                        }
                    }
                    if (h == 0) {
#pragma unroll
                        for (int i = 0; i < 16; ++i) p[0][i / 4][i % 4] = pack_pair(scalar(), st[2 * i], st[2 * i + 1]);
                        hold(dv_sum); hold(p[0]); wgmma_fence();
                        product<MN_MAJOR, BM>(dv_sum, p[0], grad, true);
                        wgmma_commit();
                    }
                }
                wgmma_wait<1>(); hold(dst);  // dP^T is there, dV runs
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    if (h > 0) {
#pragma unroll
                        for (int i = 0; i < 16; ++i)
                            p[h][i / 4][i % 4] = pack_pair(scalar(), st[32 * h + 2 * i], st[32 * h + 2 * i + 1]);
                        hold(p[h]); wgmma_fence();
                        product<MN_MAJOR, BM>(dv_sum, p[h], grad + h * 64 * 128, true);
                        wgmma_commit();
                    }
#pragma unroll
                    for (int i = 32 * h; i < 32 * h + 32; i += 4) {
                        const float2 x = load_shared_float2(m.delta + stage * ROWS_BYTES + 32 * (i >> 2) + column);
                        ds[h][i / 8 % 4][i / 4 % 2 * 2] = pack_pair(scalar(), st[i] * (dst[i] - x.x), st[i + 1] * (dst[i + 1] - x.y));
                        ds[h][i / 8 % 4][i / 4 % 2 * 2 + 1] = pack_pair(scalar(), st[i + 2] * (dst[i + 2] - x.x), st[i + 3] * (dst[i + 3] - x.y));
                    }
                    store_tile<BN>(ds_tile + h * BN * 128, warp_row, ds[h]);
                }
                fence_async_proxy();
                bar_sync(ALL, CONSUMERS);  // dS is whole
                float dq[32];
                hold(dq); wgmma_fence();
                if (WIDTH == 64) product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, ds_tile + w * BN * 128, m.k);
                else product<MN_MAJOR, MN_MAJOR, BN, BN, BN>(dq, ds_tile, m.k + w * BN * 128);
                wgmma_commit();
                product<K_MAJOR, MN_MAJOR, BN, BM, BM>(dk_sum, ds_tile + w * 64 * 128, q, true);
                wgmma_commit();
                wgmma_wait<1>();  // dV and dQ are there, dK runs into the next step
#pragma unroll
                for (int h = 0; h < HALVES; ++h) hold(p[h]);
                release(stage_bar(m.grad_empty, step));

                float* to = sums_of_head + (long long)block * (BM * WIDTH) + w * (BM * WIDTH / 2);
                if (++block == end) {
                    block = begin;
                    sums_of_head += (long long)row_blocks * (BM * WIDTH);
                }
                hold(dq);
                add_to_memory(to + thread * 4, dq);
            }

            wgmma_wait<0>(); hold(dv_sum); hold(dk_sum);
            if (steps) release(stage_bar(m.q_empty, step - 1));
            // dV leaves through this warpgroup's own values, dK through dS
            const int head = field(m.tile, HEAD), batch = field(m.tile, BATCH), at = field(m.tile, KEY_ROW) + 64 * w;
            const int key_rows = field(m.tile, KEY_ROWS) - first;
            const bool whole = !a.cu_q || key_rows >= BN;
            u32 rounded[WIDTH / 16][4];
            pack(rounded, dv_sum);
            if (whole) {
                store_tile<BN>(m.v, warp_row, rounded);
                fence_async_proxy();
                bar_sync(OWN + w, 128);
                if (thread == 0)
                    for (int c = 0; c < WIDTH / 64; ++c)
                        tma_store(dv_map, m.v + c * BN * 128 + w * 64 * 128, 64 * c, at, head, batch);
            } else {
                store_rows(dv + at * a.dv.row + head * a.dv.head, a.dv, key_rows - 64 * w, a.value_dim, rounded);
            }
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) dk_sum[i] *= a.scale;
            pack(rounded, dk_sum);
            bar_sync(ALL, CONSUMERS);
            release(m.k_empty);  // behind the barrier: all lanes have read the tile
            if (whole) {
                const u32 tile_out = m.ds + w * 64 * WIDTH * 2;
                store_tile<64>(tile_out, thread / 32 * 16, rounded);
                fence_async_proxy();
                bar_sync(OWN + w, 128);
                if (thread == 0) {
                    for (int c = 0; c < WIDTH / 64; ++c)
                        tma_store(dk_map, tile_out + c * 64 * 128, 64 * c, at, head, batch);
                    bulk_commit();
                    bulk_wait_read();
                }
            } else {
                store_rows(dk + at * a.dk.row + head * a.dk.head, a.dk, key_rows - 64 * w, a.head_dim, rounded);
            }
            bar_sync(ALL, CONSUMERS);
            release(m.v_empty);
        }
        if (thread == 0) bulk_wait();
    }
}
