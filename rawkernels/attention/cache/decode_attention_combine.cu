// Combines the splits of decode attention: out = sum_s w_s parts_s, w_s = exp(lse_s - max) / sum.
// A block takes one query row. A thread takes one column, of every n-th split where the threads suffice for n groups.
// Constants: scalar = float, f16, bf16
// Launch:    grid = (B * T * H,), block = (256,), shared = 4 * splits bytes
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/reduce.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) decode_attention_combine(
    const float* __restrict__ parts,      // (splits, rows, value_dim); unwritten where parts_lse is -inf
    const float* __restrict__ parts_lse,  // (splits, rows), rows = (B, T, H)
    scalar* __restrict__ out,             // (rows, value_dim)
    float* __restrict__ lse,              // (B, H, T)
    int splits,
    int value_dim,
    int queries,
    int heads) {
    extern __shared__ float weights[];    // (splits,)
    __shared__ float merged[THREADS];
    const int thread = threadIdx.x;
    const long long row = blockIdx.x, rows = gridDim.x;
    float top = NEG_INF, sum = 0.f;
    for (int s = thread; s < splits; s += THREADS) {
        weights[s] = parts_lse[s * rows + row];
        top = fmaxf(top, weights[s]);
    }
    top = block_reduce<THREADS>(top, Max{}, NEG_INF);
    const float base = top == NEG_INF ? 0.f : top;
    for (int s = thread; s < splits; s += THREADS) sum += weights[s] = expf(weights[s] - base);
    sum = block_reduce<THREADS>(sum, Sum{}, 0.f);  // its barriers also publish the weights
    const float factor = sum == 0.f ? 0.f : 1.f / sum;

    const int groups = max(1, THREADS / value_dim), group = thread / value_dim;
    for (int first = 0; first < value_dim; first += THREADS) {  // one pass up to a head size of 256
        const int column = first + thread % value_dim;
        float y = 0.f;
        if (group < groups && column < value_dim) {
#pragma unroll 8
            for (int s = group; s < splits; s += groups)
                if (weights[s] != 0.f) y += weights[s] * parts[(s * rows + row) * value_dim + column];
        }
        merged[thread] = y;
        __syncthreads();
        if (group == 0 && column < value_dim) {
            for (int g = 1; g < groups; ++g) y += merged[g * value_dim + thread];
            out[row * value_dim + column] = (scalar)(y * factor);
        }
        __syncthreads();
    }
    if (thread == 0) {
        const long long head = row % heads, token = row / heads % queries, batch = row / heads / queries;
        lse[(batch * heads + head) * queries + token] = base + logf(sum);
    }
}
