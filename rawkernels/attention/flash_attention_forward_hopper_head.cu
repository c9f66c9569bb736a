// Causal attention for Hopper with its log-sum-exp, for up to 256 tokens and heads of up to 64 columns. A block computes a
// whole head at a time while the next head is loaded.
// Constants: scalar = f16, bf16; DROPOUT = false, true
// Launch:    grid = (min(sequences * heads, SMs),), block = (640,), shared = SHARED bytes; not packed, group = 1, scale > 0
//            dependent: flash_attention_forward_head
// Arch: sm_90a
//
// A head is up to four blocks of 64 queries and of 64 keys. Each of four producer warps loads one block of each by TMA, and
// samples its words of dropout's tables (attention_dropout.cu). Each of four consumer warpgroups computes one block of
// queries of a head, from the first keys on, and proceeds to the next head independently, where it has another block.
// The softmax subtracts the maximum of a row's first 64 logits. Later logits may be larger and are not searched: sums are
// float32, and bf16 has the same exponent range. Only if a sum exceeds a limit, the block is computed again with the running
// maximum.
#include "attention/common/attention_hopper.cuh"
#include "attention/common/dropout_words.cuh"
#include "common/grid_dependency.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"

constexpr int SLOTS = 4, WARPGROUPS = SLOTS;  // blocks of a head
constexpr int TILE_BYTES = 64 * 128;          // bytes of a block
constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 112;  // with 640 threads a launch gives 96 to each
static_assert(PRODUCER_REGISTERS + 4 * CONSUMER_REGISTERS == 5 * 96,
              "flash_attention_forward_hopper_head.cu: setmaxnreg would wait forever");
constexpr float HUGE = 1 << 27;     // exponents from here on are multiples of 16 as float32
constexpr float LOWEST = -3.4e38f;  // the exponent of a row without logits; finite, so that differences are not NaN
// A sum of weights up to this limit means that no weight overflows as a 16-bit number.
__device__ __forceinline__ constexpr float sum_limit(bf16) { return 1ull << 60; }
__device__ __forceinline__ constexpr float sum_limit(f16) { return 1 << 15; }
// Shared memory, in bytes from shared_base() on: two heads, then their barriers.
constexpr int QUERY_ROW = 4 * QUERY_WORDS, KEY_ROW = 4 * KEY_WORDS;  // bytes of the words of 16 queries, 16 keys
constexpr int Q = 0, K = Q + SLOTS * TILE_BYTES, V = K + SLOTS * TILE_BYTES, WORDS_OF_KEYS = V + SLOTS * TILE_BYTES;
constexpr int WORDS_OF_QUERIES = WORDS_OF_KEYS + 4 * SLOTS * KEY_ROW, HEAD_BYTES = WORDS_OF_KEYS + (DROPOUT ? 14 * 1024 : 0);
static_assert(4 * SLOTS * (KEY_ROW + QUERY_ROW) <= 14 * 1024, "flash_attention_forward_hopper_head.cu: room for words");
constexpr int BARRIERS = 2 * HEAD_BYTES, KEYS_FULL = 0, QUERIES_FULL = 8 * SLOTS, EMPTY = 16 * SLOTS, BARRIER_BYTES = EMPTY + 8;
[[maybe_unused]] constexpr int SHARED = 1024 + BARRIERS + 2 * BARRIER_BYTES;

// ---- producers
__device__ __forceinline__ void store_words(u32 to, uint4 x) {
    store_shared(to, __uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}
__device__ __forceinline__ void sample_key_words(u32 words, const PhiloxKey& key, int block, u32 sheet) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int draw = lane; draw < 64; draw += 32) {
        u32 point = 0;  // unused for keys
        store_words(words + 16 * draw, sample_words(key, 4 * block + draw / 16, draw % 16, sheet, true, point));
    }
}
__device__ __forceinline__ void sample_query_words(u32 words, const PhiloxKey& key, int block, u32 sheet, u32 threshold) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = 0; row < 4; ++row) {
        u32 point = 0;
        const uint4 drawn = sample_words(key, 4 * block + row, lane, sheet, false, point);
#pragma unroll
        for (int n = 1; n < 16; n *= 2) point |= __shfl_xor_sync(~0u, point, n);
        store_words(words + row * QUERY_ROW + 16 * lane, drawn);
        if (lane == 0) store_shared(words + row * QUERY_ROW + 4 * BOUNDS, round_bounds(point, threshold));
    }
}

// ---- consumers
// A thread's state of 64 queries, for its two rows.
struct Rows {
    float o[32];       // output, in units of 2^shift
    float total[4];    // this thread's share of the sum of weights, for even and odd columns, in units of 2^shift
    float peak[2], shift[2], exact[2];  // an unscaled logit; its exponent; the exponent of an unscaled logit of 1
    u32 p[4][4];
    QueryWords words;
};
// Sets the maxima to those of the FIRST keys, or updates them. Huge exponents use a power of two as their unit, see
// flash_attention_forward_hopper.cu.
template <bool FIRST> __device__ __forceinline__ void update_maxima(Rows& rows, const float (&s)[32], float unit) {
    const float coarse = __uint_as_float((__float_as_uint(unit) + 0x7fffff) & 0x7f800000);
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float even = FIRST ? NEG_INF : rows.peak[r], odd = NEG_INF;
#pragma unroll
        for (int e = 2 * r; e < 32; e += 4) { even = fmaxf(even, s[e]); odd = fmaxf(odd, s[e + 1]); }
        float peak = fmaxf(even, odd);
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        const bool huge = fabsf(peak) > HUGE / coarse;
        rows.exact[r] = huge ? coarse : unit;
        rows.shift[r] = fmaxf(peak * rows.exact[r], LOWEST);
        correction[r] = FIRST ? 0.f : exp2_fast(fmaf(rows.peak[r], rows.exact[r], -rows.shift[r]));
        rows.peak[r] = peak;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.total[e] = FIRST ? 0.f : rows.total[e] * correction[row_of(e)];
#pragma unroll
    for (int e = 0; e < 32 && !FIRST; ++e) rows.o[e] *= correction[row_of(e)];
}
// Masks the products of a block with its own keys; the warp has queries 16 part .. 16 part + 15.
__device__ __forceinline__ void apply_causal_mask(float (&s)[32], int part) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (k > part)
#pragma unroll
            for (int e = 8 * k; e < 8 * k + 8; ++e) s[e] = NEG_INF;
        if (k == part) {
            const int after = threadIdx.x % 32 / 4 - threadIdx.x % 4 * 2;
#pragma unroll
            for (int e = 8 * k; e < 8 * k + 8; ++e) if (column_of(e) - 16 * k > after + 8 * row_of(e)) s[e] = NEG_INF;
        }
    }
}
// Turns the products with keys 16 k .. 16 k + 15 into packed weights.
__device__ __forceinline__ void softmax(Rows& rows, const float (&s)[32], int k, u32 words) {
    float weight[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        weight[e] = exp2_fast(fmaf(s[8 * k + e], rows.exact[row_of(e)], -rows.shift[row_of(e)]));
        rows.total[e % 4] += weight[e];
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) rows.p[k][n] = pack_pair(scalar(), weight[2 * n], weight[2 * n + 1]);
    if (DROPOUT) apply_dropout(rows.p[k], rows.words, load_shared_uint2(words + 4 * k * KEY_WORDS + threadIdx.x % 32 * 8));
}

__device__ __forceinline__ QueryWords query_words_of_lane(u32 row) {
    const int i = threadIdx.x % 32 / 4;
    QueryWords q;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int place = query_place(i, threadIdx.x % 4 * 2 + n);
        q.factor[n] = load_shared(row + 4 * place);
        q.summand[n] = load_shared(row + 4 * place + 8);
    }
    q.bounds = load_shared(row + 4 * BOUNDS);
    return q;
}
// Stores a warp's 16 rows of results, by way of its part of a tile in shared memory.
__device__ __forceinline__ void store_rows(scalar* to, const Strides& s, int row0, int rows, int columns,
                                           const u32 (&p)[4][4], u32 tile, int part) {
    const int lane = threadIdx.x % 32, row = row0 + lane / 8, column = 8 * (lane % 8);
    store_tile<64>(tile, 16 * part, p);
    __syncwarp();
    to += (long long)row * (int)s.row + column;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const uint4 x = load_shared_uint4(chunk_address<64>(tile, 16 * part + 4 * n + lane / 8, lane % 8));
        if (row + 4 * n < rows && column < columns) *(uint4*)(to + 4 * n * (int)s.row) = x;
    }
}

extern "C" __global__ void __launch_bounds__(640, 1) flash_attention_forward_head(
    const __grid_constant__ TensorMap q_map,  // (B, T, H, D); boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // (B, T, H, D); boxes of 64 rows
    const __grid_constant__ TensorMap v_map,  // (B, T, H, Dv); boxes of 64 rows
    const __grid_constant__ Attention a,
    scalar* out,                              // (B, T, H, Dv) by strides, last axis contiguous
    float* lse,                               // (B, H, T)
    unsigned int threshold, unsigned int seed_low, unsigned int seed_high, unsigned int stream, unsigned int step,
    const unsigned int* device_step) {
    grid_dependency_wait();
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    const int blocks = (a.queries + 63) / 64, heads = a.sequences * a.heads;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; ++n) {
            const u32 bars = shared + BARRIERS + n * BARRIER_BYTES;
            for (int i = 0; i < 2 * SLOTS; ++i) mbar_init(bars + 8 * i, DROPOUT ? 2 : 1);  // TMA, and the words
            mbar_init(bars + EMPTY, 4 * WARPGROUPS);
        }
        mbar_init_done();
    }
    __syncthreads();

    if (warpgroup() == WARPGROUPS) {  // ---- producers
        decrease_registers<PRODUCER_REGISTERS>();
        const PhiloxKey key = DROPOUT ? philox_key(seed_low, seed_high, stream, step, device_step) : PhiloxKey();
        const int lane = threadIdx.x % 32, j = warp, i = blocks - 1 - warp;  // queries that see many keys come first
        if (i < 0) return;
        int round = 0;
        for (int index = blockIdx.x; index < heads; index += gridDim.x, ++round) {
            const u32 at = shared + round % 2 * HEAD_BYTES, bars = shared + BARRIERS + round % 2 * BARRIER_BYTES;
            mbar_wait(bars + EMPTY, round / 2 % 2 ^ 1);
            __syncwarp();
            if (lane == 0) {
                const int number = index / a.heads, head = index % a.heads;
                const u32 keys = bars + KEYS_FULL + 8 * j, queries = bars + QUERIES_FULL + 8 * i;
                mbar_expect(keys, 2 * TILE_BYTES);
                tma_load(at + K + j * TILE_BYTES, k_map, keys, 0, 64 * j, head, number);
                tma_load(at + V + j * TILE_BYTES, v_map, keys, 0, 64 * j, head, number);
                mbar_expect(queries, TILE_BYTES);
                tma_load(at + Q + i * TILE_BYTES, q_map, queries, 0, 64 * i, head, number);
            }
            __syncwarp();
            if (!DROPOUT) continue;
            sample_key_words(at + WORDS_OF_KEYS + j * 4 * KEY_ROW, key, j, index);
            sample_query_words(at + WORDS_OF_QUERIES + i * 4 * QUERY_ROW, key, i, index, threshold);
            __syncwarp();
            if (lane == 0) {
                mbar_arrive(bars + KEYS_FULL + 8 * j);
                mbar_arrive(bars + QUERIES_FULL + 8 * i);
            }
        }
    } else {  // ---- consumers
        increase_registers<CONSUMER_REGISTERS>();
        const int w = warpgroup();
        const float unit = a.scale * LOG2E;
        int round = 0;
        for (int index = blockIdx.x; index < heads; index += gridDim.x, ++round) {
            const u32 at = shared + round % 2 * HEAD_BYTES, bars = shared + BARRIERS + round % 2 * BARRIER_BYTES;
            const u32 parity = round / 2 % 2;
            const int i = (w + round) % SLOTS;
            mbar_wait(bars + KEYS_FULL, parity);  // in every round, or a wait could be satisfied by an older phase
            if (i >= blocks) {
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbar_arrive(bars + EMPTY);
                continue;
            }
            const u32 queries = at + Q + i * TILE_BYTES;  // the results are staged here too
            float s[32];
            Rows rows;
            const auto issue_products = [&](int j) {  // with the keys of block j
                keep_live(s); wgmma_fence();
                product<K_MAJOR, K_MAJOR, 64, 64, 64>(s, queries, at + K + j * TILE_BYTES);
                wgmma_commit();
            };
            const auto add_values = [&](int j) {
                keep_live(rows.o); keep_live(rows.p); wgmma_fence();
                product<MN_MAJOR, 64>(rows.o, rows.p, at + V + j * TILE_BYTES, j > 0);
                wgmma_commit();
            };
            mbar_wait(bars + QUERIES_FULL + 8 * i, parity);
            __syncwarp();
            if (DROPOUT) rows.words = query_words_of_lane(at + WORDS_OF_QUERIES + (4 * i + warp) * QUERY_ROW);
            for (bool exact_maxima = false;; exact_maxima = true) {
                issue_products(0);
                wgmma_wait<0>(); keep_live(s);
                if (i == 0) apply_causal_mask(s, warp);
                update_maxima<true>(rows, s, unit);
#pragma unroll
                for (int k = 0; k < 4; ++k) softmax(rows, s, k, at + WORDS_OF_KEYS);
#pragma unroll 1
                for (int j = 1; j <= i; ++j) {
                    mbar_wait(bars + KEYS_FULL + 8 * j, parity);
                    issue_products(j);
                    add_values(j - 1);
                    wgmma_wait<0>(); keep_live(s); keep_live(rows.o); keep_live(rows.p);
                    const u32 words = at + WORDS_OF_KEYS + j * 4 * KEY_ROW;
                    if (j == i) apply_causal_mask(s, warp);
                    if (exact_maxima) update_maxima<false>(rows, s, unit);
                    if (j < i || warp == 3) {
#pragma unroll
                        for (int k = 0; k < 4; ++k) softmax(rows, s, k, words);
                    } else {
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            if (k < 3 && k <= warp) softmax(rows, s, k, words);
                            else rows.p[k][0] = rows.p[k][1] = rows.p[k][2] = rows.p[k][3] = 0;
                        }
                    }
                }
                constexpr float most = sum_limit(scalar());
                const bool fine = rows.total[0] + rows.total[1] <= most && rows.total[2] + rows.total[3] <= most;
                // After this barrier no warp reads the queries.
                if (!bar_sync_or(1 + w, 128, !fine && !exact_maxima)) break;
            }
            add_values(i);
            wgmma_wait<0>(); keep_live(rows.o); keep_live(rows.p);
            const int number = index / a.heads, head = index % a.heads, row = 64 * i + 16 * warp, lane = threadIdx.x % 32;
            float* const logs = lse + number * a.lse_batch + head * a.lse_head;
            float factor[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float total = rows.total[2 * r] + rows.total[2 * r + 1];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                const int mine = row + lane / 4 + 8 * r;
                if (lane % 4 == 0 && mine < a.queries) logs[mine] = rows.peak[r] * a.scale + __log2f(total) * LN2;
                factor[r] = total > 0.f ? __fdividef(a.keep_scale, total) : 0.f;
            }
#pragma unroll
            for (int e = 0; e < 32; ++e) rows.o[e] *= factor[row_of(e)];
            u32 rounded[4][4];
            pack(rounded, rows.o);
            scalar* const to = out + number * a.out.batch + head * a.out.head;
            store_rows(to, a.out, row, a.queries, a.value_dim, rounded, queries, warp);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) mbar_arrive(bars + EMPTY);
        }
    }
}
