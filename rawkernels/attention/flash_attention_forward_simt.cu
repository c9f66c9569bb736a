// Attention, softmax(scale * q k^T) v with an online softmax, in float32 on CUDA cores, for any GPU.
// Constants: scalar = float; HEAD_DIM = 32, 64, 128, 256; EXTRAS = false, true
// Constants: scalar = f16, bf16; HEAD_DIM = 64; EXTRAS = true
//   (both head sizes rounded up; EXTRAS: softcap, bias, slopes or dropout)
// Launch:    grid = (ceil(longest queries / OWN) * heads * sequences,), block = (THREADS,), shared = SHARED_BYTES
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "flash_attention_forward_simt.cu: HEAD_DIM is 32 .. 256");
constexpr int SPLIT = 1;
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100  // a multiprocessor has 228 KiB of shared memory
constexpr int R = HEAD_DIM > 128 ? 4 : 8, N = HEAD_DIM > 128 ? 2 : HEAD_DIM > 64 ? 4 : 8, HELD = HEAD_DIM == 128 ? 4 : 8;
constexpr int TILES = 2, BLOCKS = 2;  // tiles of the other side; blocks of a multiprocessor
#elif __CUDA_ARCH__ >= 800
constexpr int R = HEAD_DIM <= 64 ? 8 : 4, HELD = 0;
constexpr int N = HEAD_DIM == 128 ? 8 : HEAD_DIM > 128 && __CUDA_ARCH__ >= 1200 ? 2 : 4;
constexpr int TILES = 1, BLOCKS = EXTRAS || HEAD_DIM > 128 ? 2 : 3;
#else  // a block has 64 KiB of shared memory
constexpr int R = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 4 : 2, N = HEAD_DIM <= 128 ? 4 : 2, HELD = 0;
constexpr int TILES = 1, BLOCKS = EXTRAS || HEAD_DIM > 128 ? 2 : 3;
#endif
#include "attention/common/attention_simt.cuh"
#include "common/reduce.cuh"

constexpr int SHARED_BYTES = 4 * ((OWN + TILES * STEP) * PITCH + WEIGHTS);

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_attention_forward(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    scalar* __restrict__ out,             // (B, T, H, Dv)
    float* __restrict__ lse) {            // (B, H, T)
    extern __shared__ __align__(16) float q_tile[];
    float* k_tile = q_tile + OWN * PITCH;
    float* v_tile = k_tile + (TILES - 1) * STEP * PITCH;  // one tile: the keys', then their values'
    float* weights = v_tile + STEP * PITCH;

    // tile 0 is the last of its sequence: with a causal mask it has the most keys
    const Place place = place_at(a, a.queries, OWN, a.heads);
    const Sequence s = sequence_at(a, place.number);
    const int head = place.head, kv_head = head / a.group;
    const int first = ((a.queries + OWN - 1) / OWN - 1 - place.tile) * OWN;
    if (first >= s.queries) return;
    const int own = lane_own(), i = first + own;  // this lane's queries are i + 4r

    // some query sees keys begin .. end - 1; all queries see unmasked_begin .. unmasked_end - 1
    const int last = min(first + OWN, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / STEP * STEP;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    const int unmasked_begin = last + s.offset - a.left, unmasked_end = min(s.keys, first + s.offset + a.right + 1);
    const auto load_keys = [&](int j) {
        load_tile<STEP>(k_tile, rows_of(k, a.k, s.number, s.first_key + j, kv_head), a.k, s.keys - j, a.head_dim);
    };
    const auto load_values = [&](int j) {
        load_tile<STEP>(v_tile, rows_of(v, a.v, s.number, s.first_key + j, kv_head), a.v, s.keys - j, a.value_dim);
    };
    load_tile<OWN>(q_tile, rows_of(q, a.q, s.number, s.first_query + first, head), a.q, s.queries - first, a.head_dim);
    load_keys(begin);

    // a sink is one more key with a value of zero; `total` is this lane's share of the sum
    float top[R], total[R], sum[R][WIDTH] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
        top[r] = a.sink ? a.sink[head] * LOG2E : NEG_INF;
        total[r] = a.sink && lane_across() == 0 ? 1.f : 0.f;
    }
#pragma unroll 1
    for (int j = begin; j < end; j += STEP) {
        tiles_ready();
        if (TILES == 2) load_values(j);
        float x[R][N];
        multiply(q_tile + own * PITCH, k_tile + lane_step() * PITCH, x);
        if (TILES == 1) {
            __syncthreads();
            load_values(j);
        }

        const Position<false> at = {i, j + lane_step()};
        apply_logits(a, s, head, at, j >= unmasked_begin && j + STEP <= unmasked_end, x);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float peak = top[r];
#pragma unroll
            for (int n = 0; n < N; ++n) peak = fmaxf(peak, x[r][n]);
            peak = row_reduce(peak, Max{});
            const float finite = peak == NEG_INF ? 0.f : peak, correction = exp2_fast(top[r] - finite);
            top[r] = peak;
            total[r] *= correction;
#pragma unroll
            for (int n = 0; n < N; ++n) total[r] += x[r][n] = exp2_fast(x[r][n] - finite);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) sum[r][e] *= correction;
        }
        if (EXTRAS && a.query_words) apply_dropout(a, sample_kept<false>(a, s, head, at), x);
        tiles_ready();
        if (TILES == 2 && j + STEP < end) load_keys(j + STEP);
        add_product(x, weights, v_tile, sum);
        if (TILES == 1 && j + STEP < end) {
            __syncthreads();
            load_keys(j + STEP);
        }
    }

    const long long first_query = sequence_at(a, opaque(s.number)).first_query;  // computed again, to free registers
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const float all = row_reduce(total[r], Sum{});
        if (i + 4 * r >= s.queries) continue;
        const long long row = first_query + i + 4 * r;
        scalar* out_row = out + s.number * a.out.batch + row * a.out.row + head * a.out.head;
        store_row(out_row, a.out.column, a.value_dim, all == 0.f ? 0.f : 1.f / all, sum[r]);
        if (lane_across() == 0) lse[s.number * a.lse_batch + head * a.lse_head + row] = top[r] * LN2 + logf(all);
    }
}
