// Attention for Hopper, out = softmax(scale q k^T) v with its log-sum-exp: wgmma on tiles loaded by TMA, warp-specialized.
// One producer thread schedules tiles, one loads keys and values, one loads queries; each consumer warpgroup has 64 queries
// of a tile. It issues the q k^T of one key block together with the p v of the previous block, then computes the softmax
// while the tensor cores run this p v and the products of the other warpgroups. Warpgroups share only the key blocks: they
// drift apart, so that the prologue and epilogue of one overlap with the products of the others, and each skips the blocks
// that its own queries do not see. Blocks are persistent and take tiles from a counter, since causal tiles differ in length.
// Constants: scalar = bf16, f16; HEAD_DIM = 64; BM = 192; BN = 128; BANDED = false, true; BIAS = false; EXTRAS = false;
//    DROPOUT = false, true
// Constants: scalar = bf16; HEAD_DIM = 64; BM = 256; BN = 64; BANDED = false, true; BIAS = false; EXTRAS = false;
//    DROPOUT = false, true
// Constants: scalar = bf16; HEAD_DIM = 64; BM = 128; BN = 128; BANDED = false, true; BIAS = false; EXTRAS = true;
//    DROPOUT = false, true
// Constants: scalar = bf16; HEAD_DIM = 96, 128; BM = 128; BN = 128; BANDED = false, true; BIAS = false;
//    EXTRAS = false, true; DROPOUT = false, true
// Constants: scalar = f16; HEAD_DIM = 128; BM = 128; BN = 128; BANDED = false, true; BIAS = false; EXTRAS = false, true;
//    DROPOUT = false
// Constants: scalar = bf16; HEAD_DIM = 128; BM = 128; BN = 176; BANDED = false; BIAS = false; EXTRAS = false;
//    DROPOUT = false
// Constants: scalar = bf16; HEAD_DIM = 192; BM = 128; BN = 112; BANDED = false, true; BIAS = false; EXTRAS = false;
//    DROPOUT = false
// Constants: scalar = bf16; HEAD_DIM = 192; BM = 128; BN = 96; BANDED = false, true; BIAS = false; EXTRAS = true;
//    DROPOUT = false, true
// Constants: scalar = bf16; HEAD_DIM = 192; BM = 128; BN = 96; BANDED = false, true; BIAS = false; EXTRAS = false;
//    DROPOUT = true
// Constants: scalar = bf16; HEAD_DIM = 256; BM = 128; BN = 80; BANDED = false, true; BIAS = false; EXTRAS = false, true;
//    DROPOUT = false
// Constants: scalar = bf16; HEAD_DIM = 256; BM = 128; BN = 64; BANDED = false, true; BIAS = false; EXTRAS = false;
//    DROPOUT = true
// Constants: scalar = bf16; HEAD_DIM = 256; BM = 128; BN = 32; BANDED = false, true; BIAS = false; EXTRAS = true;
//    DROPOUT = true
// Constants: scalar = bf16; HEAD_DIM = 64, 96, 128; BM = 128; BN = 128; BANDED = false, true; BIAS = true; EXTRAS = false;
//    DROPOUT = false
// Constants: scalar = f16; HEAD_DIM = 128; BM = 128; BN = 128; BANDED = true; BIAS = true; EXTRAS = false; DROPOUT = false
// Launch:    grid = (min(tiles, SMs),), block = (THREADS,), shared = SHARED_BYTES, *counter = 0 (and is left at 0);
//            tiles = row_blocks * all_heads, see tile_at; maps with boxes of 64 (q, out), BN (k, v) and BM or 1 (bias) rows
// Arch: sm_90a
// HEAD_DIM: both head sizes rounded up
// BM, BN:   queries and keys of a tile
// BANDED:   a causal mask or a window
// BIAS:     a 16-bit bias, and apart from it only a scale > 0 between products and logits
// EXTRAS:   anything between products and logits
// DROPOUT:  a.query_words is not null
#include "attention/common/attention_hopper.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"

static_assert(HEAD_DIM <= 256 && BM % 64 == 0 && BN % 16 == 0, "flash_attention_forward_hopper.cu: tile sizes");
constexpr int WARPGROUPS = BM / 64, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 160 : 112;
constexpr float HUGE = 1 << 27;     // exponents from here on are multiples of 16 as float32
constexpr float LOWEST = -3.4e38f;  // the exponent of a row without logits; finite, so that differences are not NaN
constexpr bool RESCALE_FIRST = HEAD_DIM > 128;  // rescale o before p v instead of after: fewer live registers
// Where p v of a block takes long, the wait for it is placed between the exponentials of the two rows; otherwise ptxas moves
// the wait before all of them.
constexpr bool SPLIT_SOFTMAX = HEAD_DIM == 128 && BN > 128;
constexpr int STAGES = HEAD_DIM <= 64 ? 3 : 2, SLABS = (HEAD_DIM + 63) / 64;
constexpr int Q_BYTES = 64 * SLABS * 128, KV_BYTES = BN * SLABS * 128;  // the queries of a warpgroup; a key block
constexpr int BIAS_SLABS = BIAS || (EXTRAS && BN == 128) ? 2 : 0;  // of 16-bit numbers; a mask of bytes needs one
constexpr int BIAS_BYTES = BM * BIAS_SLABS * 128;
constexpr int WORD_BYTES = DROPOUT && !BIAS_BYTES ? BN * KEY_WORDS / 4 : 0;  // of dropout's table; 0: read from global memory
constexpr int WORD_STAGES = STAGES + 1;  // words are loaded with the keys and read after the keys are released
constexpr bool LATE_DROPOUT = WORD_BYTES && HEAD_DIM > 64;  // with a barrier of their own, awaited after the exponentials
constexpr int OPERANDS = WARPGROUPS * Q_BYTES + STAGES * (2 * KV_BYTES + BIAS_BYTES) + WORD_STAGES * WORD_BYTES;
constexpr bool SEPARATE_OUT = OPERANDS + WARPGROUPS * Q_BYTES <= 224 * 1024;  // otherwise out overwrites q
constexpr int SHARED_BYTES = 2048 + OPERANDS + (SEPARATE_OUT ? WARPGROUPS * Q_BYTES : 0);  // 1024 for shared_base()

// Shared memory, in bytes from shared_base() on.
constexpr int Q_FULL = 0, Q_EMPTY = Q_FULL + 8 * WARPGROUPS, TILE_FULL = Q_EMPTY + 8 * WARPGROUPS, TILE_EMPTY = TILE_FULL + 16;
constexpr int K_BARS = TILE_EMPTY + 16, V_BARS = K_BARS + 16 * STAGES, BIAS_BARS = V_BARS + 16 * STAGES;
constexpr int WORD_BARS = BIAS_BARS + 16 * STAGES;
constexpr int TILE = 512, TILE_WORDS = 8;  // the fields of two tiles: the current and the next
constexpr int Q = 1024, OUT = SEPARATE_OUT ? Q + WARPGROUPS * Q_BYTES : Q;
constexpr int K = OUT + WARPGROUPS * Q_BYTES, V = K + STAGES * KV_BYTES, BIASES = V + STAGES * KV_BYTES;
constexpr int WORDS = BIASES + STAGES * BIAS_BYTES;
static_assert(SHARED_BYTES <= 232448, "flash_attention_forward_hopper.cu: the tiles do not fit in shared memory");

template <int ROWS, int COUNT> __device__ __forceinline__ void load_slabs(u32 tile, const TensorMap& map, u32 bar, int column,
                                                                          int row, int head, int batch, u64 hint,
                                                                          int rows = ROWS, int more = 0) {
    mbar_expect(bar, COUNT * rows * 128 + more);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) tma_load(tile + n * ROWS * 128, map, bar, column + 64 * n, row, head, batch, hint);
}

// A ring of STAGES tiles of ROWS x 64 COUNT numbers, addressed by the number i of the tile since the block started.
template <int BARS, int TILES, int ROWS, int COUNT> struct TileRing {
    u32 shared;
    __device__ __forceinline__ u32 full(int i) const { return shared + BARS + 16 * (i % STAGES); }
    __device__ __forceinline__ u32 empty(int i) const { return full(i) + 8; }
    __device__ __forceinline__ u32 tile(int i) const { return shared + TILES + i % STAGES * (ROWS * COUNT * 128); }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) { mbar_init(full(i), 1); mbar_init(empty(i), 4 * WARPGROUPS); }
    }
    template <int SOME = COUNT>
    __device__ __forceinline__ void load(int i, const TensorMap& map, int column, int row, int head, int batch,
                                         u64 hint, int rows = ROWS, int more = 0) const {
        mbar_wait(empty(i), (i / STAGES & 1) ^ 1);
        load_slabs<ROWS, SOME>(tile(i), map, full(i), column, row, head, batch, hint, rows, more);
    }
    __device__ __forceinline__ void wait(int i) const { mbar_wait(full(i), i / STAGES & 1); }
    __device__ __forceinline__ void done(int i) const { release(empty(i)); }
    __device__ __forceinline__ void pass(int i) const { wait(i); __syncwarp(); done(i); }  // before a lane could miss the phase
};
using Keys = TileRing<K_BARS, K, BN, SLABS>;
using Values = TileRing<V_BARS, V, BN, SLABS>;
using Biases = TileRing<BIAS_BARS, BIASES, BM, BIAS_SLABS>;
__device__ __forceinline__ u32 words_tile(u32 shared, int i) { return shared + WORDS + i % WORD_STAGES * WORD_BYTES; }
__device__ __forceinline__ u32 words_full(u32 shared, int i) {
    return LATE_DROPOUT ? shared + WORD_BARS + 8 * (i % WORD_STAGES) : Keys{shared}.full(i);
}
__device__ __forceinline__ void wait_for_words(u32 shared, int i) { mbar_wait(words_full(shared, i), i / WORD_STAGES & 1); }

__device__ __forceinline__ void publish_tile(u32 shared, int round, const Tile& t, int first_key) {
    const int word[TILE_WORDS] = {t.first, t.head, t.number, t.queries, t.keys, t.offset, t.first_query, first_key};
#pragma unroll
    for (int n = 0; n < TILE_WORDS; ++n) store_shared(shared + TILE + 64 * (round & 1) + 4 * n, word[n]);
    mbar_arrive(shared + TILE_FULL + 8 * (round & 1));
}
__device__ __forceinline__ Tile receive_tile(u32 shared, int round, int& first_key) {
    int word[TILE_WORDS];
    mbar_wait(shared + TILE_FULL + 8 * (round & 1), round / 2 & 1);
#pragma unroll
    for (int n = 0; n < TILE_WORDS; ++n) word[n] = load_shared(shared + TILE + 64 * (round & 1) + 4 * n);
    first_key = word[7];
    return {word[0], word[1], word[2], word[3], word[4], word[5], word[6]};
}
// The barrier at which a reader of the fields arrives.
__device__ __forceinline__ u32 tile_read(u32 shared, int round, const Tile& t, const Attention& a) {
    const u32 loaded = t.first | t.head | t.number | t.queries | t.keys | t.offset | t.first_query;
    return freed(shared + TILE_EMPTY + 8 * (round & 1), loaded, unknown_zero(a.queries));
}

// The rotation of a tile's groups of 64 queries over the warpgroups. Tiles that are not full are rotated, so that short
// sequences occupy all warpgroups.
__device__ __forceinline__ int rotation(const Tile& t, int round) {
    return t.first + BM > t.queries ? round % WARPGROUPS : 0;
}

// A thread's state of a tile, for its two rows.
struct Rows {
    float o[HEAD_DIM / 2], total[2];  // output and sum of weights (this thread's share), in units of 2^shift
    float correction[2];              // factor of o and total when the maximum changes
    float peak[2], shift[2];          // the largest logit; its exponent
    float unit, exact[2];             // the exponent of a logit of 1, and the one in use
    u32 p[BN / 16][4];
    int i;                            // the query of the first row; that of the second is i + 8
    QueryWords words;  // of dropout
};

// The next power of two from x on: products with it are exact.
__device__ __forceinline__ float power_above(float x) {
    return __uint_as_float((__float_as_uint(x) + 0x7fffff) & 0x7f800000);
}

// Updates a row's maximum, and the correction for what was summed with the old maximum. shift is rounded, differences from it
// are not: up to HUGE their exponentials are finite. Beyond HUGE logits are equal or far apart, and a larger unit does not
// change the weights.
__device__ __forceinline__ void update_maximum(Rows& rows, const float (&s)[BN / 2], int r) {
    float even = rows.peak[r], odd = NEG_INF;
#pragma unroll
    for (int e = 2 * r; e < BN / 2; e += 4) { even = fmaxf(even, s[e]); odd = fmaxf(odd, s[e + 1]); }
    float peak = fmaxf(even, odd);
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float coarse = power_above(rows.unit);
    const bool huge = fabsf(peak) > HUGE / coarse;  // both cases are computed: this is on the critical path
    rows.exact[r] = huge ? coarse : rows.unit;
    rows.shift[r] = fmaxf(huge ? peak * coarse : peak * rows.unit, LOWEST);
    rows.correction[r] = exp2_fast(fmaf(rows.peak[r], rows.exact[r], -rows.shift[r]));
    rows.peak[r] = peak;
}
__device__ __forceinline__ void exponentiate(Rows& rows, float (&s)[BN / 2], int r) {  // logits to weights
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int e = 2 * r; e < BN / 2; e += 4) {
        even += s[e] = exp2_fast(fmaf(s[e], rows.exact[r], -rows.shift[r]));
        odd += s[e + 1] = exp2_fast(fmaf(s[e + 1], rows.exact[r], -rows.shift[r]));
    }
    rows.total[r] = rows.total[r] * rows.correction[r] + (even + odd);
}
__device__ __forceinline__ void rescale(Rows& rows) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 2; ++e) rows.o[e] *= rows.correction[row_of(e)];
}

// Loads a thread's elements of the bias (BIAS) while the products run.
__device__ __forceinline__ void load_bias(u32 (&bias)[BN / 16][4], const Rows& rows, const Attention& a, const Tile& t,
                                          u32 shared, int used) {
    if (!BIAS) return;
    const Biases biases{shared};
    biases.wait(used);
    u32 loaded = 0;
#pragma unroll
    for (int k = 0; k < BN / 16; ++k) {
        load_staged_bias<BM>(bias[k], biases.tile(used), rows.i - t.first - threadIdx.x % 32 / 4, a.bias.row ? ~0 : 0, k);
        loaded |= bias[k][0];
    }
    __syncwarp();
    release(freed(biases.empty(used), loaded, unknown_zero(a.queries)));
}

// Turns the products of key block n, number `used` in the ring, into weights, of both rows or (SPLIT_SOFTMAX) of the first.
// edge: the block needs the mask.
__device__ __forceinline__ void softmax(Rows& rows, float (&s)[BN / 2], const u32 (&bias)[BN / 16][4], const Attention& a,
                                      const Tile& t, u32 shared, int used, int n, bool edge, int bias_by_tma) {
    float factor = a.scale;
    if (EXTRAS) {
        const bool staged = BIAS_BYTES && bias_by_tma;
        const Biases biases{shared};
        if (staged) biases.wait(used);
        factor = to_logits<BM, (BIAS_BYTES > 0)>(s, a, t, rows.i, n * BN, staged ? biases.tile(used) : 0);
        if (staged) { __syncwarp(); biases.done(used); }
    }
    if (BIAS) {
#pragma unroll
        for (int k = 0; k < BN / 16; ++k) add_packed_bias(s, factor, bias[k], k);
        factor = 1.f;
    }
    if (edge) {
        const int first = n * BN + fragment_column(0);            // this thread's first column
        const int at = rows.i + t.offset - first;                 // what follows is relative to it
        const int end = t.keys - first, right = at + a.right + 1, left = at - a.left;
        if (BANDED) mask_from(s, min(end, right), min(end, right + 8));
        else mask_from(s, end, end);
        if (BANDED && a.left < 1 << 30) mask_below(s, left, left + 8);
    }
    rows.unit = factor * LOG2E;
    update_maximum(rows, s, 0);
    update_maximum(rows, s, 1);
    exponentiate(rows, s, 0);
    if (!SPLIT_SOFTMAX) exponentiate(rows, s, 1);
}
// Applies dropout to the packed weights.
__device__ __forceinline__ void apply_dropout(Rows& rows, const Attention& a, const Tile& t, u32 shared, int used, int n) {
    const int lane = threadIdx.x % 32;
    const u32 words = words_tile(shared, used) + 8 * lane;
    const uint2* const rows_read = (const uint2*)(key_words(a, t.number, t.head) + n * (BN / 16) * KEY_WORDS) + lane;
#pragma unroll
    for (int k = 0; k < BN / 16; ++k) {
        const uint2 key = WORD_BYTES ? load_shared_uint2(words + 4 * k * KEY_WORDS) : __ldg(rows_read + k * KEY_WORDS / 2);
        apply_dropout(rows.p[k], rows.words, key);
    }
}
__device__ __forceinline__ void pack_weights(Rows& rows, float (&s)[BN / 2], const Attention& a, const Tile& t, u32 shared,
                                             int used, int n) {
    if (SPLIT_SOFTMAX) exponentiate(rows, s, 1);
    pack(rows.p, s);
    if (DROPOUT) apply_dropout(rows, a, t, shared, used, n);
}
// Issues o += p v.
__device__ __forceinline__ void add_values(Rows& rows, u32 shared, int used) {
    const Values values{shared};
    if (!SPLIT_SOFTMAX) values.wait(used);
    if (RESCALE_FIRST) rescale(rows);
    keep_live(rows.o); keep_live(rows.p); wgmma_fence();
    product<MN_MAJOR, BN>(rows.o, rows.p, values.tile(used), true);
    wgmma_commit();
}

// A key block: its q k^T together with the p v of the previous block, whose values have number `used` in the ring.
__device__ __forceinline__ void step(Rows& rows, const Attention& a, const Tile& t, u32 shared, u32 q, int used, int n,
                                     bool edge, int bias_by_tma) {
    const Keys keys{shared};
    float s[BN / 2];
    keys.wait(used + 1);
    keep_live(s); wgmma_fence();
    product<K_MAJOR, K_MAJOR, 64, BN, HEAD_DIM>(s, q, keys.tile(used + 1));
    wgmma_commit();
    add_values(rows, shared, used);
    u32 bias[BN / 16][4];
    load_bias(bias, rows, a, t, shared, used + 1);
    wgmma_wait<1>(); keep_live(s);  // the logits are complete; p v still runs
    keys.done(used + 1);
    softmax(rows, s, bias, a, t, shared, used + 1, n, edge, bias_by_tma);
    if (SPLIT_SOFTMAX) Values{shared}.wait(used + 1);  // ptxas moves nothing across the branch of a wait
    if (LATE_DROPOUT) wait_for_words(shared, used + 1);
    wgmma_wait<0>(); keep_live(rows.o); keep_live(rows.p);
    Values{shared}.done(used);
    pack_weights(rows, s, a, t, shared, used + 1, n);
    if (!RESCALE_FIRST) rescale(rows);
}

// Stores those of this warpgroup's 64 rows that its sequence has, from the staged tile; zeros if staged is 0.
__device__ __forceinline__ void store_rows(scalar* out, const Attention& a, const Tile& t, int first, u32 staged) {
    const int chunks = a.value_dim / 8, count = min(64, t.queries - first);
    out += (a.cu_q ? 0 : t.number) * a.out.batch + (t.first_query + first) * a.out.row + t.head * a.out.head;
    for (int c = threadIdx.x % 128; c < count * chunks; c += 128) {
        const int row = c / chunks, chunk = c % chunks;
        const u32 address = chunk_address<64>(staged, row, chunk);
        uint4 x = {0, 0, 0, 0};
        if (staged) x = {load_shared(address), load_shared(address + 4), load_shared(address + 8), load_shared(address + 12)};
        *(uint4*)(out + row * a.out.row + 8 * chunk) = x;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_attention_forward_hopper(
    const Attention a,
    const __grid_constant__ TensorMap q_map,     // (B, T, H, D), or (tokens, H, D) with cu_q
    const __grid_constant__ TensorMap k_map,     // (B, S, Hk, D)
    const __grid_constant__ TensorMap v_map,     // (B, S, Hk, Dv)
    const __grid_constant__ TensorMap out_map,   // (B, T, H, Dv)
    const __grid_constant__ TensorMap bias_map,  // (B, T, H, S) if bias_by_tma: 16 bits or a mask
    scalar* __restrict__ out,
    float* __restrict__ lse,                     // (B, H, T)
    int* __restrict__ counter, int row_blocks, int all_heads, int section, int bias_by_tma) {
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);  // otherwise the main loop recomputes it from a special register
    const Keys keys{shared};
    const Values values{shared};
    const Biases biases{shared};
    if (threadIdx.x == 0) {
        keys.init(); values.init(); biases.init();
        for (int i = 0; LATE_DROPOUT && i < WORD_STAGES; ++i) mbar_init(words_full(shared, i), 1);
        for (int w = 0; w < WARPGROUPS; ++w) { mbar_init(shared + Q_FULL + 8 * w, 1); mbar_init(shared + Q_EMPTY + 8 * w, 4); }
        for (int i = 0; i < 2; ++i) {
            mbar_init(shared + TILE_FULL + 8 * i, 1);
            mbar_init(shared + TILE_EMPTY + 8 * i, 4 * WARPGROUPS + 2);  // the consumers' warps and both loading threads
        }
        mbar_init_done();
    }
    __syncthreads();

    if (warpgroup() == WARPGROUPS) {  // ------------------------------------------------------- producers
        decrease_registers<PRODUCER_REGISTERS>();
        int first_key = 0;
        if (threadIdx.x == CONSUMERS) {  // schedules tiles, one ahead of the loads
            const int tiles = row_blocks * all_heads;
            const bool biased = (BIAS || EXTRAS) && a.bias_kind;
            const bool across = biased && !a.cu_q && !a.bias.batch && a.bias.head;  // sequences share the bias, heads do not
            const auto next = [&] {
                const int taken = atomicAdd(counter, 1);
                if (taken == tiles - 1) *counter = 0;  // one request per tile: the last one resets
                return (int)gridDim.x + taken;
            };
            int index = blockIdx.x;
            for (int round = 0;; ++round) {
                mbar_wait(shared + TILE_EMPTY + 8 * (round & 1), (round / 2 & 1) ^ 1);
                if (round > 0) index = next();
                Tile t = {-1};
                while (index < tiles && !tile_at<BM>(a, index, row_blocks, all_heads, section, across, t, first_key))
                    index = next();
                if (index >= tiles) t.first = -1;
                publish_tile(shared, round, t, first_key);
                if (t.first < 0) break;
            }
        } else if (threadIdx.x == CONSUMERS + 32) {  // loads keys, values and bias
            int loaded = 0;
            for (int round = 0;; ++round) {
                const Tile t = receive_tile(shared, round, first_key);
                if (t.first < 0) break;
                const Range range = key_range<BANDED, BM, BN>(a, t, t.first);
                const int kv_head = t.head / a.group, batch = a.cu_q ? 0 : t.number;
                const u32* const words = WORD_BYTES ? key_words(a, t.number, t.head) : nullptr;
                const auto load_keys = [&](int i, int n) {
                    const int with_words = LATE_DROPOUT ? 0 : WORD_BYTES;
                    keys.load(i, k_map, 0, first_key + n * BN, kv_head, batch, L2_EVICT_LAST, BN, with_words);
                    if (LATE_DROPOUT) mbar_expect(words_full(shared, i), WORD_BYTES);
                    if (WORD_BYTES)
                        bulk_load(words_tile(shared, i), words + n * (WORD_BYTES / 4), WORD_BYTES, words_full(shared, i));
                    if (!BIAS_BYTES || !bias_by_tma) return;
                    const int head = a.bias.head ? t.head : 0, number = a.bias.batch ? t.number : 0;
                    const int row = a.bias.row ? t.first : 0, rows = a.bias.row ? BM : 1;
                    if (a.bias_kind == 1) biases.load<1>(i, bias_map, n * (BN / 2), row, head, number, L2_NORMAL, rows);
                    else biases.load(i, bias_map, n * BN, row, head, number, L2_NORMAL, rows);
                };
                if (range.begin < range.end) load_keys(loaded, range.end - 1);
                for (int n = range.end - 1; n >= range.begin; --n, ++loaded) {  // from the last block to the first
                    if (n > range.begin) load_keys(loaded + 1, n - 1);  // values follow one block later
                    values.load(loaded, v_map, 0, first_key + n * BN, kv_head, batch, L2_EVICT_LAST);
                }
                mbar_arrive(shared + TILE_EMPTY + 8 * (round & 1));  // only now: a tile is not taken before it can be loaded
            }
        } else if (threadIdx.x == CONSUMERS + 64) {  // loads queries
            u32 loaded = 0;  // bit w: the parity of warpgroup w's loads
            for (int round = 0;; ++round) {
                const Tile t = receive_tile(shared, round, first_key);
                mbar_arrive(tile_read(shared, round, t, a));
                if (t.first < 0) break;
                int w = (WARPGROUPS - rotation(t, round)) % WARPGROUPS;  // the warpgroup of the first 64 queries
                for (int first = t.first; first < min(t.first + BM, t.queries); first += 64) {
                    mbar_wait(shared + Q_EMPTY + 8 * w, (loaded >> w & 1) ^ 1);
                    load_slabs<64, SLABS>(shared + Q + w * Q_BYTES, q_map, shared + Q_FULL + 8 * w, 0, t.first_query + first,
                                          t.head, a.cu_q ? 0 : t.number, L2_EVICT_FIRST);
                    loaded ^= 1 << w;
                    w = (w + 1) % WARPGROUPS;
                }
            }
        }
    } else {  // ------------------------------------------------------------------------------- consumers
        increase_registers<CONSUMER_REGISTERS>();
        const int w = warpgroup();
        // Without SEPARATE_OUT, q and staged are the same address. It is computed in two ways, because otherwise q is not in
        // a uniform register for wgmma.
        const u32 q = shared + Q + w * Q_BYTES, staged = shared + OUT + (SEPARATE_OUT ? w : threadIdx.x / 128) * Q_BYTES;
        const u32 q_full = shared + Q_FULL + 8 * w, q_empty = shared + Q_EMPTY + 8 * w;
        int used = 0;   // value blocks processed; also the number of the next key block
        int taken = 0;  // tiles in which this warpgroup had queries
        for (int round = 0;; ++round) {
            int first_key;
            const Tile t = receive_tile(shared, round, first_key);
            __syncwarp();
            release(tile_read(shared, round, t, a));
            if (t.first < 0) break;
            const int first = t.first + 64 * ((w + rotation(t, round)) % WARPGROUPS);
            const Range loaded = key_range<BANDED, BM, BN>(a, t, t.first), range = key_range<BANDED, 64, BN>(a, t, first);
            const bool any = range.begin < range.end;
            int n = loaded.end - 1;
            const auto pass_to = [&](int last) {  // skips blocks that only other warpgroups see
#pragma unroll 1
                for (; n >= last; --n, ++used) {
                    keys.pass(used);
                    values.pass(used);
                    if (BIAS_BYTES && bias_by_tma) biases.pass(used);
                }
            };
            pass_to(any ? range.end : loaded.begin);
            if (first >= t.queries) continue;
            mbar_wait(q_full, taken++ & 1);
            Rows rows;
            rows.i = first + fragment_row(0);
#pragma unroll
            for (int r = 0; r < 2; ++r) { rows.peak[r] = NEG_INF; rows.total[r] = 0.f; }
            rows.unit = 1.f;
            if (DROPOUT) rows.words = query_words_of_lane(a, t, rows.i);
            if (any) {
#pragma unroll
                for (int e = 0; e < HEAD_DIM / 2; ++e) rows.o[e] = 0.f;
                keys.wait(used);
                {
                    float s[BN / 2];
                    keep_live(s); wgmma_fence();
                    product<K_MAJOR, K_MAJOR, 64, BN, HEAD_DIM>(s, q, keys.tile(used));
                    wgmma_commit();
                    u32 bias[BN / 16][4];
                    load_bias(bias, rows, a, t, shared, used);
                    wgmma_wait<0>(); keep_live(s);
                    keys.done(used);
                    softmax(rows, s, bias, a, t, shared, used, n, true, bias_by_tma);
                    if (SPLIT_SOFTMAX) values.wait(used);
                    if (LATE_DROPOUT) wait_for_words(shared, used);
                    pack_weights(rows, s, a, t, shared, used, n);
                }
                const int past = range.end * BN - t.keys;
                if (past > 0 && (a.cu_q || a.key_lengths)) {  // these rows may hold NaN, and 0 * NaN is NaN
                    values.wait(used);
                    for (int c = threadIdx.x % 128; c < past * 8; c += 128)
#pragma unroll
                        for (int slab = 0; slab < SLABS; ++slab)
                            store_shared(values.tile(used) + (slab * BN + BN - past) * 128 + c * 16, 0.f, 0.f, 0.f, 0.f);
                    fence_async_proxy();
                    bar_sync(1 + w, 128);
                }
                --n;
                if (!BANDED || BIAS || EXTRAS || HEAD_DIM > 128) {  // no mask, or one copy of a long loop body
#pragma unroll 1
                    for (; n >= range.begin; --n, ++used)
                        step(rows, a, t, shared, q, used, n, BANDED && (n >= range.inner_end || n < range.inner_begin),
                             bias_by_tma);
                } else {  // a copy of the loop body for blocks that need the mask, before and after the others
#pragma unroll 1
                    for (int stop = max(range.begin, range.inner_end);; stop = range.begin) {
#pragma unroll 1
                        for (; n >= stop; --n, ++used) step(rows, a, t, shared, q, used, n, true, bias_by_tma);
                        if (n < range.begin) break;
#pragma unroll 1
                        for (; n >= max(range.begin, range.inner_begin); --n, ++used)
                            step(rows, a, t, shared, q, used, n, false, bias_by_tma);
                    }
                }
                if (SEPARATE_OUT) release(q_empty);
                add_values(rows, shared, used);
                wgmma_wait<0>(); keep_live(rows.o);
                values.done(used++);
                pass_to(loaded.begin);
            } else if (SEPARATE_OUT) { __syncwarp(); release(q_empty); }

#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& total = rows.total[r];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                float top = fmaxf(rows.peak[r] * rows.unit, LOWEST), factor = a.keep_scale;
                if (a.sink) {  // one more key, with a value of zero
                    const float sink = a.sink[t.head] * LOG2E, before = top;
                    top = fmaxf(top, sink);
                    const float correction = exp2_fast(before - top);
                    total = total * correction + exp2_fast(sink - top);
                    factor *= correction;
                }
                if (threadIdx.x % 4 == 0 && rows.i + 8 * r < t.queries)
                    lse[(a.cu_q ? 0 : t.number) * a.lse_batch + t.head * a.lse_head + t.first_query + rows.i + 8 * r] =
                        total > 0.f ? top * LN2 + logf(total) : NEG_INF;
                rows.correction[r] = total > 0.f ? factor / total : 0.f;
            }
            const bool whole = any && (!a.cu_q || first + 64 <= t.queries);
            if (any) {
                rescale(rows);
                u32 rounded[HEAD_DIM / 16][4];
                pack(rounded, rows.o);
                if (threadIdx.x % 128 == 0) bulk_wait_read();  // the previous tile has been stored
                bar_sync(1 + w, 128);
                store_tile<64>(staged, threadIdx.x % 128 / 32 * 16, rounded);
                fence_async_proxy();
                bar_sync(1 + w, 128);
            }
            if (!whole) store_rows(out, a, t, first, any ? staged : 0);
            if (whole && threadIdx.x % 128 == 0) {
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)  // TMA skips rows past T and columns past Dv
                    tma_store(out_map, staged + slab * 64 * 128, 64 * slab, t.first_query + first, t.head,
                              a.cu_q ? 0 : t.number);
                bulk_commit();
                if (!SEPARATE_OUT) bulk_wait_read();
            }
            if (!SEPARATE_OUT) { __syncwarp(); release(q_empty); }  // the first warp arrives after TMA has read
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read();
    }
}
