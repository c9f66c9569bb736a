// Attention, softmax(scale * q k^T) v with an online softmax; any GPU, fp32 on CUDA cores.
// Constants: scalar = float, f16, bf16; HEAD_DIM = 32, 64, 128, 256 (both head sizes rounded up)
// Launch:    grid = (ceil(longest queries / ROWS) * heads * sequences,), block = (THREADS,),
//            shared = FORWARD_FLOATS * 4 bytes; ROWS = 16 for HEAD_DIM 256, else 32; THREADS = 4 ROWS
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/attention_simt.cuh"
#include "common/reduce.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "flash_attention_forward_simt.cu: HEAD_DIM is 32 .. 256");
constexpr int FORWARD_FLOATS = 3 * ROWS * PITCH + ROWS * WEIGHTS_PITCH;

extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_attention_forward(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    scalar* __restrict__ out,             // (B, T, H, Dv)
    float* __restrict__ lse) {            // (B, H, T)
    extern __shared__ __align__(16) float shared[];
    __shared__ unsigned char keep[ROWS * ROWS];
    float* q_tile = shared;
    float* k_tile = q_tile + ROWS * PITCH;
    float* v_tile = k_tile + ROWS * PITCH;
    float* weights = v_tile + ROWS * PITCH;

    const Place place = find_place(a.queries, a.heads);
    const Sequence s = find_sequence(a, place.number);
    if (place.first >= s.queries) return;
    const int head = place.head, kv_head = head / a.group, first = place.first;
    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4, i = first + row;
    const PhiloxKey key = key_of(a);
    const float slope = slope_of(a, s.number, head);
    float* my_weights = weights + row * WEIGHTS_PITCH;

    const int last = min(first + ROWS, s.queries) - 1;
    const int begin = max(0, first + s.offset - a.left) / ROWS * ROWS;
    const int end = min(s.keys, last + s.offset + a.right + 1);
    const scalar* q_rows = rows_of(q, a.q, s.number, s.first_query + first, head);
    load_tile(q_tile, q_rows, a.q, s.queries - first, a.head_dim);

    // a sink is one more key, of value zero; `total` is this thread's share of the sum
    float top = a.sink ? a.sink[head] : NEG_INF, total = a.sink && quarter == 0 ? 1.f : 0.f;
    float sum[HEAD_DIM / 4] = {};
    for (int j = begin; j < end; j += ROWS) {
        __syncthreads();  // the last tile may still be read
        const scalar* k_rows = rows_of(k, a.k, s.number, s.first_key + j, kv_head);
        const scalar* v_rows = rows_of(v, a.v, s.number, s.first_key + j, kv_head);
        load_tile(k_tile, k_rows, a.k, s.keys - j, a.head_dim);
        load_tile(v_tile, v_rows, a.v, s.keys - j, a.value_dim);
        if (a.threshold < 65536) draw_keep(keep, a, key, first, j, s, head);
        __syncthreads();

        float x[COLS], bend, peak = top;
        dot_rows(q_tile + row * PITCH, k_tile, quarter, x);
#pragma unroll
        for (int n = 0; n < COLS; ++n) {
            x[n] = logit(a, s, x[n], i, j + quarter + 4 * n, head, slope, bend);
            peak = fmaxf(peak, x[n]);
        }
        peak = row_reduce(peak, Max{});
        const float finite = peak == NEG_INF ? 0.f : peak, fade = expf(top - finite);
        top = peak;
        total *= fade;
#pragma unroll
        for (int n = 0; n < COLS; ++n) {
            int column = quarter + 4 * n;
            float p = expf(x[n] - finite);
            total += p;
            if (a.threshold < 65536) p *= keep[row * ROWS + column] ? a.keep_scale : 0.f;
            my_weights[column] = p;
        }
        __syncwarp();
#pragma unroll
        for (int e = 0; e < HEAD_DIM / 4; ++e) sum[e] *= fade;
        add_rows(my_weights, v_tile, min(ROWS, s.keys - j), quarter, sum);
    }

    total = row_reduce(total, Sum{});
    if (i >= s.queries) return;
    const long long at = s.first_query + i;
    scalar* out_row = out + s.number * a.out.batch + at * a.out.row + head * a.out.head;
    store_row(out_row, a.out.column, a.value_dim, quarter, total == 0.f ? 0.f : 1.f / total, sum);
    if (quarter == 0) lse[s.number * a.lse_batch + head * a.lse_head + at] = top + logf(total);
}
