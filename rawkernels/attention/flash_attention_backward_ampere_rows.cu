// The first and the last launch of the gradient by mma.sync: delta and lse of rows; dq from its sums.
// Constants: scalar = f16, bf16; HEAD_DIM = 64, 96, 128, 192, 256
// Constants below sm_80: scalar = f16; HEAD_DIM = 64, 128, 192
// Launch:    grid = (ceil(longest queries / 16) * sequences,), block = (256,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_backward_mma.cuh"

constexpr int ROWS_THREADS = 256, ROWS_LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;

__device__ __forceinline__ float dot_pairs(u32 x, u32 y) {
    scalar a, b, c, d;
    a.bits = (unsigned short)x, b.bits = (unsigned short)(x >> 16);
    c.bits = (unsigned short)y, d.bits = (unsigned short)(y >> 16);
    return (float)a * (float)c + (float)b * (float)d;
}

extern "C" __global__ void __launch_bounds__(256) flash_attention_rows(
    const Attention a,
    const scalar* __restrict__ out,   // (B, T, H, Dv), or (tokens, H, Dv) with cu_q, by strides
    const scalar* __restrict__ dout,  // (B, T, H, Dv)
    const float* __restrict__ lse,    // (B, H, T)
    const float* __restrict__ dlse,   // (B, H, T), or null
    float* __restrict__ stats,        // (H, rows, 2): lse / log(2), +inf where no key is seen or past the end; delta
    float* __restrict__ delta,        // (B, H, T) or null: rowsum(dout * out) - dlse
    long long rows) {
    const int units = (a.queries + UNIT - 1) / UNIT, first = blockIdx.x % units * UNIT;
    const Sequence s = sequence_at(a, blockIdx.x / units);
    if (first >= s.queries) return;
    const int column = threadIdx.x % ROWS_LANES * 8;
#pragma unroll 4
    for (int task = threadIdx.x / ROWS_LANES; task < UNIT * a.heads; task += ROWS_THREADS / ROWS_LANES) {
        const int i = first + task / a.heads, head = task % a.heads;
        const bool inside = i < s.queries;
        float sum = 0.f;
        if (inside && column < a.value_dim) {
            const uint4 x = *(const uint4*)(rows_of(out, a.out, s.number, s.first_query + i, head) + column);
            const uint4 y = *(const uint4*)(rows_of(dout, a.dout, s.number, s.first_query + i, head) + column);
            sum = (dot_pairs(x.x, y.x) + dot_pairs(x.y, y.y)) +
                  (dot_pairs(x.z, y.z) + dot_pairs(x.w, y.w));
        }
#pragma unroll
        for (int lane = ROWS_LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
        if (column > 0) continue;
        float scaled = INF;
        if (inside) {
            const long long e = s.number * a.lse_batch + head * a.lse_head + s.first_query + i;
            if (dlse) sum -= dlse[e];
            if (delta) delta[e] = sum;
            if (lse[e] != NEG_INF) scaled = lse[e] * LOG2E;
        }
        ((float2*)stats)[head * rows + first_row(a, s) + i] = make_float2(scaled, sum);
    }
}

// dq = scale * dq_sum, rounded to 16 bits.
extern "C" __global__ void __launch_bounds__(256) flash_attention_dq_store(
    const Attention a,
    const float* __restrict__ dq_sum,
    scalar* __restrict__ dq) {        // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const int units = (a.queries + UNIT - 1) / UNIT, first = blockIdx.x % units * UNIT;
    const Sequence s = sequence_at(a, blockIdx.x / units);
    const int row = threadIdx.x % UNIT, i = first + row;
    if (i >= s.queries) return;
#pragma unroll 2
    for (int task = threadIdx.x / UNIT; task < a.heads * (HEAD_DIM / 8); task += ROWS_THREADS / UNIT) {
        const int head = task / (HEAD_DIM / 8), column = task % (HEAD_DIM / 8) * 8;
        if (column >= a.head_dim) continue;
        const float* sum = dq_unit(a, (float*)dq_sum, first_row(a, s) + first, head) + column * UNIT;
        u32 packed[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 x = fragment_pair(sum, row, t);
            packed[t] = pack_pair(scalar(), x.x * a.scale, x.y * a.scale);
        }
        scalar* target = dq + s.number * a.dq.batch + (s.first_query + i) * a.dq.row + head * a.dq.head + column;
        *(uint4*)target = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}
