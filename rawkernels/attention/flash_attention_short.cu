// Attention for short sequences, forward and backward. A warp computes 16 queries (or 16 keys) of one head independently:
// operands are loaded from global memory to registers in the layout of mma.sync, so there is no shared memory, no barrier and
// no atomic, and many small problems are in flight on every multiprocessor.
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 64, 128 (both head sizes rounded up); PLAIN = false, true
// Constants below sm_80: scalar = f16; HEAD_DIM = 32, 64, 128; PLAIN = false, true
// Launch:    grid = (ceil(items * heads / WARPS),), block = (32 * WARPS,), no shared memory; heads: those of q
//            forward, those of k backward. items: tiles of 16 rows, see task_at. PLAIN: head sizes are HEAD_DIM; no
//            bias, ALiBi or softcap. Rows are aligned to 16 bytes, arrays have at most 2^31 elements, head sizes are
//            multiples of 8.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_dropout.cuh"
#include "common/global_memory.cuh"
#include "common/math.cuh"
#include "common/mma.cuh"

static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128, "flash_attention_short.cu: HEAD_DIM is 32, 64, 128");
constexpr int WARPS = 4, TILE = 16;
// blocks per multiprocessor, at least: as many as registers allow without spills
constexpr int FORWARD_BLOCKS = HEAD_DIM == 128 ? 2 : HEAD_DIM == 64 ? (PLAIN ? 4 : 2) : (PLAIN ? 5 : 4);
constexpr bool ADA = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890;
constexpr int BACKWARD_BLOCKS = HEAD_DIM == 128 ? 2 : HEAD_DIM == 64 ? (PLAIN && !ADA ? 3 : 2) : 3;
constexpr int UNLIMITED = 1 << 30;  // a side of the window without a limit

// ---- operands ---------------------------------------------------------------------------------
// g = lane / 4 and t = lane % 4, as in mma.cuh. A sum over columns may use any order that is the same in both operands, and
// accumulators may hold columns in any order: with the orders here every load and store has 16 bytes (8 if HEAD_DIM is 32).

template <int WORDS> __device__ __forceinline__ void load(u32* x, const scalar* from, bool there) {
    if constexpr (WORDS == 4) {
        const uint4 y = there ? __ldg((const uint4*)from) : make_uint4(0, 0, 0, 0);
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
        const uint2 y = there ? __ldg((const uint2*)from) : make_uint2(0, 0);
        x[0] = y.x, x[1] = y.y;
    }
}

// 16 rows of one head in global memory. Rows past `last`, the last one that exists, repeat it; they get a weight of 0.
// Columns past `width` are zeros.
struct Tile {
    const scalar* rows;
    int stride, last, width;
    __device__ __forceinline__ const scalar* row(int r) const { return advance(rows, min(r, last) * stride); }
    __device__ __forceinline__ bool has(int column) const { return PLAIN || column < width; }
};

// COLUMNS columns of a tile as the axis summed over: operand a, or b of two products (columns of b are rows of the tile).
// x[c][half]: row g + 8 half, columns 32 c + 8 t .. + 7.
template <int COLUMNS> struct Rows {
    u32 x[COLUMNS / 32][2][4];
    __device__ __forceinline__ void load_from(const Tile& tile, int first) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const scalar* row = tile.row(lane / 4 + 8 * half) + lane % 4 * 8;
#pragma unroll
            for (int c = 0; c < COLUMNS / 32; ++c)
                load<4>(x[c][half], row + first + 32 * c, tile.has(first + 32 * c + lane % 4 * 8));
        }
    }
};

// d[n] += a b^T for the 16 rows of a and rows 8 n .. 8 n + 7 of b.
template <int COLUMNS>
__device__ __forceinline__ void multiply(float (&d)[2][4], const Rows<COLUMNS>& a, const Rows<COLUMNS>& b) {
#pragma unroll
    for (int c = 0; c < COLUMNS / 32; ++c)
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            const u32 operand[4] = {a.x[c][0][w], a.x[c][1][w], a.x[c][0][w + 1], a.x[c][1][w + 1]};
            mma(scalar(), d[0], operand, b.x[c][0][w], b.x[c][0][w + 1]);
            mma(scalar(), d[1], operand, b.x[c][1][w], b.x[c][1][w + 1]);
        }
}

// A tile as operand b of products that sum over its rows, in VECTORS vectors of VECTOR columns: vector m of rows 2t, 2t+1,
// 2t+8, 2t+9. Column g of product m VECTOR + k is column 64 m + VECTOR (g / 2 + 4 (g % 2)) + k of the tile.
constexpr int VECTOR = HEAD_DIM == 32 ? 4 : 8, VECTORS = HEAD_DIM == 128 ? 2 : 1;
using Sum = float[HEAD_DIM / 8][4];

struct Columns {
    u32 y[4][VECTOR / 2];
    __device__ __forceinline__ void load_from(const Tile& tile, int m) {
        const int lane = threadIdx.x % 32, g = lane / 4, column = 64 * m + VECTOR * (g / 2 + g % 2 * 4);
#pragma unroll
        for (int r = 0; r < 4; ++r)
            load<VECTOR / 2>(y[r], tile.row(lane % 4 * 2 + r % 2 + r / 2 * 8) + column, tile.has(column));
    }
};

// sum += a b for vector m.
__device__ __forceinline__ void multiply(Sum& sum, const u32 (&a)[4], const Columns& b, int m) {
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        const u32 halves = k % 2 ? 0x7632 : 0x5410;
        mma(scalar(), sum[m * VECTOR + k], a, __byte_perm(b.y[0][k / 2], b.y[1][k / 2], halves),
            __byte_perm(b.y[2][k / 2], b.y[3][k / 2], halves));
    }
}
__device__ __forceinline__ void multiply(Sum& sum, const u32 (&a)[4], const Tile& tile) {
#pragma unroll
    for (int m = 0; m < VECTORS; ++m) {
        Columns b;
        b.load_from(tile, m);
        multiply(sum, a, b, m);
    }
}

// Stores factor[half] * sum to the first `count` of 16 rows.
__device__ __forceinline__ void store(scalar* rows, int stride, int count, int width, const float (&factor)[2],
                                      const Sum& sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        if (row >= count) continue;
        scalar* to = advance(rows, row * stride + VECTOR * (lane % 4));
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int m = 0; m < VECTORS; ++m) {
                const int column = 64 * m + VECTOR * 4 * e;
                if (!PLAIN && column + VECTOR * (lane % 4) >= width) continue;
                u32 x[VECTOR / 2];
#pragma unroll
                for (int w = 0; w < VECTOR / 2; ++w)
                    x[w] = pack_pair(scalar(), factor[half] * sum[m * VECTOR + 2 * w][2 * half + e],
                                     factor[half] * sum[m * VECTOR + 2 * w + 1][2 * half + e]);
                if constexpr (VECTOR == 8) *(uint4*)(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
                else *(uint2*)(to + column) = make_uint2(x[0], x[1]);
            }
    }
}

// The transpose of a 16 x 16 operand a.
__device__ __forceinline__ void transpose(u32 (&to)[4], const u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = movmatrix(a[i % 2 * 2 + i / 2]);
}

// ---- work -------------------------------------------------------------------------------------

// Tile `tile` of a head of a sequence.
struct Task { int number, head, tile; };

// The first item of a packed sequence. It has at least as many items as tiles of queries (and, if `both`, of keys).
__device__ __forceinline__ int first_item(const Attention& a, int number, bool both) {
    return (a.cu_q[number] + (both && a.cu_k != a.cu_q ? a.cu_k[number] : 0)) / TILE + number;
}

// The task of this warp. A head has `items` items, `tiles` per sequence; if 0, sequence b has the items from first_item(b) on.
__device__ __forceinline__ Task task_at(const Attention& a, int items, int tiles, int heads, bool both) {
    const unsigned warp = blockIdx.x * WARPS + __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int head = warp % heads, item = warp / heads;  // the heads of a row are adjacent in memory
    if (tiles) return {(int)((unsigned)item / tiles), head, (int)((unsigned)item % tiles)};
    if (item >= items) return {0, head, item};
    int first = 0, count = a.sequences;  // the range of sequences to search, 32 at a time
    while (count > 1) {
        const int step = (count + 31) / 32;
        const bool started = (int)lane * step < count && first_item(a, first + lane * step, both) <= item;
        const int last = (__popc(__ballot_sync(~0u, started)) - 1) * step;
        first += last;
        count = min(step, count - last);
    }
    return {first, head, item - first_item(a, first, both)};
}

// Arrays have at most 2^31 elements: 32-bit offsets take a fraction of the instructions.
__device__ __forceinline__ int offset_of(const Strides& s, int number, int row, int head) {
    return number * (int)s.batch + row * (int)s.row + head * (int)s.head;
}
__device__ __forceinline__ int lse_index(const Attention& a, const Sequence& s, int i, int head) {
    return s.number * (int)a.lse_batch + head * (int)a.lse_head + (int)s.first_query + i;
}
// Avoids the division in the common case.
__device__ __forceinline__ int kv_head_of(const Attention& a, int head) { return a.group == 1 ? head : head / a.group; }

__device__ __forceinline__ Tile query_tile(const scalar* x, const Strides& s, const Sequence& q, int i, int head,
                                           int width) {
    return {advance(x, offset_of(s, q.number, (int)q.first_query + i, head)), (int)s.row, q.queries - 1 - i, width};
}
__device__ __forceinline__ Tile key_tile(const scalar* x, const Strides& s, const Sequence& k, int j, int head, int width) {
    return {advance(x, offset_of(s, k.number, (int)k.first_key + j, head)), (int)s.row, k.keys - 1 - j, width};
}

// The row and column of a lane's element e of 16 x 16 logits, which are two accumulators.
__device__ __forceinline__ int row_at(int e) { return threadIdx.x % 32 / 4 + e % 4 / 2 * 8; }
__device__ __forceinline__ int column_at(int e) { return threadIdx.x % 4 * 2 + e / 4 * 8 + e % 2; }

// Turns products into logits in base 2, -inf where masked, and sets the derivatives of the softcap.
__device__ __forceinline__ void logits(const Attention& a, const Sequence& s, int head, int i, int j, float (&x)[2][4],
                                       float (&softcap_grad)[PLAIN ? 1 : 8]) {
    if constexpr (!PLAIN) {
        const float slope = slope_of(a, s.number, head);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float& value = x[e / 4][e % 4];
            value = logit(a, s, value, i + row_at(e), j + column_at(e), head, slope, softcap_grad[e]) * LOG2E;
        }
        return;
    }
    const int first = j + column_at(0), at = i + row_at(0) + s.offset;  // of this lane
    const float scale = a.scale * LOG2E;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int last = min(s.keys - 1, at + 8 * r + a.right) - first;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& value = x[e / 2][2 * r + e % 2];
            value = e / 2 * 8 + e % 2 <= last ? value * scale : NEG_INF;
        }
        if (a.left >= UNLIMITED) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (e / 2 * 8 + e % 2 < at + 8 * r - a.left - first) x[e / 2][2 * r + e % 2] = NEG_INF;
    }
}

// Reductions over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// ---- forward ----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(32 * WARPS, FORWARD_BLOCKS) flash_attention_short_forward(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    scalar* __restrict__ out,             // (B, T, H, Dv)
    float* __restrict__ lse,              // (B, H, T)
    int items, int tiles) {
    const Task task = task_at(a, items, tiles, a.heads, false);
    if (task.number >= a.sequences) return;
    const Sequence s = sequence_at(a, task.number);
    const int head = task.head, kv_head = kv_head_of(a, head), i = task.tile * TILE, lane = threadIdx.x % 32;
    if (i >= s.queries) return;

    const int last = min(i + TILE, s.queries) - 1;
    const int begin = max(0, i + s.offset - a.left) / TILE * TILE;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    Rows<HEAD_DIM> q_tile, k_tile;
    Columns v_tile[VECTORS];
    if (begin < end) {
        q_tile.load_from(query_tile(q, a.q, s, i, head, a.head_dim), 0);
        k_tile.load_from(key_tile(k, a.k, s, begin, kv_head, a.head_dim), 0);
#pragma unroll
        for (int m = 0; m < VECTORS; ++m) v_tile[m].load_from(key_tile(v, a.v, s, begin, kv_head, a.value_dim), m);
    }

    // A sink is one more key with a value of zero. `total` is this lane's share of the sum. Index: rows g and g + 8.
    float top[2], total[2];
    top[0] = top[1] = a.sink ? a.sink[head] * LOG2E : NEG_INF;
    total[0] = total[1] = a.sink && lane % 4 == 0 ? 1.f : 0.f;
    Sum sum = {};
#pragma unroll 1
    for (int j = begin; j < end; j += TILE) {
        float x[2][4] = {}, softcap_grad[PLAIN ? 1 : 8];
        multiply(x, q_tile, k_tile);
        const bool more = j + TILE < end;
        if (more) k_tile.load_from(key_tile(k, a.k, s, j + TILE, kv_head, a.head_dim), 0);
        logits(a, s, head, i, j, x, softcap_grad);

        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float peak = fmaxf(fmaxf(x[0][2 * r], x[0][2 * r + 1]), fmaxf(x[1][2 * r], x[1][2 * r + 1]));
            peak = row_max(fmaxf(top[r], peak));
            const float finite = peak == NEG_INF ? 0.f : peak;
            correction[r] = exp2_fast(top[r] - finite);
            top[r] = peak;
            total[r] *= correction[r];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) total[r] += x[n][e] = exp2_fast(x[n][e] - finite);
        }
        if (j > begin)
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 8; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[c][e] *= correction[e / 2];
        u32 p[4];
        pack(p, x[0], x[1]);
        if (a.query_words) {
            const Kept words = kept_of_lane(a, s, head, i + row_at(0), j + column_at(0));
#pragma unroll
            for (int n = 0; n < 4; ++n) p[n] &= pair_mask(words, byte_of(n));
        }
#pragma unroll
        for (int m = 0; m < VECTORS; ++m) {
            multiply(sum, p, v_tile[m], m);
            if (more) v_tile[m].load_from(key_tile(v, a.v, s, j + TILE, kv_head, a.value_dim), m);
        }
    }

    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        total[r] = row_sum(total[r]);
        factor[r] = total[r] == 0.f ? 0.f : __fdividef(a.keep_scale, total[r]);
    }
    const int at = (int)s.first_query + i;
    store(out + offset_of(a.out, s.number, at, head), (int)a.out.row, s.queries - i, a.value_dim, factor, sum);
    float* lse_rows = lse + lse_index(a, s, i, head);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (lane % 4 == 0 && i + lane / 4 + 8 * r < s.queries)
            lse_rows[lane / 4 + 8 * r] = top[r] * LN2 + logf(total[r]);
}

// ---- backward ---------------------------------------------------------------------------------

struct Inputs {
    const scalar *q, *k, *v, *out, *dout;
    const float *lse, *dlse;
};

// For 16 queries from i on and 16 keys from j on: probabilities after dropout and gradients of the scaled products, as
// operands a; and delta = rowsum(dout * out) - dlse of rows g and g + 8, which is rowsum(p * dp) - dlse if these are
// `all_keys`. dbias is written unless null.
__device__ __forceinline__ void compute_gradients(const Attention& a, const Sequence& s, const Inputs& inputs, int head, int i,
                                              int j, bool all_keys, float* dbias, u32 (&p)[4], u32 (&ds)[4],
                                              float (&delta)[2]) {
    constexpr int STEP = HEAD_DIM == 64 || HEAD_DIM == 128 && !PLAIN ? 64 : 32;  // limited by registers
    const int lane = threadIdx.x % 32, g = lane / 4, kv_head = kv_head_of(a, head);
    const Tile q = query_tile(inputs.q, a.q, s, i, head, a.head_dim);
    const Tile k = key_tile(inputs.k, a.k, s, j, kv_head, a.head_dim);
    const Tile v = key_tile(inputs.v, a.v, s, j, kv_head, a.value_dim);
    const Tile dout = query_tile(inputs.dout, a.dout, s, i, head, a.value_dim);
    float x[2][4] = {}, dp[2][4] = {}, dots[2][4] = {}, softcap_grad[PLAIN ? 1 : 8];
#pragma unroll 1
    for (int first = 0; first < HEAD_DIM; first += STEP) {
        Rows<STEP> q_tile, k_tile, v_tile, dout_tile;
        q_tile.load_from(q, first);
        k_tile.load_from(k, first);
        dout_tile.load_from(dout, first);
        v_tile.load_from(v, first);
        if (!all_keys) {
            Rows<STEP> out_tile;
            out_tile.load_from(query_tile(inputs.out, a.out, s, i, head, a.value_dim), first);
            multiply(dots, dout_tile, out_tile);  // only the diagonal is used
        }
        multiply(x, q_tile, k_tile);
        multiply(dp, dout_tile, v_tile);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
        delta[r] = __shfl_sync(~0u, g % 2 ? dots[r][2 * r + 1] : dots[r][2 * r], lane & 28 | g / 2);
    const int at = lse_index(a, s, i, head);
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        lse[r] = i + g + 8 * r < s.queries ? inputs.lse[at + g + 8 * r] : INF;
        lse[r] = lse[r] == NEG_INF ? INF : lse[r] * LOG2E;  // rows without keys: p is 0
    }
    logits(a, s, head, i, j, x, softcap_grad);
    Kept words = {~0u, ~0u};
    if (a.query_words) words = kept_of_lane(a, s, head, i + row_at(0), j + column_at(0));
    float weight[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float factor = kept(e % 2 ? words.odd : words.even, byte_of(e / 2)) ? a.keep_scale : 0.f;
        weight[e] = exp2_fast(x[e / 4][e % 4] - lse[e % 4 / 2]);
        x[e / 4][e % 4] = weight[e] * factor;
        dp[e / 4][e % 4] *= factor;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = 0.f;
#pragma unroll
        for (int e = 2 * r; e < 8; e += e % 2 ? 3 : 1) sum += weight[e] * dp[e / 4][e % 4];
        if (all_keys) delta[r] = row_sum(sum);
        if (inputs.dlse && i + g + 8 * r < s.queries) delta[r] -= inputs.dlse[at + g + 8 * r];
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        float& slot = dp[e / 4][e % 4];
        slot = weight[e] * (slot - delta[e % 4 / 2]);
        if constexpr (!PLAIN) {
            const int row = i + row_at(e), column = j + column_at(e);
            const long long sheet = (long long)s.number * a.heads + head;
            if (dbias && row < s.queries && column < s.keys)
                dbias[(sheet * a.queries + row) * a.keys + column] = slot;
            slot *= softcap_grad[e];
        }
    }
    pack(p, x[0], x[1]);
    pack(ds, dp[0], dp[1]);
}

__device__ __forceinline__ void store_gradient(scalar* x, const Strides& strides, const Sequence& s, int row, int count,
                                               int head, int width, float scale, const Sum& sum) {
    const float factor[2] = {scale, scale};
    store(x + offset_of(strides, s.number, row, head), (int)strides.row, count, width, factor, sum);
}

// A warp sums dk and dv of 16 keys over the queries, then dq of 16 queries over the keys. If all keys are in one tile, the
// first pass computes dq too.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BACKWARD_BLOCKS) flash_attention_short_backward(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ out,       // (B, T, H, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ lse,        // (B, H, T)
    const float* __restrict__ dlse,       // (B, H, T) or null
    scalar* __restrict__ dq,              // (B, T, H, D)
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv,              // (B, S, Hk, Dv)
    float* __restrict__ dbias,            // (B, H, T, S) of zeros, or null
    float* __restrict__ deltas,           // (B, H, T) or null
    int items, int tiles) {
    const Task task = task_at(a, items, tiles, a.heads / a.group, true);
    if (task.number >= a.sequences) return;
    const Sequence s = sequence_at(a, task.number);
    const Inputs inputs = {q, k, v, out, dout, lse, dlse};
    const int kv_head = task.head, first = task.tile * TILE, lane = threadIdx.x % 32;
    const bool one_tile = HEAD_DIM < 128 && s.keys > 0 && s.key_rows <= TILE;
    u32 p[4], ds[4], transposed[4];
    float delta[2] = {};

    const auto store_dq = [&](int i, int head, const Sum& sum) {
        store_gradient(dq, a.dq, s, (int)s.first_query + i, s.queries - i, head, a.head_dim, a.scale, sum);
        if (!deltas || lane % 4) return;
        float* rows = deltas + lse_index(a, s, i, head);
        if (i + lane / 4 < s.queries) rows[lane / 4] = delta[0];
        if (i + lane / 4 + 8 < s.queries) rows[lane / 4 + 8] = delta[1];
    };

    if (first < s.key_rows) {
        Sum dk_sum = {}, dv_sum = {};
        const int last = min(first + TILE, s.keys) - 1;
        const int begin = one_tile ? 0 : max(0, first - s.offset - a.right) / TILE * TILE;
        const int seen = first < s.keys ? min(s.queries, last - s.offset + a.left + 1) : 0;
        const int end = one_tile ? s.queries : seen;
        for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
#pragma unroll 1
            for (int i = begin; i < end; i += TILE) {
                compute_gradients(a, s, inputs, head, i, first, one_tile, dbias, p, ds, delta);
                transpose(transposed, p);
                multiply(dv_sum, transposed, query_tile(dout, a.dout, s, i, head, a.value_dim));
                transpose(transposed, ds);
                multiply(dk_sum, transposed, query_tile(q, a.q, s, i, head, a.head_dim));
                if (one_tile) {
                    Sum dq_sum = {};
                    multiply(dq_sum, ds, key_tile(k, a.k, s, first, kv_head, a.head_dim));
                    store_dq(i, head, dq_sum);
                }
            }
        }
        const int at = (int)s.first_key + first, count = s.key_rows - first;
        store_gradient(dk, a.dk, s, at, count, kv_head, a.head_dim, a.scale, dk_sum);
        store_gradient(dv, a.dv, s, at, count, kv_head, a.value_dim, 1.f, dv_sum);
    }
    if (one_tile || first >= s.queries) return;

    const int last = min(first + TILE, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / TILE * TILE;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
        Sum dq_sum = {};
        for (int r = 0; r < 2; ++r) {  // for rows that see no key: their output is 0
            const int row = first + lane / 4 + 8 * r;
            delta[r] = dlse && row < s.queries ? -dlse[lse_index(a, s, row, head)] : 0.f;
        }
#pragma unroll 1
        for (int j = begin; j < end; j += TILE) {
            compute_gradients(a, s, inputs, head, first, j, false, nullptr, p, ds, delta);
            multiply(dq_sum, ds, key_tile(k, a.k, s, j, kv_head, a.head_dim));
        }
        store_dq(first, head, dq_sum);
    }
}
