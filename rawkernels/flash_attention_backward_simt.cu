// The gradient of attention, without atomics: delta, then dk and dv by key tiles, then dq by query tiles.
// Constants: scalar = float, f16, bf16; HEAD_DIM = 32, 64, 128, 256 (both head sizes rounded up)
// Launch:    delta: grid = (ceil(rows * heads / 4),), block = (128,), a warp per row and head
//            dkv: grid = (ceil(longest keys / ROWS) * KV heads * sequences,), block = (THREADS,)
//            dq: grid = (ceil(longest queries / ROWS) * heads * sequences,), block = (THREADS,)
//            shared = BACKWARD_FLOATS * 4 bytes; ROWS = 16 for HEAD_DIM 256, else 32; THREADS = 4 ROWS
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/attention_simt.cuh"
#include "common/reduce.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "flash_attention_backward_simt.cu: HEAD_DIM is 32 .. 256");
constexpr int BACKWARD_FLOATS = 4 * ROWS * PITCH + 2 * ROWS * WEIGHTS_PITCH + 2 * ROWS;

// delta = rowsum(dout * out) - dlse
extern "C" __global__ void __launch_bounds__(128) flash_attention_delta(
    const Attention a,
    const scalar* __restrict__ out,   // (rows, H, Dv) by strides
    const scalar* __restrict__ dout,  // (rows, H, Dv) by strides
    const float* __restrict__ dlse,   // like delta, or null
    float* __restrict__ delta,        // (B, H, T), or (H, tokens)
    long long rows) {                 // B * T, or tokens
    const long long task = blockIdx.x * 4LL + threadIdx.x / 32;
    if (task >= rows * a.heads) return;
    const long long row = task / a.heads, number = row / a.lse_head, at = row % a.lse_head;
    const int head = (int)(task % a.heads), lane = threadIdx.x % 32;
    out += number * a.out.batch + at * a.out.row + head * a.out.head;
    dout += number * a.dout.batch + at * a.dout.row + head * a.dout.head;
    float sum = 0.f;
    for (int c = lane; c < a.value_dim; c += 32)
        sum += (float)out[c * a.out.column] * (float)dout[c * a.dout.column];
    sum = warp_reduce(sum, Sum{});
    const long long e = number * a.lse_batch + head * a.lse_head + at;
    if (lane == 0) delta[e] = dlse ? sum - dlse[e] : sum;
}

// p and ds of one logit, given dot = q_i . k_j and dp = dout_i . v_j
struct Slopes { float p, dropped, ds, bend; };

__device__ inline Slopes slopes_at(const Attention& a, const Sequence& s, float dot, float dp, int i, int j,
                                   int head, float slope, bool kept, float lse, float delta) {
    Slopes r;
    const float x = logit(a, s, dot, i, j, head, slope, r.bend);
    const float factor = kept ? a.keep_scale : 0.f;
    r.p = x == NEG_INF ? 0.f : expf(x - lse);
    r.dropped = r.p * factor;
    r.ds = r.p == 0.f ? 0.f : r.p * (dp * factor - delta);
    return r;
}

// lse of a row, such that a row without keys, or past the end, has p = 0
__device__ inline float row_lse(const float* lse, long long e, bool inside) {
    const float value = inside ? lse[e] : INF;
    return value == NEG_INF ? INF : value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_attention_dkv(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ lse,        // (B, H, T)
    const float* __restrict__ delta,      // (B, H, T)
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv) {            // (B, S, Hk, Dv)
    extern __shared__ __align__(16) float shared[];
    __shared__ unsigned char keep[ROWS * ROWS];
    float* k_tile = shared;
    float* v_tile = k_tile + ROWS * PITCH;
    float* q_tile = v_tile + ROWS * PITCH;
    float* dout_tile = q_tile + ROWS * PITCH;
    float* p_weights = dout_tile + ROWS * PITCH;
    float* ds_weights = p_weights + ROWS * WEIGHTS_PITCH;
    float* lse_tile = ds_weights + ROWS * WEIGHTS_PITCH;
    float* delta_tile = lse_tile + ROWS;

    const Place place = find_place(a.keys, a.heads / a.group);
    const Sequence s = find_sequence(a, place.number);
    if (place.first >= s.key_rows) return;
    const int kv_head = place.head, first = place.first;
    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4, j = first + row;
    const PhiloxKey key = key_of(a);
    const bool drops = a.threshold < 65536;

    const int last = min(first + ROWS, s.keys) - 1;
    const int begin = max(0, first - s.offset - a.right) / ROWS * ROWS;
    const int end = first < s.keys ? min(s.queries, last - s.offset + a.left + 1) : 0;
    load_tile(k_tile, rows_of(k, a.k, s.number, s.first_key + first, kv_head), a.k, s.keys - first, a.head_dim);
    load_tile(v_tile, rows_of(v, a.v, s.number, s.first_key + first, kv_head), a.v, s.keys - first, a.value_dim);

    float dk_sum[HEAD_DIM / 4] = {}, dv_sum[HEAD_DIM / 4] = {};
    for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
        const float slope = slope_of(a, s.number, head);
        for (int i = begin; i < end; i += ROWS) {
            __syncthreads();  // the last tiles may still be read
            const long long at = s.first_query + i;
            load_tile(q_tile, rows_of(q, a.q, s.number, at, head), a.q, s.queries - i, a.head_dim);
            load_tile(dout_tile, rows_of(dout, a.dout, s.number, at, head), a.dout, s.queries - i, a.value_dim);
            if (threadIdx.x < ROWS) {
                const long long e = s.number * a.lse_batch + head * a.lse_head + at + threadIdx.x;
                const bool inside = i + (int)threadIdx.x < s.queries;
                lse_tile[threadIdx.x] = row_lse(lse, e, inside);
                delta_tile[threadIdx.x] = inside ? delta[e] : 0.f;
            }
            if (drops) draw_keep(keep, a, key, i, first, s, head);
            __syncthreads();

            float x[COLS], dp[COLS];
            dot_rows(k_tile + row * PITCH, q_tile, quarter, x);
            dot_rows(v_tile + row * PITCH, dout_tile, quarter, dp);
#pragma unroll
            for (int n = 0; n < COLS; ++n) {
                const int r = quarter + 4 * n;
                const bool kept = !drops || keep[r * ROWS + row];
                const Slopes at_ij = slopes_at(a, s, x[n], dp[n], i + r, j, head, slope, kept,
                                               lse_tile[r], delta_tile[r]);
                p_weights[row * WEIGHTS_PITCH + r] = at_ij.dropped;
                ds_weights[row * WEIGHTS_PITCH + r] = at_ij.ds * at_ij.bend;
            }
            __syncwarp();
            const int count = min(ROWS, s.queries - i);
            add_rows(p_weights + row * WEIGHTS_PITCH, dout_tile, count, quarter, dv_sum);
            add_rows(ds_weights + row * WEIGHTS_PITCH, q_tile, count, quarter, dk_sum);
        }
    }

    if (j >= s.key_rows) return;
    const long long at = s.first_key + j;
    scalar* dk_row = dk + s.number * a.dk.batch + at * a.dk.row + kv_head * a.dk.head;
    scalar* dv_row = dv + s.number * a.dv.batch + at * a.dv.row + kv_head * a.dv.head;
    store_row(dk_row, a.dk.column, a.head_dim, quarter, a.scale, dk_sum);
    store_row(dv_row, a.dv.column, a.value_dim, quarter, 1.f, dv_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_attention_dq(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ lse,        // (B, H, T)
    const float* __restrict__ delta,      // (B, H, T)
    scalar* __restrict__ dq,              // (B, T, H, D)
    float* __restrict__ dbias) {          // (B, H, T, S) of zeros, or null
    extern __shared__ __align__(16) float shared[];
    __shared__ unsigned char keep[ROWS * ROWS];
    float* q_tile = shared;
    float* dout_tile = q_tile + ROWS * PITCH;
    float* k_tile = dout_tile + ROWS * PITCH;
    float* v_tile = k_tile + ROWS * PITCH;
    float* weights = v_tile + ROWS * PITCH;

    const Place place = find_place(a.queries, a.heads);
    const Sequence s = find_sequence(a, place.number);
    if (place.first >= s.queries) return;
    const int head = place.head, kv_head = head / a.group, first = place.first;
    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4, i = first + row;
    const PhiloxKey key = key_of(a);
    const float slope = slope_of(a, s.number, head);
    const bool drops = a.threshold < 65536;

    const int last = min(first + ROWS, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / ROWS * ROWS;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    const long long at = s.first_query + first;
    load_tile(q_tile, rows_of(q, a.q, s.number, at, head), a.q, s.queries - first, a.head_dim);
    load_tile(dout_tile, rows_of(dout, a.dout, s.number, at, head), a.dout, s.queries - first, a.value_dim);
    const long long e = s.number * a.lse_batch + head * a.lse_head + at + row;
    const float my_lse = row_lse(lse, e, i < s.queries), my_delta = i < s.queries ? delta[e] : 0.f;

    float sum[HEAD_DIM / 4] = {};
    for (int j = begin; j < end; j += ROWS) {
        __syncthreads();  // the last tiles may still be read
        const scalar* k_rows = rows_of(k, a.k, s.number, s.first_key + j, kv_head);
        const scalar* v_rows = rows_of(v, a.v, s.number, s.first_key + j, kv_head);
        load_tile(k_tile, k_rows, a.k, s.keys - j, a.head_dim);
        load_tile(v_tile, v_rows, a.v, s.keys - j, a.value_dim);
        if (drops) draw_keep(keep, a, key, first, j, s, head);
        __syncthreads();

        float x[COLS], dp[COLS];
        dot_rows(q_tile + row * PITCH, k_tile, quarter, x);
        dot_rows(dout_tile + row * PITCH, v_tile, quarter, dp);
#pragma unroll
        for (int n = 0; n < COLS; ++n) {
            const int r = quarter + 4 * n;
            const bool kept = !drops || keep[row * ROWS + r];
            const Slopes at_ij = slopes_at(a, s, x[n], dp[n], i, j + r, head, slope, kept, my_lse, my_delta);
            weights[row * WEIGHTS_PITCH + r] = at_ij.ds * at_ij.bend;
            if (dbias && i < s.queries && j + r < s.keys) {
                const long long sheet = (long long)s.number * a.heads + head;
                dbias[(sheet * a.queries + i) * a.keys + j + r] = at_ij.ds;
            }
        }
        __syncwarp();
        add_rows(weights + row * WEIGHTS_PITCH, k_tile, min(ROWS, s.keys - j), quarter, sum);
    }

    if (i >= s.queries) return;
    scalar* dq_row = dq + s.number * a.dq.batch + (s.first_query + i) * a.dq.row + head * a.dq.head;
    store_row(dq_row, a.dq.column, a.head_dim, quarter, a.scale, sum);
}
