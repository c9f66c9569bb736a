#pragma once
// How Hopper's attention backward moves its tiles: what lies where in shared memory, the two threads that load, and what
// the consumers do beside computing. For WIDTH, BM and BN see attention_backward_hopper.cuh.
#include "common/attention_backward_hopper.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int STAGES = 2, CONSUMERS = 256;
constexpr int Q_BYTES = BM * WIDTH * 2, K_BYTES = BN * WIDTH * 2, DS_BYTES = BN * BM * 2, ROWS_BYTES = BM * 4;
constexpr int SUM_BYTES = BM * WIDTH * 2;  // a warpgroup's half of dq
constexpr int BIAS_BYTES = BM * BN * 2;
enum { ALL = 1, OWN = 2, FREE = 4, WRITTEN = 6 };  // named barriers; all but ALL one per warpgroup

struct Shared {
    u32 q_full, q_empty, grad_full, grad_empty, k_full, k_empty, v_full, v_empty, target, turn, tile;
    u32 lse, delta, k, v, q, grad, ds, sums, bias, keep;
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
    m.target = m.k_full + 32;
    m.turn = m.k_full + 48;
    m.tile = m.k_full + 64;
    m.lse = m.q_full + 1024;
    m.delta = m.lse + STAGES * ROWS_BYTES;
    m.k = m.delta + STAGES * ROWS_BYTES;
    m.v = m.k + K_BYTES;
    m.q = m.v + K_BYTES;
    m.grad = m.q + STAGES * Q_BYTES;
    m.ds = m.grad + STAGES * Q_BYTES;
    m.sums = m.ds + 2 * DS_BYTES;
    m.bias = m.keep = m.sums + 2 * SUM_BYTES;  // no kernel has both
    return m;
}

__device__ __forceinline__ void load_tile(u32 tile, const TensorMap& map, u32 bar, int rows, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < WIDTH / 64; ++c) tma_load(tile + c * rows * 128, map, bar, 64 * c, row, head, batch);
}
__device__ __forceinline__ int field(u32 tile, int number) { return (int)load_shared(tile + 4 * number); }
// Of a Tile.
enum { HEAD, FIRST, BATCH, KEY_ROW, KEYS, KEY_ROWS, SHIFT, QUERY_ROW, BEGIN, BLOCKS, START, ROW_BLOCK, NUMBER, QUERIES };

// A place in a ring of STAGES, and the parity of its round.
struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() { if (++stage == STAGES) { stage = 0; parity ^= 1; } }
};
__device__ __forceinline__ void release(u32 bar) { if (threadIdx.x % 32 == 0) mbar_arrive(bar); }  // once a warp

// The block of queries after one: they go round, up or DOWN.
template <bool DOWN> __device__ __forceinline__ int next_block(const Shared& m, int block) {
    if (DOWN) return block == field(m.tile, BEGIN) ? field(m.tile, START) : block - 1;
    return ++block == field(m.tile, BEGIN) + field(m.tile, BLOCKS) ? field(m.tile, BEGIN) : block;
}

// All queries of a tile with their lse, and with BIASED their bias; or dout with delta.
template <bool QUERIES, bool DOWN, bool BIASED = false>
__device__ __forceinline__ void load_steps(const Shared& m, const Attention& a, const TensorMap& map, const float* rows,
                                           Ring& ring, int row_blocks, const TensorMap& bias_map) {
    for (int n = 0, head = field(m.tile, HEAD) * a.group; n < a.group; ++n, ++head)
        for (int block = field(m.tile, START), left = field(m.tile, BLOCKS); left > 0; --left, ring.next()) {
            const u32 full = (QUERIES ? m.q_full : m.grad_full) + 8 * ring.stage;
            mbar_wait((QUERIES ? m.q_empty : m.grad_empty) + 8 * ring.stage, ring.parity ^ 1);
            mbar_expect(full, Q_BYTES + ROWS_BYTES + (BIASED ? BIAS_BYTES : 0));
            load_tile((QUERIES ? m.q : m.grad) + ring.stage * Q_BYTES, map, full, BM,
                      field(m.tile, QUERY_ROW) + block * BM, head, field(m.tile, BATCH));
            bulk_load((QUERIES ? m.lse : m.delta) + ring.stage * ROWS_BYTES,
                      rows + (head * row_blocks + field(m.tile, ROW_BLOCK) + block) * BM, ROWS_BYTES, full);
            if (BIASED)
#pragma unroll
                for (int c = 0; c < BN / 64; ++c)
                    tma_load(m.bias + ring.stage * BIAS_BYTES + c * BM * 128, bias_map, full, field(m.tile, FIRST) + 64 * c,
                             block * BM, a.bias.head ? head : 0, a.bias.batch ? field(m.tile, NUMBER) : 0);
            block = next_block<DOWN>(m, block);
        }
}

__device__ __forceinline__ void init_barriers(const Shared& m) {
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
}

// The first loading thread: tiles and keys, queries and lse, bias.
template <bool DOWN = false, bool BIASED = false>
__device__ __forceinline__ void load_keys_and_queries(const Shared& m, const Attention& a, const TensorMap& k_map,
                                                      const TensorMap& q_map, const float* lse, const Tile* plan,
                                                      int* counter, int tiles, int row_blocks,
                                                      const TensorMap& bias_map) {
    Ring ring;
    int index = blockIdx.x;
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
        load_steps<true, DOWN, BIASED>(m, a, q_map, lse, ring, row_blocks, bias_map);
    }
}
// The second: values, dout and delta.
template <bool DOWN = false>
__device__ __forceinline__ void load_values_and_gradients(const Shared& m, const Attention& a, const TensorMap& v_map,
                                                          const TensorMap& dout_map, const float* delta, int row_blocks) {
    Ring ring;
    for (u32 round = 0;; round ^= 1) {
        mbar_wait(m.k_full, round);
        if (field(m.tile, FIRST) < 0) break;
        mbar_wait(m.v_empty, round ^ 1);
        mbar_expect(m.v_full, K_BYTES);
        load_tile(m.v, v_map, m.v_full, BN, field(m.tile, KEY_ROW), field(m.tile, HEAD), field(m.tile, BATCH));
        load_steps<false, DOWN>(m, a, dout_map, delta, ring, row_blocks, dout_map);
        mbar_arrive(m.k_empty);
    }
}

// Zeros for keys and values behind the `count`-th: what lies there may be NaN.
__device__ __forceinline__ void clear_rows(const Shared& m, int count) {
    for (int c = threadIdx.x - 128; c < BN * WIDTH / 8; c += CONSUMERS) {
        const int row = c % BN;
        if (row < count) continue;
        store_shared(chunk_address<BN>(m.k, row, c / BN), 0.f, 0.f, 0.f, 0.f);
        store_shared(chunk_address<BN>(m.v, row, c / BN), 0.f, 0.f, 0.f, 0.f);
    }
    fence_async_proxy();
    bar_sync(ALL, CONSUMERS);
}

// The rows of a gradient that lie in its sequence, where a whole tile would write into the next one.
template <int STEPS>
__device__ __forceinline__ void store_rows(scalar* to, const Strides& step, int rows, int first_column,
                                           int columns, const u32 (&p)[STEPS][4]) {
#pragma unroll
    for (int i = 0; i < 8 * STEPS; i += 2) {
        const int row = fragment_row(i), column = first_column + fragment_column(i);
        if (row < rows && column < columns) *(u32*)(to + row * step.row + column) = p[i / 8][i / 2 % 4];
    }
}

// A warpgroup's part of dq from registers into the sums in memory; `to`: of this thread.
template <int R> __device__ __forceinline__ void add_to_memory(float* to, const float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; i += 4)
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to + i * 128), "f"(d[i]), "f"(d[i + 1]), "f"(d[i + 2]), "f"(d[i + 3]) : "memory");
}
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
