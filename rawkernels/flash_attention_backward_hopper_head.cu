// The gradient of attention on Hopper in one launch, for up to 256 queries and keys of up to 64 columns: a block takes a
// whole head at a time, so that dq, dk and dv are complete sums in registers, in a fixed order.
// Constants: scalar = f16, bf16; DROPOUT = false, true
// Launch:    grid = (min(sequences * heads, SMs),), block = (384,), shared = SHARED bytes; not packed, group = 1
// Arch: sm_90a
//
// A head is up to four blocks of 64 queries and four of 64 keys. Each of four warps brings one of either: queries and
// dout, keys and values by the copy engine; it forms delta and lse of its queries, and draws the words of dropout's tables.
// Two warpgroups compute, everything transposed, each for two blocks of keys (0 and 3, 1 and 2: as much work under a causal
// mask): a step is a block of queries, from the last to the first.
//   S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(S^T c - lse),  dS^T = P^T (dP^T - delta),
//   dV += P^T dO and dK += dS^T Q from registers,  dQ = dS K by way of shared memory, from all keys at once.
// The warpgroups take turns at dQ. Blocks of keys that no query before sees leave, and the next head's come.
// Dropout as in flash_attention_backward_hopper.cu: P^T's signs say what is dropped, dS^T counts in units of 1 / (1 - p).
#include "common/attention_dropout.cuh"
#include "common/dropout_words.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr float LOG2_E = 1.44269504f;
constexpr int SLOTS = 4, TILE = 64 * 128, CONSUMERS = 256;  // blocks of 64 rows, bytes of one
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;  // with 384 threads a launch gives 168 to each
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS == 3 * 168, "else a warpgroup waits for registers for ever");
constexpr int ROW_BYTES = 4 * QUERY_WORDS, WORD_BYTES = DROPOUT ? 4 * ROW_BYTES : 0;
// Shared memory, in bytes from shared_base() on. A barrier for each slot.
constexpr int KEYS_FULL = 0, KEYS_EMPTY = 32, QUERIES_FULL = 64, QUERIES_EMPTY = 96, ROWS_FULL = 128;
constexpr int LSE = 1024, DELTA = LSE + SLOTS * 256, Q = DELTA + SLOTS * 256, GRAD = Q + SLOTS * TILE;
constexpr int K = GRAD + SLOTS * TILE, V = K + SLOTS * TILE, DS = V + SLOTS * TILE;  // of two steps
constexpr int STAGED = DS + 2 * SLOTS * TILE, WORDS = STAGED + CONSUMERS / 32 * 2048;
[[maybe_unused]] constexpr int SHARED = 1024 + WORDS + SLOTS * WORD_BYTES;
enum { OWN = 1, WHOLE = 3 };  // named barriers: of a warpgroup; of a step's dS, by the parity of the step

struct Head { int number, head, offset; };
__device__ __forceinline__ Head head_at(const Attention& a, int index) {
    return {index / a.heads, index % a.heads, a.bottom_right ? a.keys - a.queries : 0};
}
__device__ __forceinline__ void release(u32 bar) { if (threadIdx.x % 32 == 0) mbar_arrive(bar); }  // once a warp

// ---- what the four loading warps do, of block w of a head's queries
__device__ __forceinline__ float dot8(uint4 x, uint4 y) {
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 p = unpack_pair(scalar(), xs[i]), q = unpack_pair(scalar(), ys[i]);
        sum += p.x * q.x + p.y * q.y;
    }
    return sum;
}
// delta = rowsum(dout * out) - dlse, times 1 - p; lse in units of log 2, infinite for rows without keys or queries.
__device__ __forceinline__ void form_rows(u32 shared, const Attention& a, const Head& h, int w, const scalar* out,
                                          const float* lse, const float* dlse, u32 parity) {
    const int lane = threadIdx.x % 32, first = 64 * w;
    const int of_rows = h.number * (int)a.lse_batch + h.head * (int)a.lse_head + first;
#pragma unroll
    for (int row = lane; row < 64; row += 32) {
        const float value = first + row < a.queries ? lse[of_rows + row] : NEG_INF;
        store_shared(shared + LSE + 256 * w + 4 * row, __float_as_uint(value == NEG_INF ? INF : value * LOG2_E));
    }
    out += h.number * a.out.batch + h.head * a.out.head + (first + lane / 8) * a.out.row + lane % 8 * 8;
    const long long stride = 4 * a.out.row;
    const bool columns = lane % 8 * 8 < a.value_dim;
#pragma unroll 1
    for (int row0 = lane / 8; row0 < 64; row0 += 16) {
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = make_uint4(0, 0, 0, 0);
            if (columns && first + row0 + 4 * i < a.queries) x[i] = *(const uint4*)out;
            out += stride;
        }
        if (row0 < 4) mbar_wait(shared + QUERIES_FULL + 8 * w, parity);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row0 + 4 * i;
            float sum = dot8(x[i], load_shared_uint4(chunk_address<64>(shared + GRAD + w * TILE, row, lane % 8)));
#pragma unroll
            for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane % 8) continue;
            if (dlse && first + row < a.queries) sum -= dlse[of_rows + row];
            store_shared(shared + DELTA + 256 * w + 4 * row, __float_as_uint(sum / a.keep_scale));
        }
    }
}
// Four rows of dropout's table of queries, as attention_dropout.cu draws them.
__device__ __forceinline__ void draw_query_words(u32 shared, const PhiloxKey& key, const Attention& a, const Head& h, int w,
                                                 u32 threshold) {
    const u32 lane = threadIdx.x % 32, sheet = h.number * a.heads + h.head;
#pragma unroll 1
    for (int row = 0; row < 4; ++row) {
        u32 point = 0;
        const uint4 drawn = draw_words(key, 4 * w + row, lane, sheet, false, point);
#pragma unroll
        for (int n = 1; n < 16; n *= 2) point |= __shfl_xor_sync(~0u, point, n);
        const u32 to = shared + WORDS + w * WORD_BYTES + row * ROW_BYTES;
        store_shared(to + 16 * lane, __uint_as_float(drawn.x), __uint_as_float(drawn.y), __uint_as_float(drawn.z),
                     __uint_as_float(drawn.w));
        if (lane == 0) store_shared(to + 4 * BOUNDS, round_bounds(point, threshold));
    }
}
// The words of a warp's 16 keys for queries 2c and 2c + 1 of every 8: its lane draws, and takes them from other lanes.
__device__ __forceinline__ uint2 draw_key_words(const PhiloxKey& key, const Attention& a, const Head& h, int row) {
    const int lane = threadIdx.x % 32, from = lane % 4 * 4 + lane / 16;
    u32 point = 0;  // of keys there is none
    const uint4 drawn = draw_words(key, row, lane % 16, h.number * a.heads + h.head, true, point);
    const u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
    uint2 own = {0, 0};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const u32 x = __shfl_sync(~0u, words[n], from), y = __shfl_sync(~0u, words[n], from + 2);
        if (lane / 4 % 4 == n) own = {x, y};
    }
    return own;
}

// ---- what the warpgroups do
// The blocks of keys that some query of block i sees: both ends grow with i.
struct Range { int begin, end; };
__device__ __forceinline__ Range keys_seen(const Attention& a, int offset, int i) {
    const int first = 64 * i + offset, last = min(64 * i + 63, a.queries - 1) + offset;
    return {max(0, first - a.left) / 64, (max(0, min(a.keys, last + a.right + 1)) + 63) / 64};
}
__device__ __forceinline__ void mark(float* weight, uint4 words, u32 bounds, uint2 key_words) {  // of 16 queries
    const u32 kept[2] = {kept_bytes(words.x, words.z, key_words.x, bounds),
                         kept_bytes(words.y, words.w, key_words.y, bounds)};
#pragma unroll
    for (int n = 0; n < 8; ++n) weight[n] = mark_dropped(weight[n], kept[n % 2], n / 2);
}

// A block of queries on a block of keys; dS^T into shared memory.
__device__ __forceinline__ void block(u32 shared, const Attention& a, int offset, int i, int j, u32 ds_tile, uint2 key_words,
                                      float (&dk_sum)[32], float (&dv_sum)[32]) {
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread), "+r"(i), "+r"(j));  // else addresses take registers that the accumulators need
    const int lane = thread % 32, warp_row = thread / 32 * 16;
    const u32 q = shared + Q + i * TILE, grad = shared + GRAD + i * TILE;
    const u32 lse = shared + LSE + 256 * i + lane % 4 * 8;
    const float scale_log2 = a.scale * LOG2_E;
    float st[32], dst[32];
    hold(st); wgmma_fence();
    product<K_MAJOR, K_MAJOR, 64, 64, 64>(st, shared + K + j * TILE, q);
    wgmma_commit();
    hold(dst); wgmma_fence();
    product<K_MAJOR, K_MAJOR, 64, 64, 64>(dst, shared + V + j * TILE, grad);
    wgmma_commit();
    const int first = 64 * i + offset, last = min(64 * i + 63, a.queries - 1) + offset;  // the keys that queries stand at
    const bool masked = 64 * j + 64 > a.keys || 64 * j + 63 > first + a.right || 64 * j < last - a.left;
    wgmma_wait<1>(); hold(st);
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
        uint4 words;
        u32 bounds;
        if (DROPOUT && e % 8 == 0) {
            const u32 row = shared + WORDS + i * WORD_BYTES + e / 8 * ROW_BYTES;
            words = load_shared_uint4(row + 16 * lane);
            bounds = load_shared(row + 4 * BOUNDS);
        }
        const float2 x = load_shared_float2(lse + 8 * e);
        st[e] = exp2_fast(st[e] * scale_log2 - x.x);
        st[e + 1] = exp2_fast(st[e + 1] * scale_log2 - x.y);
        st[e + 2] = exp2_fast(st[e + 2] * scale_log2 - x.x);
        st[e + 3] = exp2_fast(st[e + 3] * scale_log2 - x.y);
        if (DROPOUT && e % 8) mark(&st[e - 4], words, bounds, key_words);
    }
    if (masked) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = 64 * j + warp_row + lane / 4 + 8 * r, at = key - first - 2 * (lane % 4);
            const int low = at - a.right, high = key < a.keys ? at + a.left : -1;
#pragma unroll
            for (int e = 2 * r; e < 32; e += (e & 1) ? 3 : 1) {
                const int column = 8 * (e >> 2) + (e & 1);
                if (column < low || column > high) st[e] = 0.f;
            }
        }
    }
    u32 p[4][4], ds[4][4];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const float x = st[2 * n], y = st[2 * n + 1];
        p[n / 4][n % 4] = DROPOUT ? pack_positive(scalar(), x, y) : pack_pair(scalar(), x, y);
    }
    wgmma_wait<0>(); hold(dst);
    if (lane == 0) bulk_wait_read();  // dK of a block before may still leave through this place
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
        const float2 x = load_shared_float2(lse + (DELTA - LSE) + 8 * e);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float weight = st[e + n], at_row = n % 2 ? x.y : x.x;
            if (DROPOUT) st[e + n] = __saturatef(weight) * dst[e + n] - fabsf(weight) * at_row;
            else st[e + n] = weight * (dst[e + n] - at_row);
        }
    }
    pack(ds, st);
    hold(dv_sum); hold(p); hold(dk_sum); hold(ds); wgmma_fence();
    product<MN_MAJOR, 64>(dv_sum, p, grad, true);
    product<MN_MAJOR, 64>(dk_sum, ds, q, true);
    wgmma_commit();
    store_tile<64>(ds_tile + j * TILE, warp_row, ds);
    fence_async_proxy();
    wgmma_wait<0>(); hold(dk_sum); hold(dv_sum); hold(p); hold(ds);
}

// A warp's 16 rows of a gradient leave by way of 2 KB of shared memory that is its own, when no more than PENDING of its
// stores may still read theirs.
template <int PENDING>
__device__ __forceinline__ void store_warp(const TensorMap& map, u32 staged, float (&d)[32], float factor, int row,
                                           const Head& h) {
#pragma unroll
    for (int e = 0; e < 32; ++e) d[e] *= factor;
    u32 rounded[4][4];
    pack(rounded, d);
    if (threadIdx.x % 32 == 0) bulk_wait_read<PENDING>();
    __syncwarp();
    store_tile<16>(staged, 0, rounded);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        tma_store(map, staged, 0, row, h.head, h.number);
        bulk_commit();
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) flash_attention_backward_head(
    const __grid_constant__ TensorMap q_map,     // (B, T, H, D); boxes of 64 rows
    const __grid_constant__ TensorMap dout_map,  // (B, T, H, Dv); boxes of 64 rows
    const __grid_constant__ TensorMap k_map,     // (B, S, H, D); boxes of 64 rows
    const __grid_constant__ TensorMap v_map,     // (B, S, H, Dv); boxes of 64 rows
    const __grid_constant__ TensorMap dq_map,    // like q; boxes of 16 rows
    const __grid_constant__ TensorMap dk_map,    // like k; boxes of 16 rows
    const __grid_constant__ TensorMap dv_map,    // like v; boxes of 16 rows
    const __grid_constant__ Attention a,
    const scalar* out,                           // (B, T, H, Dv) by strides, last axis contiguous
    const float* lse,                            // (B, H, T)
    const float* dlse,                           // like lse, or null
    unsigned int threshold, unsigned int seed_low, unsigned int seed_high, unsigned int stream, unsigned int step,
    const unsigned int* device_step) {
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            mbar_init(shared + KEYS_FULL + 8 * i, 1);
            mbar_init(shared + QUERIES_FULL + 8 * i, 1);
            mbar_init(shared + ROWS_FULL + 8 * i, 1);
            mbar_init(shared + KEYS_EMPTY + 8 * i, CONSUMERS / 32);
            mbar_init(shared + QUERIES_EMPTY + 8 * i, CONSUMERS / 32);
        }
        mbar_init_done();
    }
    __syncthreads();
    const int heads = a.sequences * a.heads, query_blocks = (a.queries + 63) / 64, key_blocks = (a.keys + 63) / 64;

    if (warpgroup() == 2) {  // ---- producers
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        const PhiloxKey key = DROPOUT ? philox_key(seed_low, seed_high, stream, step, device_step) : PhiloxKey();
        const int lane = threadIdx.x % 32;
        u32 parity = 1;
        for (int index = blockIdx.x; index < heads; index += gridDim.x, parity ^= 1) {
            int w = threadIdx.x / 32 % 4;
            asm volatile("" : "+r"(w));  // else what depends on it takes registers all the time
            const Head h = head_at(a, index);
            if (w < key_blocks && lane == 0) {
                const u32 full = shared + KEYS_FULL + 8 * w;
                mbar_wait(shared + KEYS_EMPTY + 8 * w, parity);
                mbar_expect(full, 2 * TILE);
                tma_load(shared + K + w * TILE, k_map, full, 0, 64 * w, h.head, h.number);
                tma_load(shared + V + w * TILE, v_map, full, 0, 64 * w, h.head, h.number);
            }
            __syncwarp();
            if (w >= query_blocks) continue;
            const u32 full = shared + QUERIES_FULL + 8 * w;
            mbar_wait(shared + QUERIES_EMPTY + 8 * w, parity);
            __syncwarp();
            if (lane == 0) {
                mbar_expect(full, 2 * TILE);
                tma_load(shared + Q + w * TILE, q_map, full, 0, 64 * w, h.head, h.number);
                tma_load(shared + GRAD + w * TILE, dout_map, full, 0, 64 * w, h.head, h.number);
            }
            if (DROPOUT) draw_query_words(shared, key, a, h, w, threshold);
            form_rows(shared, a, h, w, out, lse, dlse, parity ^ 1);
            __syncwarp();
            release(shared + ROWS_FULL + 8 * w);
        }
    } else {  // ---- consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
        const int w = warpgroup(), warp = threadIdx.x / 32 % 4, mine[2] = {w, 3 - w};
        const u32 staged = shared + STAGED + (4 * w + warp) * 2048;
        u32 parity = 0;
        int turn = 0;  // the step's parity
        for (int index = blockIdx.x; index < heads; index += gridDim.x, parity ^= 1) {
            const Head h = head_at(a, index);
            uint2 words[2];
            if (DROPOUT) {
                const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
#pragma unroll
                for (int b = 0; b < 2; ++b) words[b] = draw_key_words(key, a, h, 4 * mine[b] + warp);
            }
            float dk_sum[2][32], dv_sum[2][32];
#pragma unroll
            for (int e = 0; e < 64; ++e) dk_sum[e / 32][e % 32] = dv_sum[e / 32][e % 32] = 0.f;
            int open = key_blocks;  // those behind have left
#pragma unroll 1
            for (int i = query_blocks - 1; i >= 0; --i, turn ^= 1) {
                const Range seen = keys_seen(a, h.offset, i);
                const u32 ds_tile = shared + DS + turn * SLOTS * TILE;
                mbar_wait(shared + QUERIES_FULL + 8 * i, parity);
                mbar_wait(shared + ROWS_FULL + 8 * i, parity);
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    if (mine[b] < seen.begin || mine[b] >= seen.end) continue;
                    mbar_wait(shared + KEYS_FULL + 8 * mine[b], parity);
                    block(shared, a, h.offset, i, mine[b], ds_tile, words[b], dk_sum[b], dv_sum[b]);
                }
                __syncwarp();
                release(shared + QUERIES_EMPTY + 8 * i);
                if (turn == w) {
                    bar_sync(WHOLE + turn, CONSUMERS);
                    float dq[32];
#pragma unroll
                    for (int e = 0; e < 32; ++e) dq[e] = 0.f;
                    for (int j = seen.begin; j < seen.end; ++j) mbar_wait(shared + KEYS_FULL + 8 * j, parity);
                    hold(dq); wgmma_fence();
#pragma unroll 1
                    for (int j = seen.begin; j < seen.end; ++j)
                        product<MN_MAJOR, MN_MAJOR, 64, 64, 64>(dq, ds_tile + j * TILE, shared + K + j * TILE, true);
                    wgmma_commit(); wgmma_wait<0>(); hold(dq);
                    store_warp<0>(dq_map, staged, dq, a.scale * a.keep_scale, 64 * i + 16 * warp, h);
                } else {
                    bar_sync(OWN + w, 128);  // all its warps are through with the dQ before
                    bar_arrive(WHOLE + turn, CONSUMERS);
                }
                const int end = i > 0 ? keys_seen(a, h.offset, i - 1).end : 0;
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const int j = mine[b];
                    if (j < end || j >= open) continue;
                    mbar_wait(shared + KEYS_FULL + 8 * j, parity);
                    // the other step's dS, where nothing of this block is needed
                    const u32 other = shared + DS + (turn ^ 1) * SLOTS * TILE + j * TILE + warp * 2048;
                    store_warp<0>(dv_map, staged, dv_sum[b], a.keep_scale, 64 * j + 16 * warp, h);
                    store_warp<1>(dk_map, other, dk_sum[b], a.scale * a.keep_scale, 64 * j + 16 * warp, h);
                }
                __syncwarp();
                for (; open > end; --open) release(shared + KEYS_EMPTY + 8 * (open - 1));
            }
        }
        if (threadIdx.x % 32 == 0) bulk_wait_read();
    }
}
