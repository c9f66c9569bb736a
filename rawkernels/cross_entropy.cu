// Softmax cross entropy with label smoothing, and its gradient.
// Constants: scalar = float, f16, bf16; label = int, long long; BLOCK = 256
// Launch:    forward and backward: grid = (rows,), block = (BLOCK,), a block per row, two passes
//            over it. reduce: grid = (1,), block = (BLOCK,).
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/index.cuh"
#include "common/reduce.cuh"

static_assert(BLOCK % 32 == 0, "cross_entropy.cu: BLOCK must be a multiple of the warp size");

extern "C" __global__ void cross_entropy_forward(
    const scalar* __restrict__ logits,   // (rows, >= vocab), rows `stride` apart
    const label* __restrict__ labels,    // (rows,)
    float* __restrict__ loss,            // (rows,)
    float* __restrict__ statistics,      // (rows, 2): maximum, and sum of exp(x - maximum)
    long long stride,
    int vocab,
    float label_share,
    float other_share,
    long long ignore_index,
    long long* flag) {
    const long long row = blockIdx.x;
    const scalar* x = logits + row * stride;
    long long chosen = labels[row];
    if (chosen == ignore_index) {
        if (threadIdx.x == 0) loss[row] = 0.f;
        return;
    }
    if (out_of_range(chosen, vocab, flag)) chosen = 0;

    float peak = NEG_INF;
    for (int j = threadIdx.x; j < vocab; j += BLOCK) peak = fmaxf(peak, (float)x[j]);
    peak = block_reduce<BLOCK>(peak, Max{}, NEG_INF);
    float sum = 0.f, total = 0.f;
    for (int j = threadIdx.x; j < vocab; j += BLOCK) {
        const float shifted = (float)x[j] - peak;
        sum += expf(shifted);
        total += shifted;
    }
    sum = block_reduce<BLOCK>(sum, Sum{}, 0.f);
    total = block_reduce<BLOCK>(total, Sum{}, 0.f);
    if (threadIdx.x > 0) return;
    float value = logf(sum) - (label_share - other_share) * ((float)x[chosen] - peak);
    if (other_share > 0.f) value -= other_share * total;  // 0 * -inf is not a number
    loss[row] = value;
    statistics[2 * row] = peak;
    statistics[2 * row + 1] = sum;
}

extern "C" __global__ void cross_entropy_reduce(
    const float* __restrict__ loss,     // (rows,)
    const label* __restrict__ labels,   // (rows,)
    float* __restrict__ divisor,        // (): the number of rows that count, at least 1; or 1
    float* __restrict__ out,            // (): the sum of the losses over the divisor
    long long rows,
    long long ignore_index,
    bool mean) {
    float sum = 0.f, count = 0.f;
    for (long long row = threadIdx.x; row < rows; row += BLOCK) {
        sum += loss[row];
        count += labels[row] != ignore_index ? 1.f : 0.f;
    }
    sum = block_reduce<BLOCK>(sum, Sum{}, 0.f);
    count = block_reduce<BLOCK>(count, Sum{}, 0.f);
    if (threadIdx.x > 0) return;
    *divisor = mean ? fmaxf(count, 1.f) : 1.f;
    *out = sum / *divisor;
}

extern "C" __global__ void cross_entropy_backward(
    const scalar* logits,                   // (rows, >= vocab), rows `stride` apart
    const label* __restrict__ labels,       // (rows,)
    const float* __restrict__ statistics,   // (rows, 2)
    const float* __restrict__ dloss,        // (rows,), or () with a divisor
    const float* __restrict__ divisor,      // () or null
    scalar* dlogits,                        // (rows, cols), rows `out_stride` apart; may be logits
    long long stride,
    long long out_stride,
    int vocab,
    int cols,
    float label_share,
    float other_share,
    long long ignore_index) {
    const long long row = blockIdx.x;
    const scalar* x = logits + row * stride;
    scalar* dx = dlogits + row * out_stride;
    const long long chosen = labels[row];
    if (chosen == ignore_index) {
        for (int j = threadIdx.x; j < cols; j += BLOCK) dx[j] = (scalar)0.f;
        return;
    }
    const float weight = divisor ? *dloss / *divisor : dloss[row];
    const float peak = statistics[2 * row], share = 1.f / statistics[2 * row + 1];
    for (int j = threadIdx.x; j < cols; j += BLOCK) {
        float gradient = 0.f;
        if (j < vocab)
            gradient = weight * (expf((float)x[j] - peak) * share - (j == chosen ? label_share : other_share));
        dx[j] = (scalar)gradient;
    }
}
