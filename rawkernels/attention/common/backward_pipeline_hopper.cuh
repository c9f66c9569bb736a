#pragma once
// The pipeline of attention's backward on Hopper: the layout of shared memory, the two producer threads, and the loads and
// stores of the consumers. attention_backward_hopper.cuh has WIDTH, BM and BN.
#include "attention/common/attention_backward_hopper.cuh"
#include "common/compiler.cuh"
#include "common/global_memory.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int STAGES = 2, CONSUMERS = 256;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // with 384 threads a launch gives 168 to each
constexpr int Q_BYTES = BM * WIDTH * 2, K_BYTES = BN * WIDTH * 2;  // of tiles of q and dout, of k and v
constexpr int DS_BYTES = BN * BM * 2;
constexpr int ROWS_BYTES = BM * 4;  // of lse or delta
constexpr int SUM_BYTES = BM * WIDTH * 2;  // a warpgroup's half of dq
constexpr int BIAS_BYTES = BM * BN * 2;
constexpr int MORE_KEY_BYTES = WIDTH == 64 ? K_BYTES : 0;  // there is room for a second buffer of keys
constexpr int WORD_BYTES = BM / 16 * QUERY_WORDS * 4, KEY_WORD_BYTES = BN / 16 * KEY_WORDS * 4;  // of dropout
// Named barriers: ALL consumers; OWN + w: a warpgroup; FREE, WRITTEN: the buffer of dq sums; WHOLE + stage: dS of a step.
enum { ALL = 1, OWN = 2, FREE = 4, WRITTEN = 5, WHOLE = 6 };

struct Shared {
    u32 q_full, q_empty, grad_full, grad_empty, k_full, k_empty, v_full, v_empty, tile_full, sums_full;
    u32 part, next, turn, index, steps, tiles;
    u32 lse, delta, k, v, q, grad, ds, sums, more_keys, bias, words, key_words;
};
__device__ __forceinline__ Shared shared_layout() {
    Shared m;
    m.q_full = shared_base();
    m.q_empty = m.q_full + 8 * STAGES;
    m.grad_full = m.q_empty + 8 * STAGES;
    m.grad_empty = m.grad_full + 8 * STAGES;
    m.k_full = m.grad_empty + 8 * STAGES;  // two, as there may be two buffers of keys
    m.k_empty = m.k_full + 16;
    m.v_full = m.k_full + 32;
    m.v_empty = m.k_full + 40;
    m.tile_full = m.k_full + 48;
    m.sums_full = m.k_full + 64;
    m.part = m.k_full + 72;
    m.next = m.k_full + 76;
    m.turn = m.k_full + 80;
    m.index = m.k_full + 84;
    m.steps = m.q_full + 256;
    m.tiles = m.q_full + 512;
    m.lse = m.q_full + 1024;
    m.delta = m.lse + STAGES * ROWS_BYTES;
    m.k = m.delta + STAGES * ROWS_BYTES;
    m.v = m.k + K_BYTES;
    m.q = m.v + K_BYTES;
    m.grad = m.q + STAGES * Q_BYTES;
    m.ds = m.grad + STAGES * Q_BYTES;
    m.sums = m.ds + 2 * DS_BYTES;
    m.more_keys = m.sums + 2 * SUM_BYTES;
    m.bias = m.words = m.more_keys + MORE_KEY_BYTES;  // no kernel uses both
    m.key_words = m.words + STAGES * WORD_BYTES;
    return m;
}

__device__ __forceinline__ void load_tile(u32 tile, const TensorMap& map, u32 bar, int rows, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < WIDTH / 64; ++c) tma_load(tile + c * rows * 128, map, bar, 64 * c, row, head, batch);
}
__device__ __forceinline__ int field(u32 tile, int number) { return (int)load_shared(tile + 4 * number); }
// Fields of a Tile.
enum { HEAD, FIRST, BATCH, KEY_ROW, KEYS, KEY_ROWS, SHIFT, QUERY_ROW, BEGIN, BLOCKS, START, ROW_BLOCK, NUMBER, QUERIES,
       OPEN_FROM, OPEN_TO };
// Fields of a step: the part of dq sums, the queries' block and head, whether it needs the mask.
enum { PART, BLOCK, STEP_HEAD, MASKED };
constexpr u32 FRESH = 1u << 31, LAST = 1u << 30;  // bits of PART, if chain > 1: the first, the last tile that adds to it
// The keys of a tile of a chain are the last ones that a block of queries sees.
__device__ __forceinline__ bool is_last(const Attention& a, u32 tile, int block) {
    const int next = field(tile, FIRST) + BN;
    return next >= field(tile, KEYS) || block < max(0, next + field(tile, SHIFT) - a.right) / BM;
}

using Ring = PipelineState<STAGES>;
// The fields of a step. AHEAD: of twice as many steps as there are stages, so that they are written before a stage is free.
template <bool AHEAD> __device__ __forceinline__ u32 step_of(const Shared& m, const Ring& ring) {
    return m.steps + 16 * (ring.stage + (AHEAD ? STAGES * ring.parity : 0));
}

// The tile of a round: double-buffered.
__device__ __forceinline__ u32 tile_of(const Shared& m, u32 round) { return m.tiles + (round & 1) * (int)sizeof(Tile); }

// The buffer of a tile's keys. AHEAD: of two in turn, so that the next tile's keys are there before a tile ends.
template <bool AHEAD> __device__ __forceinline__ u32 keys_of(const Shared& m, u32 tile) {
    return AHEAD ? m.k + (tile - m.tiles) / (int)sizeof(Tile) * (m.more_keys - m.k) : m.k;
}

// The block of queries after `block`, cyclically upwards or, DOWN, downwards.
template <bool DOWN> __device__ __forceinline__ int next_block(u32 tile, int block) {
    if (DOWN) return block == field(tile, BEGIN) ? field(tile, START) : block - 1;
    return ++block == field(tile, BEGIN) + field(tile, BLOCKS) ? field(tile, BEGIN) : block;
}

// One producer thread: loads all steps of all tiles. QUERIES: q with lse, if BIASED the bias, and the tile's keys; otherwise
// dout with delta, and the values. With DROPOUT they also load the random words of queries and of keys, respectively. The
// first step is loaded before the keys or values, whose buffer becomes free later. AHEAD: keys have two buffers. With
// chain > 1 a block takes the `chain` tiles of a KV head in order; the first one, which all queries see, stores dq sums instead
// of adding, and the last one that a block of queries sees completes them.
template <bool QUERIES, bool DOWN = false, bool BIASED = false, bool DROPOUT = false, bool AHEAD = false>
__device__ __forceinline__ void load_all(const Shared& m, const Attention& a, const TensorMap& map, const float* rows,
                                         const TensorMap& kv_map, const Tile* plan, int* counter, int tiles,
                                         int row_blocks, const TensorMap& bias_map, int chain = 1) {
    const u32 full = QUERIES ? m.q_full : m.grad_full, empty = QUERIES ? m.q_empty : m.grad_empty;
    Ring ring;
    for (u32 round = 0;; ++round) {
        const u32 tile = tile_of(m, round), parity = round / 2 & 1, known = m.tile_full + 8 * (round & 1);
        const u32 of_tile = AHEAD ? 8 * (round & 1) : 0, of_next = 8 - of_tile;
        if (AHEAD && !QUERIES) mbar_arrive(m.k_empty + of_next);  // the fields of the tile before have been read
        if (QUERIES) {
            if (AHEAD && round) mbar_wait(m.k_empty + of_tile, (round - 1) / 2 & 1);
            int index = 0;
            if (AHEAD && round % chain) index = load_shared(m.index) + 1;
            else index = chain * (round ? atomicAdd(counter, 1) : blockIdx.x);
            if (AHEAD) store_shared(m.index, (u32)index);  // kept in shared memory: no register is free
            mbar_expect(known, sizeof(Tile));
            bulk_load(tile, plan + min(index, tiles), sizeof(Tile), known);
        }
        mbar_wait(known, parity);
        if (field(tile, FIRST) < 0) break;
        int block = field(tile, START), head = field(tile, HEAD) * a.group, left = field(tile, BLOCKS) * a.group;
        for (bool loaded = false; left > 0 || !loaded; --left) {
            if (left > 0) {
                const u32 bar = full + 8 * ring.stage;
                const int part = head * row_blocks + field(tile, ROW_BLOCK) + block;
                if (!AHEAD || !QUERIES) mbar_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                if (QUERIES) {  // AHEAD, while the stage is still in use
                    const u32 step = step_of<AHEAD>(m, ring);
                    u32 bits = 0;
                    if (AHEAD && chain > 1) bits = (field(tile, FIRST) ? 0 : FRESH) | (is_last(a, tile, block) ? LAST : 0);
                    store_shared(step + 4 * PART, part | bits);
                    store_shared(step + 4 * BLOCK, (u32)block);
                    store_shared(step + 4 * STEP_HEAD, (u32)head);
                    store_shared(step + 4 * MASKED, block < field(tile, OPEN_FROM) || block >= field(tile, OPEN_TO));
                    if (AHEAD) mbar_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                }
                mbar_expect(bar, Q_BYTES + ROWS_BYTES + (BIASED ? BIAS_BYTES : 0)
                                 + (DROPOUT ? (QUERIES ? WORD_BYTES : KEY_WORD_BYTES) : 0));
                load_tile((QUERIES ? m.q : m.grad) + ring.stage * Q_BYTES, map, bar, BM,
                          (AHEAD ? 0 : field(tile, QUERY_ROW)) + block * BM, head, field(tile, BATCH));
                bulk_load((QUERIES ? m.lse : m.delta) + ring.stage * ROWS_BYTES, rows + part * BM, ROWS_BYTES, bar);
                if (BIASED)
#pragma unroll
                    for (int c = 0; c < BN / 64; ++c)
                        tma_load(m.bias + ring.stage * BIAS_BYTES + c * BM * 128, bias_map, bar, field(tile, FIRST) + 64 * c,
                                 block * BM, a.bias.head ? head : 0, a.bias.batch ? field(tile, NUMBER) : 0);
                if (DROPOUT && QUERIES) {
                    const int number = field(tile, NUMBER);
                    const int token = !AHEAD && a.cu_q ? field(tile, QUERY_ROW) : number * a.queries;
                    const int row = head * a.query_rows + token / 16 + number + block * (BM / 16);
                    bulk_load(m.words + ring.stage * WORD_BYTES, a.query_words + (long long)row * QUERY_WORDS, WORD_BYTES,
                              bar);
                } else if (DROPOUT) {  // this thread has more registers free
                    const u32* const words = key_words(a, field(tile, NUMBER), head) + field(tile, FIRST) / 16 * KEY_WORDS;
                    bulk_load(m.key_words + ring.stage * KEY_WORD_BYTES, words, KEY_WORD_BYTES, bar);
                }
                ring.next();
                block = next_block<DOWN>(tile, block);
                if (block == field(tile, START)) ++head;
            }
            if (loaded) continue;
            const u32 kv_full = QUERIES ? m.k_full + of_tile : m.v_full;
            if (!AHEAD || !QUERIES) mbar_wait(QUERIES ? m.k_empty : m.v_empty, (round & 1) ^ 1);
            mbar_expect(kv_full, K_BYTES);
            load_tile(QUERIES ? keys_of<AHEAD>(m, tile) : m.v, kv_map, kv_full, BN, field(tile, KEY_ROW), field(tile, HEAD),
                      field(tile, BATCH));
            loaded = true;
        }
        if (!AHEAD && !QUERIES) mbar_arrive(m.k_empty);  // the tile's fields have been read
    }
}

// Users: arrivals that free a buffer of keys, and that of values.
__device__ __forceinline__ void init_barriers(const Shared& m, int key_users, int value_users) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(m.q_full + 8 * i, 1);
            mbar_init(m.grad_full + 8 * i, 1);
            mbar_init(m.q_empty + 8 * i, CONSUMERS / 32);
            mbar_init(m.grad_empty + 8 * i, CONSUMERS / 32);
        }
        for (int i = 0; i < 2; ++i) {
            mbar_init(m.k_full + 8 * i, 1);
            mbar_init(m.k_empty + 8 * i, key_users);
            mbar_init(m.tile_full + 8 * i, 1);
        }
        mbar_init(m.v_full, 1);
        mbar_init(m.v_empty, value_users);
        mbar_init(m.sums_full, 1);
        mbar_init_done();
    }
    __syncthreads();
}

// Clears keys and values from row `count` on, which may hold NaN.
__device__ __forceinline__ void clear_rows(const Shared& m, int count) {
    int c = threadIdx.x - 128;
    c = opaque(c);  // otherwise the compiler keeps all addresses in registers
    for (; c < BN * WIDTH / 8; c += CONSUMERS) {
        const int row = c % BN;
        if (row < count) continue;
        store_shared(chunk_address<BN>(m.k, row, c / BN), 0.f, 0.f, 0.f, 0.f);
        store_shared(chunk_address<BN>(m.v, row, c / BN), 0.f, 0.f, 0.f, 0.f);
    }
    fence_async_proxy();
    bar_sync(ALL, CONSUMERS);
}

// Stores the rows of a gradient that belong to its sequence, where a whole tile would overwrite the next sequence.
template <int STEPS>
__device__ __forceinline__ void store_rows(scalar* to, const Strides& step, int rows, int first_column,
                                           int columns, const u32 (&p)[STEPS][4]) {
    int thread = threadIdx.x % 128;
    thread = opaque(thread);  // otherwise the compiler keeps rows and columns in registers throughout
    const int first_row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 8 * STEPS; i += 2) {
        const int row = first_row + 8 * (i >> 1 & 1), column = first_column + 8 * (i >> 2) + 2 * (thread % 4);
        if (row < rows && column < columns) *(u32*)(to + row * step.row + column) = p[i / 8][i / 2 % 4];
    }
}

// Adds a warpgroup's part of dq from registers to the sums in global memory; `to`: this thread's address.
template <int R> __device__ __forceinline__ void add_to_memory(float* to, const float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; i += 4)
        add_global(to + i * 128, d[i], d[i + 1], d[i + 2], d[i + 3]);
}
