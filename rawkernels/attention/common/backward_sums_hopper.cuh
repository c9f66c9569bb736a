#pragma once
// How dQ of a step leaves the consumers of flash_attention_backward_hopper.cu: by shared memory to one warp, which adds it to
// the sums in global memory. If a block takes all tiles of a head (chain > 1), the first tile's are stored instead, and for the
// last tile that a block of queries sees the warp loads the sums back, the consumers add dQ and round, and the warp stores dq.
#include "attention/common/backward_pipeline_hopper.cuh"

constexpr u32 NONE = ~0u;  // instead of a part of dq: the end. Has the bits FRESH and LAST

// The order of additions to dq.
__device__ __forceinline__ void wait_turn(const int* turn, int mine) {
    while (load_acquire(turn) != mine) {}
    fence_async_proxy_global();
}
__device__ __forceinline__ void end_turn(int* turn) {
    fence_async_proxy_global();
    increment_release(turn);
}

// Stores a half of dQ to shared memory for the warp that adds it.
__device__ __forceinline__ void stage_dq(const Shared& m, float (&dq)[32], int half) {
    int thread = threadIdx.x % 128;
    thread = opaque(thread);
    keep_live(dq);
    if (half == 0) bar_sync(FREE, 160);
#pragma unroll
    for (int i = 0; i < 32; i += 4)
        store_shared(m.sums + half * SUM_BYTES + (i / 4 * 128 + thread) * 16, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
}

// Completes dQ of a step, with the earlier sums of other tiles unless it is fresh, and stages it in 16 bits.
__device__ __forceinline__ void finish_dq(const Shared& m, float (&dq)[2][32], float scale, bool fresh, int w) {
    int thread = threadIdx.x % 128;
    thread = opaque(thread);
    keep_live(dq[0]); keep_live(dq[1]);
    bar_sync(FREE, 160);
    if (!fresh) {
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            const uint4 x = load_shared_uint4(m.sums + (i / 4 * 128 + thread) * 16);
            float* d = &dq[i / 32][i % 32];
            d[0] += __uint_as_float(x.x), d[1] += __uint_as_float(x.y);
            d[2] += __uint_as_float(x.z), d[3] += __uint_as_float(x.w);
        }
        bar_sync(OWN + w, 128);  // all threads have read the sums
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 rounded[4][4];
#pragma unroll
        for (int i = 0; i < 32; ++i) dq[half][i] *= scale;
        pack(rounded, dq[half]);
        store_tile<BM>(m.sums, 64 * half + thread / 32 * 16, rounded);
    }
}

// The warp that sums dQ.
__device__ __forceinline__ void sum_dq(const Shared& m, const Attention& a, const TensorMap& dq_map, float* dq_sum, int* turns,
                                       int row_blocks, int chain) {
    bar_arrive(FREE, 160);
    for (u32 parity = 0;;) {  // of sums_full
        bar_sync(WRITTEN, 160);
        const u32 part = load_shared(m.part), number = AHEAD ? part & ~(FRESH | LAST) : part;
        if (part == NONE) break;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            if (DETERMINISTIC) wait_turn(turns + 2 * part, (int)load_shared(m.turn));
            float* const sums = dq_sum + (long long)number * (BM * WIDTH);
            if (AHEAD && part & LAST) {
                const int blocks = (a.queries + BM - 1) / BM, at = number % row_blocks;
                tma_store(dq_map, m.sums, 0, at % blocks * BM, number / row_blocks, at / blocks);
            } else if (AHEAD && part & FRESH) {
                bulk_store(sums, m.sums, 2 * SUM_BYTES);
            } else {
                if (AHEAD && chain > 1) bulk_wait();  // the earlier sums are in memory
                bulk_add(sums, m.sums, 2 * SUM_BYTES);
            }
            bulk_commit();
            bulk_wait_read();
            const u32 next = AHEAD && chain > 1 ? load_shared(m.next) : NONE;
            if ((next & (FRESH | LAST)) == LAST) {  // the next step completes these sums
                if (!(part & LAST)) bulk_wait();
                mbar_expect(m.sums_full, 2 * SUM_BYTES);
                bulk_load(m.sums, dq_sum + (long long)(next & ~LAST) * (BM * WIDTH), 2 * SUM_BYTES, m.sums_full);
                mbar_wait(m.sums_full, parity);
                parity ^= 1;
            }
        }
        __syncwarp();
        bar_arrive(FREE, 160);
        if (DETERMINISTIC && threadIdx.x % 32 == 0) {
            bulk_wait();
            end_turn(turns + 2 * part);
        }
    }
    bulk_wait();
}
