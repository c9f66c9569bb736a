// Attention, softmax(scale * q k^T) v with an online softmax, in float32 on CUDA cores, for any GPU.
// Constants: scalar = float; HEAD_DIM = 32, 64, 128, 256; EXTRAS = false, true
// Constants: scalar = f16, bf16; HEAD_DIM = 64; EXTRAS = true
//   (both head sizes rounded up; EXTRAS: softcap, bias, slopes or dropout)
// Launch:    grid = (ceil(longest queries / ROWS) * heads * sequences,), block = (128,), shared = SHARED_BYTES
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_simt.cuh"
#include "common/reduce.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "flash_attention_forward_simt.cu: HEAD_DIM is 32 .. 256");
#if __CUDA_ARCH__ >= 800
constexpr int R = HEAD_DIM <= 64 ? 8 : 4;                               // logits of a lane
constexpr int N = HEAD_DIM == 128 ? 8 : HEAD_DIM > 128 && __CUDA_ARCH__ >= 1200 ? 2 : 4;
#else  // a block has 64 KiB of shared memory
constexpr int R = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 4 : 2, N = HEAD_DIM <= 128 ? 4 : 2;
#endif
constexpr int ROWS = 16 * R, KEYS = 8 * N;                              // queries of a block, keys of a tile
constexpr int SHARED_BYTES = 4 * (ROWS + KEYS) * PITCH;

extern "C" __global__ void __launch_bounds__(THREADS, EXTRAS || HEAD_DIM > 128 ? 2 : 3) flash_attention_forward(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    scalar* __restrict__ out,             // (B, T, H, Dv)
    float* __restrict__ lse) {            // (B, H, T)
    extern __shared__ __align__(16) float q_tile[];
    float* tile = q_tile + ROWS * PITCH;  // of keys, then of their values

    // tiles at the end of a causal sequence have the most keys and go first
    const Place place = place_at(a.queries, ROWS, a.heads);
    const Sequence s = sequence_at(a, place.number);
    const int head = place.head, kv_head = head / a.group;
    const int first = ((a.queries + ROWS - 1) / ROWS - 1 - place.tile) * ROWS;
    if (first >= s.queries) return;
    const int own = threadIdx.x / 32 * 4 * R + lane_down(), i = first + own;  // this lane's queries are i + 4r

    // some query sees keys begin .. end - 1; all queries see unmasked_begin .. unmasked_end - 1
    const int last = min(first + ROWS, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / KEYS * KEYS;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    const int unmasked_begin = last + s.offset - a.left, unmasked_end = min(s.keys, first + s.offset + a.right + 1);
    load_tile<ROWS>(q_tile, rows_of(q, a.q, s.number, s.first_query + first, head), a.q, s.queries - first, a.head_dim);

    // a sink is one more key with a value of zero; `total` is this lane's share of the sum
    float top[R], total[R], sum[R][WIDTH] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
        top[r] = a.sink ? a.sink[head] : NEG_INF;
        total[r] = a.sink && lane_across() == 0 ? 1.f : 0.f;
    }
#pragma unroll 1
    for (int j = begin; j < end; j += KEYS) {
        const scalar* k_rows = rows_of(k, a.k, s.number, s.first_key + j, kv_head);
        const scalar* v_rows = rows_of(v, a.v, s.number, s.first_key + j, kv_head);
        __syncthreads();  // the last values may still be read
        load_tile<KEYS>(tile, k_rows, a.k, s.keys - j, a.head_dim);
        __syncthreads();
        float x[R][N];
        multiply(q_tile + own * PITCH, tile + lane_across() * PITCH, x);
        __syncthreads();
        load_tile<KEYS>(tile, v_rows, a.v, s.keys - j, a.value_dim);

        const Position<false> at = {i, j + lane_across()};
        apply_logits(a, s, head, at, j >= unmasked_begin && j + KEYS <= unmasked_end, x);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float peak = top[r];
#pragma unroll
            for (int n = 0; n < N; ++n) peak = fmaxf(peak, x[r][n]);
            peak = row_reduce(peak, Max{});
            const float finite = peak == NEG_INF ? 0.f : peak, correction = expf(top[r] - finite);
            top[r] = peak;
            total[r] *= correction;
#pragma unroll
            for (int n = 0; n < N; ++n) total[r] += x[r][n] = expf(x[r][n] - finite);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) sum[r][e] *= correction;
        }
        if (EXTRAS && a.query_words) apply_dropout(a, sample_kept<false, R, N>(a, s, head, at), x);
        __syncthreads();
        add_product(x, tile, sum);
    }

    const long long first_query = sequence_at(a, opaque(s.number)).first_query;  // computed again, to free registers
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const float all = row_reduce(total[r], Sum{});
        if (i + 4 * r >= s.queries) continue;
        const long long row = first_query + i + 4 * r;
        scalar* out_row = out + s.number * a.out.batch + row * a.out.row + head * a.out.head;
        store_row(out_row, a.out.column, a.value_dim, all == 0.f ? 0.f : 1.f / all, sum[r]);
        if (lane_across() == 0) lse[s.number * a.lse_batch + head * a.lse_head + row] = top[r] + logf(all);
    }
}
