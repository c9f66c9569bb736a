// Attention of a few new tokens over a key-value cache, in float32 on CUDA cores, for any GPU and any strides: blocks split
// the keys. A block takes one query row; its warps alternate in groups of four keys and merge at the end.
// Constants: scalar = float, f16, bf16; HEAD_DIM = 128, 256 (both head sizes rounded up)
// Launch:    grid = (KV heads * rows * splits * sequences,), block = (128,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/cache/decode.cuh"
#include "common/reduce.cuh"

constexpr int THREADS = 128, WARPS = 4, KEYS = 4, OWN = HEAD_DIM / 32;  // a lane has OWN columns: lane, lane + 32, ...

extern "C" __global__ void __launch_bounds__(THREADS) decode_attention_simt(
    const Decode a,
    const scalar* __restrict__ q,         // (B, T, H, D) by strides
    const scalar* __restrict__ k,         // (N, S, Hk, D) or (pages, page, Hk, D) by strides
    const scalar* __restrict__ v,
    scalar* __restrict__ out,             // (B, T, H, Dv); with one split
    float* __restrict__ lse,              // (B, H, T); with one split
    float* __restrict__ parts,            // (splits, B, T, H, Dv)
    float* __restrict__ parts_lse) {      // (splits, B, T, H)
    __shared__ float tops[WARPS], sums[WARPS], merged[WARPS][HEAD_DIM];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Work w = work_at<1>(a);
    const Query query = query_at(a, w, 0);
    if (w.first == w.last && w.split > 0) {
        if (thread == 0) store_lse(a, w, query, NEG_INF, lse, parts_lse);
        return;
    }
    const scalar* q_row = q + query.batch * a.q.batch + query.token * a.q.row + query.head * a.q.head;
    float own[OWN];
#pragma unroll
    for (int e = 0; e < OWN; ++e) {
        const int column = lane + 32 * e;
        own[e] = column < a.head_dim ? (float)q_row[column * a.q.column] : 0.f;
    }
    const float slope = slope_of(a, query);
    const int first = max(w.first, query.at - a.window), last = min(w.last, query.at + 1);

    float top = NEG_INF, sum = 0.f, o[OWN] = {};
    for (int j = first + KEYS * warp; j < last; j += KEYS * WARPS) {
        Spot spots[KEYS];
        float x[KEYS] = {}, peak = top;
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            const int key = min(j + n, last - 1);
            spots[n] = spot_at(a, outer_index(a, w.number, key), key, w.kv_head);
#pragma unroll
            for (int e = 0; e < OWN; ++e) {
                const int column = lane + 32 * e;
                if (column < a.head_dim) x[n] += own[e] * (float)k[spots[n].k + column * a.k.column];
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            const float value = scaled_logit(a, warp_reduce(x[n], Sum{})) - slope * (query.at - j - n);
            x[n] = j + n < last ? value : NEG_INF;
            peak = fmaxf(peak, x[n]);
        }
        const float base = finite_or_zero(peak), correction = exp2f(top - base);
        top = peak;
        sum *= correction;
#pragma unroll
        for (int e = 0; e < OWN; ++e) o[e] *= correction;
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            const float p = exp2f(x[n] - base);
            sum += p;
#pragma unroll
            for (int e = 0; e < OWN; ++e) {
                const int column = lane + 32 * e;
                if (column < a.value_dim) o[e] += p * (float)v[spots[n].v + column * a.v.column];
            }
        }
    }

    if (lane == 0) tops[warp] = top, sums[warp] = sum;
#pragma unroll
    for (int e = 0; e < OWN; ++e) merged[warp][lane + 32 * e] = o[e];
    __syncthreads();
    const float sink = sink_of(a, w, query);
    float peak = sink;
    for (int g = 0; g < WARPS; ++g) peak = fmaxf(peak, tops[g]);
    const float base = finite_or_zero(peak);
    float total = exp2f(sink - base);
    for (int g = 0; g < WARPS; ++g) total += exp2f(tops[g] - base) * sums[g];
    const float factor = total == 0.f ? 0.f : 1.f / total;
    for (int column = thread; column < a.value_dim; column += THREADS) {
        float y = 0.f;
        for (int g = 0; g < WARPS; ++g) y += exp2f(tops[g] - base) * merged[g][column];
        store_value(a, w, query, column, y * factor, out, parts);
    }
    if (thread == 0) store_lse(a, w, query, (base + log2f(total)) * LN2, lse, parts_lse);
}
