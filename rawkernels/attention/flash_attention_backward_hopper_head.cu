// The gradient of self-attention for Hopper in one launch, for up to 256 tokens (without a causal mask: 193 to 256) and heads of
// up to 64 columns. A block computes a whole head at a time, so that dq, dk and dv are complete sums, in a fixed order.
// Constants: scalar = f16, bf16; CAUSAL = true; DROPOUT = false, true
// Constants: scalar = f16, bf16; CAUSAL = false; DROPOUT = false
// Launch:    grid = (min(sequences * heads, SMs),), block = (512,), shared = SHARED bytes; not packed, group = 1
//            dependent: flash_attention_backward_head
// Arch: sm_90a
//
// A head is up to four blocks of 64 queries and as many of keys; a step is a block of queries on a block of keys:
//   S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(S^T c - lse),  dS^T = P^T (dP^T - delta),
//   dV += P^T dO and dK += dS^T Q from registers,  dQ += dS K by way of shared memory.
// Two warpgroups compute dK and dV, everything transposed, each for two blocks of keys in sequence: 3 and 0, 2 and 1, which
// are equally many steps under a causal mask; for each block of keys the queries come from the last block on. S^T of the next
// step, at the end of the next head, overlaps with dV and dK. A third warpgroup computes dQ from the dS of both, alternately.
// Under a causal mask at most two blocks of dQ are incomplete at a time: one of an even and one of an odd number. Without one,
// all four are: the second block of keys goes through the queries in the other direction, so that two stay in registers, and
// the sums of two wait in shared memory. The next head's queries take the stages in the order in which they become free.
// TMA loads blocks into the stages of two rings, queries with dout and keys with values, some of them for the next head. The
// warpgroup of dQ is the last to read a block, so it also issues the loads. The fourth warpgroup computes delta and lse and
// samples dropout's words, 16 rows of every block per warp.
// Dropout is as in flash_attention_backward_hopper.cu: the signs of P^T hold the mask, dS^T is in units of 1 / (1 - p).
#include "attention/common/attention_dropout.cuh"
#include "attention/common/dropout_words.cuh"
#include "common/compiler.cuh"
#include "common/grid_dependency.cuh"
#include "common/math.cuh"
#include "common/mma_sync.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int STAGES = CAUSAL ? 5 : 4;                         // of each ring
constexpr int TILE = 64 * 128, STAGE_BYTES = 2 * TILE;         // bytes of 64 rows; of q and dout, or k and v
constexpr int COMPUTE_REGISTERS = 176, DQ_REGISTERS = 96, ROW_REGISTERS = 64;  // with 512 threads a launch gives 128
static_assert(2 * COMPUTE_REGISTERS + DQ_REGISTERS + ROW_REGISTERS == 4 * 128,
              "flash_attention_backward_hopper_head.cu: setmaxnreg would wait forever");
// Shared memory, in bytes from shared_base() on: two rings; for each computing warpgroup dS of two steps and a staged dV; sums
// of dQ; for each stage lse, delta, words of queries and words of keys; barriers of each stage and each dS.
constexpr int ROW_BYTES = 4 * BOUNDS, KEY_ROW_BYTES = 4 * KEY_WORDS;  // words of 16 queries, of 16 keys
constexpr int WORD_BYTES = DROPOUT ? 4 * ROW_BYTES + 16 : 0, KEY_WORD_BYTES = DROPOUT ? 4 * KEY_ROW_BYTES : 0;
constexpr int QUERIES = 0, KEYS = STAGES * STAGE_BYTES, DS = 2 * KEYS, STAGED = DS + 4 * TILE, SUMS = STAGED + 2 * TILE;
constexpr int SUM_BYTES = 64 * 64 * 4, LSE = SUMS + (CAUSAL ? 0 : 2 * SUM_BYTES);
constexpr int DELTA = LSE + STAGES * 256, WORDS = DELTA + STAGES * 256, WORDS_OF_KEYS = WORDS + STAGES * WORD_BYTES;
constexpr int KEYS_FULL = WORDS_OF_KEYS + STAGES * KEY_WORD_BYTES, QUERIES_FULL = KEYS_FULL + 8 * STAGES;
constexpr int ROWS_FULL = QUERIES_FULL + 8 * STAGES, WORDS_FULL = ROWS_FULL + 8 * STAGES;
constexpr int DS_FULL = WORDS_FULL + 8 * STAGES, DS_EMPTY = DS_FULL + 32;
[[maybe_unused]] constexpr int SHARED = 1024 + DS_EMPTY + 32;
constexpr int DQ_WARPS = 1;  // a named barrier

using Ring = PipelineState<STAGES>;
// The order in which a head's blocks are loaded: queries 3 2 1 0, keys 3 2 0 1.
__device__ __forceinline__ int queries_of(int turn, int blocks) { return blocks - 1 - turn; }
__device__ __forceinline__ int turn_of_queries(int i, int blocks) { return blocks - 1 - i; }
__device__ __forceinline__ int keys_of(int turn, int blocks) {
    return turn < blocks - 2 ? blocks - 1 - turn : turn - max(blocks - 2, 0);
}
__device__ __forceinline__ int turn_of_keys(int j, int blocks) { return j > 1 ? blocks - 1 - j : max(blocks - 2, 0) + j; }
// The place in the ring of the block of queries that is loaded at a turn, after `before` blocks of earlier heads.
__device__ __forceinline__ Ring ring_of_queries(u32 before, int turn) {
    if (CAUSAL) return Ring(before + turn);
    Ring ring;
    ring.parity = before / STAGES % 2;
    ring.stage = ring.parity ? STAGES - 1 - turn : turn;
    return ring;
}
// The last block of queries that sees keys of block j; the first one is j.
__device__ __forceinline__ int last_seeing(const Attention& a, int j, int blocks) {
    return min(blocks - 1, (64 * j + 63 + a.left) / 64);
}
// The queries that a warpgroup begins keys of block j with, and whether it ends them with queries of block i.
__device__ __forceinline__ int first_queries(const Attention& a, int j, int blocks) {
    return CAUSAL ? last_seeing(a, j, blocks) : j > 1 ? blocks - 1 : 0;
}
__device__ __forceinline__ bool is_last(int i, int j) { return i == (CAUSAL ? j : j > 1 ? 0 : 3); }

struct Head { int number, head; };
__device__ __forceinline__ Head head_at(const Attention& a, int index) { return {index / a.heads, index % a.heads}; }

// ---- rows and words: a warp's work for 16 rows of a block
// A lane has chunks lane % 4 and lane % 4 + 4 of rows lane / 4 and lane / 4 + 8, in odd rows the second chunk first, which
// avoids bank conflicts.
__device__ __forceinline__ int chunk_of(int n) { return threadIdx.x % 4 + 4 * ((threadIdx.x / 4 ^ n) & 1); }
struct Rows { uint4 out[2][2]; float lse; };  // out: [row][chunk]; lse: of row `lane`
__device__ __forceinline__ Rows load_rows(const Attention& a, const Head& h, int first, const scalar* out,
                                          const float* lse) {
    const int lane = threadIdx.x % 32, row = first + lane / 4;
    Rows r;
    out += h.number * a.out.batch + h.head * a.out.head + row * a.out.row;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            r.out[i][n] = make_uint4(0, 0, 0, 0);
            if (8 * chunk_of(n) < a.value_dim && row + 8 * i < a.queries)
                r.out[i][n] = *(const uint4*)(out + 8 * i * a.out.row + 8 * chunk_of(n));
        }
    r.lse = NEG_INF;
    if (lane < 16 && first + lane < a.queries)
        r.lse = lse[h.number * (int)a.lse_batch + h.head * (int)a.lse_head + first + lane];
    return r;
}
// Computes delta = rowsum(dout * out) - dlse, times 1 - p, as the diagonal of dout out^T, and lse in base 2, infinite for
// rows without keys or queries. dlse has `queries` rows, or is null.
__device__ __forceinline__ void compute_rows(const Rows& r, u32 to_lse, u32 to_delta, u32 dout, int row0, float keep,
                                          const float* dlse, int queries) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    if (lane < 16) store_shared(to_lse + 4 * lane, __float_as_uint(r.lse == NEG_INF ? INF : r.lse * LOG2E));
    float low[4] = {}, high[4] = {};  // products with the first and the last eight rows of out
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const uint4 x = load_shared_uint4(chunk_address<64>(dout, row0 + row, chunk_of(n)));
        const uint4 y = load_shared_uint4(chunk_address<64>(dout, row0 + row + 8, chunk_of(n)));
        const u32 a[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
        mma(scalar(), low, a[0], r.out[0][n].x, r.out[0][n].y);
        mma(scalar(), low, a[1], r.out[0][n].z, r.out[0][n].w);
        mma(scalar(), high, a[0], r.out[1][n].x, r.out[1][n].y);
        mma(scalar(), high, a[1], r.out[1][n].z, r.out[1][n].w);
    }
    if (lane % 4 != row / 2) return;
    float sum = row % 2 ? low[1] : low[0], further = row % 2 ? high[3] : high[2];
    if (dlse && row < queries) sum -= dlse[row];
    if (dlse && row + 8 < queries) further -= dlse[row + 8];
    store_shared(to_delta + 4 * row, __float_as_uint(sum * keep));
    store_shared(to_delta + 4 * row + 32, __float_as_uint(further * keep));
}
// A row of dropout's table of queries, then of keys, as attention_dropout.cu samples it.
struct Words { uint4 drawn; u32 bounds; };
__device__ __forceinline__ Words sample_query_words(const PhiloxKey& key, u32 row, u32 sheet, u32 threshold) {
    Words words;
    u32 point = 0;
    words.drawn = sample_words(key, row, threadIdx.x % 32, sheet, false, point);
    words.bounds = round_bounds(__ballot_sync(~0u, point != 0), threshold);
    return words;
}
__device__ __forceinline__ void store_words(u32 to, uint4 drawn) {
    store_shared(to + threadIdx.x % 32 * 16, __uint_as_float(drawn.x), __uint_as_float(drawn.y), __uint_as_float(drawn.z),
                 __uint_as_float(drawn.w));
}
__device__ __forceinline__ void sample_key_words(u32 to, const PhiloxKey& key, u32 row, u32 sheet) {
    const u32 lane = threadIdx.x % 32;
    u32 point = 0;  // unused for keys
    const uint4 drawn = sample_words(key, row, lane % 16, sheet, true, point);
    if (lane < 16) store_words(to, drawn);
}

// ---- dK, dV and dQ
// Sets the signs of eight weights, of 16 queries, to the dropout mask.
__device__ __forceinline__ void mark_weights(float* weight, uint4 words, u32 bounds, uint2 key_words) {
    const u32 kept[2] = {kept_bytes(words.x, words.z, key_words.x, bounds),
                         kept_bytes(words.y, words.w, key_words.y, bounds)};
#pragma unroll
    for (int n = 0; n < 8; ++n) weight[n] = mark_dropped(weight[n], kept[n % 2], n / 2);
}

// Whether a block of queries has at most 16: then the other weights are zeros.
__device__ __forceinline__ bool has_few(const Attention& a, int i) { return !CAUSAL && 64 * i + 16 >= a.queries; }

// Turns S^T of query block i (stage q_state) and key block j into P^T.
__device__ __forceinline__ void probabilities(float (&st)[32], u32 shared, const Attention& a, int i, int j,
                                              const Ring& q_state, uint2 key_words) {
    int thread = threadIdx.x % 128;
    thread = opaque(thread);  // otherwise addresses take registers that the accumulators need
    const int lane = thread % 32;
    const u32 lse = shared + LSE + 256 * q_state.stage + lane % 4 * 8;
    const float scale_log2 = a.scale * LOG2E;
    uint4 words;
    u32 bounds;
    const auto weigh = [&](int e) {
        if (DROPOUT && e % 8 == 0) {
            const u32 from = shared + WORDS + q_state.stage * WORD_BYTES;
            words = load_shared_uint4(from + e / 8 * ROW_BYTES + 16 * lane);
            bounds = load_shared(from + 4 * ROW_BYTES + e / 2);
        }
        const float2 x = load_shared_float2(lse + 8 * e);
        st[e] = exp2_fast(st[e] * scale_log2 - x.x);
        st[e + 1] = exp2_fast(st[e + 1] * scale_log2 - x.y);
        st[e + 2] = exp2_fast(st[e + 2] * scale_log2 - x.x);
        st[e + 3] = exp2_fast(st[e + 3] * scale_log2 - x.y);
        if (DROPOUT && e % 8) mark_weights(&st[e - 4], words, bounds, key_words);
    };
#pragma unroll
    for (int e = 0; e < 8; e += 4) weigh(e);
    if (has_few(a, i)) {
#pragma unroll
        for (int e = 8; e < 32; ++e) st[e] = 0.f;
    } else {
#pragma unroll
        for (int e = 8; e < 32; e += 4) weigh(e);
    }
    if (!CAUSAL) {
        const int row = 64 * j + thread / 32 * 16 + lane / 4;
        if (64 * j + 64 > a.keys) {
#pragma unroll
            for (int e = 0; e < 32; ++e)
                if (row + (e & 2) * 4 >= a.keys) st[e] = 0.f;
        }
    } else if (i == j || 64 * j + a.left < 64 * i + 63) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int low = 64 * (j - i) + thread / 32 * 16 + lane / 4 + 8 * r - 2 * (lane % 4), high = low + a.left;
#pragma unroll
            for (int e = 2 * r; e < 32; e += (e & 1) ? 3 : 1) {
                const int column = 8 * (e >> 2) + (e & 1);
                if (column < low || column > high) st[e] = 0.f;
            }
        }
    }
}
// Turns P^T into dS^T, with dP^T and delta.
__device__ __forceinline__ void to_ds(float (&st)[32], const float (&dst)[32], u32 delta) {
    delta += threadIdx.x % 4 * 8;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
        const float2 x = load_shared_float2(delta + 8 * e);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float weight = st[e + n], at_row = n % 2 ? x.y : x.x;
            if (DROPOUT) st[e + n] = __saturatef(weight) * dst[e + n] - fabsf(weight) * at_row;
            else st[e + n] = weight * (dst[e + n] - at_row);
        }
    }
}

// Stores a warp's 16 rows to their 2 KB of a tile.
__device__ __forceinline__ void store_rows(u32 tile, const u32 (&x)[4][4]) {
    u32 thread = threadIdx.x;
    thread = opaque(thread);  // otherwise each address keeps a register
    const u32 first = chunk_address<64>(0, thread % 128 / 32 * 16 + thread % 16, thread / 16 % 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) stmatrix(tile + (first ^ k << 5), x[k]);
}
__device__ __forceinline__ void store_gradient(u32 tile, float (&d)[32], float factor) {
#pragma unroll
    for (int e = 0; e < 32; ++e) d[e] *= factor;
    u32 rounded[4][4];
    pack(rounded, d);
    store_rows(tile, rounded);
}
__device__ __forceinline__ void clear(float (&d)[32]) {
#pragma unroll
    for (int e = 0; e < 32; ++e) d[e] = 0.f;
}

// A thread's sums of dQ, in shared memory between the two blocks of keys of a warpgroup.
__device__ __forceinline__ void add_sums(float (&dq)[32], u32 from) {
    from += threadIdx.x % 128 * 16;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
        const uint4 x = load_shared_uint4(from + e * 512);
        dq[e] += __uint_as_float(x.x), dq[e + 1] += __uint_as_float(x.y);
        dq[e + 2] += __uint_as_float(x.z), dq[e + 3] += __uint_as_float(x.w);
    }
}
__device__ __forceinline__ void move_sums(u32 to, float (&dq)[32]) {
    to += threadIdx.x % 128 * 16;
#pragma unroll
    for (int e = 0; e < 32; e += 4) store_shared(to + e * 512, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
    clear(dq);
}

// Adds dS K of a step to dq; `overlap` runs during the product.
template <typename F>
__device__ __forceinline__ void add_dq(float (&dq)[32], u32 ds_tile, u32 keys, const F& overlap) {
    keep_live(dq); wgmma_fence();
    product<MN_MAJOR, MN_MAJOR, 64, 64, 64>(dq, ds_tile, keys, true);
    wgmma_commit();
    overlap();
    wgmma_wait<0>(); keep_live(dq);
}

// Calls f with dQ of query block i. By a branch, as registers have no index.
template <typename F>
__device__ __forceinline__ void with_one(float (&even)[32], float (&odd)[32], int i, const F& f) {
    if (i % 2) f(odd);
    else f(even);
}

// Loads the two tiles of a head's block into stage `at` of a ring.
__device__ __forceinline__ void load(u32 shared, u32 ring, u32 full, const TensorMap& x_map, const TensorMap& y_map,
                                     const Attention& a, int index, int block, u32 at) {
    const Head h = head_at(a, index);
    const u32 to = shared + ring + at * STAGE_BYTES, bar = shared + full + 8 * at;
    mbar_expect(bar, STAGE_BYTES);
    tma_load(to, x_map, bar, 0, 64 * block, h.head, h.number);
    tma_load(to + TILE, y_map, bar, 0, 64 * block, h.head, h.number);
}

extern "C" __global__ void __launch_bounds__(512, 1) flash_attention_backward_head(
    const __grid_constant__ TensorMap q_map,     // (B, T, H, D); boxes of 64 rows
    const __grid_constant__ TensorMap dout_map,  // (B, T, H, Dv); boxes of 64 rows
    const __grid_constant__ TensorMap k_map,     // (B, T, H, D); boxes of 64 rows
    const __grid_constant__ TensorMap v_map,     // (B, T, H, Dv); boxes of 64 rows
    const __grid_constant__ TensorMap dq_map,    // like q; boxes of 16 rows
    const __grid_constant__ TensorMap dk_map,    // like k; boxes of 16 rows
    const __grid_constant__ TensorMap dv_map,    // like v; boxes of 16 rows
    const __grid_constant__ Attention a,
    const scalar* out,                           // (B, T, H, Dv) by strides, last axis contiguous
    const float* lse,                            // (B, H, T)
    const float* dlse,                           // like lse, or null
    unsigned int threshold, unsigned int seed_low, unsigned int seed_high, unsigned int stream, unsigned int step_number,
    const unsigned int* device_step) {
    grid_dependency_wait();
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(shared + KEYS_FULL + 8 * i, 1);
            mbar_init(shared + QUERIES_FULL + 8 * i, 1);
            mbar_init(shared + ROWS_FULL + 8 * i, 4);
            mbar_init(shared + WORDS_FULL + 8 * i, 4);
        }
        for (int i = 0; i < 4; ++i) {
            mbar_init(shared + DS_FULL + 8 * i, 4);
            mbar_init(shared + DS_EMPTY + 8 * i, 4);
        }
        mbar_init_done();
    }
    __syncthreads();
    const int heads = a.sequences * a.heads, blocks = CAUSAL ? (a.queries + 63) / 64 : 4;
    const int warp = threadIdx.x / 32 % 4;
    u32 before = 0;  // number of blocks of earlier heads

    if (warpgroup() == 3) {  // ---- rows and words
        decrease_registers<ROW_REGISTERS>();
        const PhiloxKey key = DROPOUT ? philox_key(seed_low, seed_high, stream, step_number, device_step) : PhiloxKey();
        const float keep = 1.f / a.keep_scale;
        const int row0 = 16 * warp;  // this warp's first row of every block
        int index = blockIdx.x, turn = 0;
        Ring q_state = ring_of_queries(0, 0);
        Rows rows = load_rows(a, head_at(a, index), 64 * queries_of(0, blocks) + row0, out, lse);
        while (index < heads) {
            const Head h = head_at(a, index);
            const int first = 64 * queries_of(turn, blocks) + row0;
            const u32 sheet = h.number * a.heads + h.head;
            Words words;
            if (DROPOUT) {
                words = sample_query_words(key, first / 16, sheet, threshold);
                mbar_wait(shared + KEYS_FULL + 8 * q_state.stage, q_state.parity);
                __syncwarp();
                sample_key_words(shared + WORDS_OF_KEYS + q_state.stage * KEY_WORD_BYTES + warp * KEY_ROW_BYTES, key,
                               4 * keys_of(turn, blocks) + warp, sheet);
                __syncwarp();
                release(shared + WORDS_FULL + 8 * q_state.stage);
            }
            mbar_wait(shared + QUERIES_FULL + 8 * q_state.stage, q_state.parity);
            __syncwarp();
            if (DROPOUT) {
                const u32 to = shared + WORDS + q_state.stage * WORD_BYTES;
                store_words(to + warp * ROW_BYTES, words.drawn);
                if (threadIdx.x % 32 == 0) store_shared(to + 4 * ROW_BYTES + 4 * warp, words.bounds);
            }
            const u32 to = shared + 256 * q_state.stage + 4 * row0;
            const u32 dout = shared + QUERIES + q_state.stage * STAGE_BYTES + TILE;
            const float* const from = dlse ? dlse + h.number * (int)a.lse_batch + h.head * (int)a.lse_head + first : nullptr;
            compute_rows(rows, to + LSE, to + DELTA, dout, row0, keep, from, a.queries - first);
            __syncwarp();
            release(shared + ROWS_FULL + 8 * q_state.stage);
            q_state.next();
            if (++turn == blocks) turn = 0, index += gridDim.x;
            if (!CAUSAL) {
                if (turn == 0) before += blocks;
                q_state = ring_of_queries(before, turn);
            }
            if (index < heads)
                rows = load_rows(a, head_at(a, index), 64 * queries_of(turn, blocks) + row0, out, lse);
        }
    } else if (warpgroup() == 2) {  // ---- dQ
        decrease_registers<DQ_REGISTERS>();
        // Load block number `turn` of the head, or of the following heads of this thread block.
        const auto load_keys = [&](int index, int turn, u32 at) {
            for (; turn >= blocks; turn -= blocks) index += gridDim.x;
            if (index < heads) load(shared, KEYS, KEYS_FULL, k_map, v_map, a, index, keys_of(turn, blocks), at);
        };
        const auto load_queries = [&](int index, int turn, u32 at) {
            for (; turn >= blocks; turn -= blocks) index += gridDim.x;
            if (index < heads) load(shared, QUERIES, QUERIES_FULL, q_map, dout_map, a, index, queries_of(turn, blocks), at);
        };
        for (int n = 0; threadIdx.x % 128 == 0 && n < STAGES; ++n) {
            if (n == 2) {  // the first blocks are loaded alone, at full bandwidth
                mbar_wait(shared + KEYS_FULL, 0);
                mbar_wait(shared + QUERIES_FULL, 0);
            }
            load_keys(blockIdx.x, n, n);
            load_queries(blockIdx.x, n, n);
        }
        __syncwarp();
        float even[32], odd[32];
        clear(even);
        clear(odd);
        u32 steps[2] = {0, 0}, pending = 0;  // the empty barrier of a tile of dS that TMA still reads, or 0
        for (int index = blockIdx.x; index < heads; index += gridDim.x, before += blocks) {
#pragma unroll 1
            for (int n = 0; n < 2 * (CAUSAL ? blocks + blocks / 4 : 2 * blocks); ++n) {  // step n / 2 of warpgroup n % 2
                const int w = n % 2, first_steps = CAUSAL ? max(blocks - 3 + w, 0) : blocks;
                const bool first = n / 2 < first_steps;
                const int j = first ? 3 - w : w;
                const int i = first ? blocks - 1 - n / 2 : CAUSAL ? blocks - 1 - n / 2 + first_steps : n / 2 - blocks;
                if (CAUSAL && (i < j || i > last_seeing(a, j, blocks))) continue;
                const u32 number = w ? steps[1]++ : steps[0]++, tile = 2 * w + number % 2;
                const Ring k_state(before + turn_of_keys(j, blocks));
                mbar_wait(shared + KEYS_FULL + 8 * k_state.stage, k_state.parity);
                mbar_wait(shared + DS_FULL + 8 * tile, number / 2 & 1);
                const bool last = j == (CAUSAL ? max(min(i, 1), max(0, 64 * i - a.left) / 64) : 1);
                const bool last_of_keys = is_last(i, j);
                const u32 ds_tile = shared + DS + tile * TILE, keys = shared + KEYS + k_state.stage * STAGE_BYTES;
                const auto release_ds = [&] {  // for a tile of dS in which dQ was staged
                    if (!pending || threadIdx.x % 32) return;
                    bulk_wait_read();
                    mbar_arrive(pending);
                };
                with_one(even, odd, i, [&](float (&dq)[32]) { add_dq(dq, ds_tile, keys, release_ds); });
                const u32 sums = shared + SUMS + i % 2 * SUM_BYTES;  // of queries 2 and 3
                if (!CAUSAL && i > 1 && j == 2) with_one(even, odd, i, [&](float (&dq)[32]) { move_sums(sums, dq); });
                pending = last ? shared + DS_EMPTY + 8 * tile : 0;
                if (!last) release(shared + DS_EMPTY + 8 * tile);
                if (!last && !last_of_keys) continue;
                bar_sync(DQ_WARPS, 128);  // these keys and dS have been read: load the block STAGES later
                const int turn_of_i = turn_of_queries(i, blocks), turn_of_j = turn_of_keys(j, blocks);
                const int turn = CAUSAL ? turn_of_i + STAGES : 2 * blocks - 1 - turn_of_i;  // of what takes the queries' stage
                if (threadIdx.x % 128 == 0 && last_of_keys) load_keys(index, turn_of_j + STAGES, k_state.stage);
                if (threadIdx.x % 128 == 32 && last) load_queries(index, turn, ring_of_queries(before, turn_of_i).stage);
                __syncwarp();
                if (!last) continue;
                if (!CAUSAL && i > 1) with_one(even, odd, i, [&](float (&dq)[32]) { add_sums(dq, sums); });
                with_one(even, odd, i, [&](float (&dq)[32]) {
                    store_gradient(ds_tile, dq, a.scale * a.keep_scale);
                    clear(dq);
                });
                fence_async_proxy();
                __syncwarp();
                if (threadIdx.x % 32 == 0) {
                    const Head h = head_at(a, index);
                    tma_store(dq_map, ds_tile + warp * 2048, 0, 64 * i + 16 * warp, h.head, h.number);
                    bulk_commit();
                }
                __syncwarp();
            }
        }
        if (threadIdx.x % 32 == 0) bulk_wait_read();
    } else {  // ---- dK and dV
        increase_registers<COMPUTE_REGISTERS>();
        const int w = warpgroup(), lane = threadIdx.x % 32;
        if (w >= blocks) return;
        const u32 staged = shared + STAGED + w * TILE;
        int index = blockIdx.x, j = blocks > 3 - w ? 3 - w : w, i = first_queries(a, j, blocks);
        const u32 of_lane = WORDS_OF_KEYS + warp * KEY_ROW_BYTES + lane % 4 * 64 + lane / 4 * 4;
        uint2 words = {};
        bool new_keys = true;
        Ring q_state = ring_of_queries(before, turn_of_queries(i, blocks)), k_state(before + turn_of_keys(j, blocks));
        u32 keys = shared + KEYS + k_state.stage * STAGE_BYTES;
        float st[32], dk[32], dv[32];
        clear(dk);
        clear(dv);
        mbar_wait(shared + KEYS_FULL + 8 * k_state.stage, k_state.parity);
        mbar_wait(shared + QUERIES_FULL + 8 * q_state.stage, q_state.parity);
        keep_live(st); wgmma_fence();
        product<K_MAJOR, K_MAJOR, 64, 64, 64>(st, keys, shared + QUERIES + q_state.stage * STAGE_BYTES);
        wgmma_commit(); wgmma_wait<0>(); keep_live(st);
        for (u32 number = 0; index < heads; ++number) {  // S^T is complete
            if (DROPOUT && new_keys) {
                const Ring at(before + turn_of_keys(j, blocks));
                mbar_wait(shared + WORDS_FULL + 8 * at.stage, at.parity);
                const u32 from = shared + of_lane + at.stage * KEY_WORD_BYTES;
                words = {load_shared(from), load_shared(from + 32)};
            }
            const u32 q = shared + QUERIES + q_state.stage * STAGE_BYTES;
            float dst[32];
            keep_live(dst); wgmma_fence();
            product<K_MAJOR, K_MAJOR, 64, 64, 64>(dst, keys + TILE, q + TILE);
            wgmma_commit();
            mbar_wait(shared + ROWS_FULL + 8 * q_state.stage, q_state.parity);
            probabilities(st, shared, a, i, j, q_state, words);
            u32 p[4][4], ds[4][4];
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                const float x = st[2 * n], y = st[2 * n + 1];
                p[n / 4][n % 4] = DROPOUT ? pack_positive(scalar(), x, y) : pack_pair(scalar(), x, y);
            }
            wgmma_wait<0>(); keep_live(dst);
            to_ds(st, dst, shared + DELTA + 256 * q_state.stage);
            pack(ds, st);
            keep_live(dv); keep_live(p); keep_live(dk); keep_live(ds); wgmma_fence();
            product<MN_MAJOR, 64>(dv, p, q + TILE, true);
            product<MN_MAJOR, 64>(dk, ds, q, true);
            wgmma_commit();
            // find the next step and issue its S^T
            const int done = j, of = index;
            const bool complete = is_last(i, j);
            if (complete) {
                if (j == w) index += gridDim.x, before += blocks;
                j = j == w && blocks > 3 - w ? 3 - w : w;
                i = first_queries(a, j, blocks);
                if (index < heads) {
                    q_state = ring_of_queries(before, turn_of_queries(i, blocks));
                    const Ring next_k(before + turn_of_keys(j, blocks));
                    keys = shared + KEYS + next_k.stage * STAGE_BYTES;
                    mbar_wait(shared + KEYS_FULL + 8 * next_k.stage, next_k.parity);
                }
            } else if (CAUSAL) {
                --i;
                q_state.next();
            } else {
                i += j > 1 ? -1 : 1;
                q_state.stage += (j > 1) != q_state.parity ? 1 : -1;
            }
            if (index < heads) mbar_wait(shared + QUERIES_FULL + 8 * q_state.stage, q_state.parity);
            keep_live(st); wgmma_fence();
            product<K_MAJOR, K_MAJOR, 64, 64, 64>(st, keys, shared + QUERIES + q_state.stage * STAGE_BYTES);
            wgmma_commit();
            const u32 tile = 2 * w + number % 2, parity = number / 2 % 2;
            mbar_wait(shared + DS_EMPTY + 8 * tile, parity ^ 1);
            if (lane == 0) bulk_wait_read();  // dK of the previous keys may be staged in this tile
            __syncwarp();
            store_rows(shared + DS + tile * TILE, ds);
            fence_async_proxy();
            wgmma_wait<0>(); keep_live(dk); keep_live(dv); keep_live(p); keep_live(ds); keep_live(st);
            __syncwarp();
            release(shared + DS_FULL + 8 * tile);
            new_keys = complete;
            if (!complete) continue;
            const u32 other = 2 * w + (number + 1) % 2, leaves = shared + DS + other * TILE;
            mbar_wait(shared + DS_EMPTY + 8 * other, ((number + 1) / 2 % 2) ^ 1);
            store_gradient(staged, dv, a.keep_scale);
            store_gradient(leaves, dk, a.scale * a.keep_scale);
            fence_async_proxy();
            __syncwarp();
            const Head h = head_at(a, of);
            const int to = 64 * done + 16 * warp;
            if (lane == 0) {
                tma_store(dv_map, staged + 2048 * warp, 0, to, h.head, h.number);
                tma_store(dk_map, leaves + 2048 * warp, 0, to, h.head, h.number);
                bulk_commit();
            }
            clear(dk);
            clear(dv);
        }
        if (lane == 0) bulk_wait_read();
    }
}
