// Softmax over the last axis of scale * x + mask, and its gradient.
// Constants: scalar = float, f16, bf16; MASK = 0, 1, 2 (none, keep where true, add); BLOCK = 128, 512
// Launch:    grid = (up to rows,), block = (BLOCK,).  A block takes whole rows, three passes over each.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/reduce.cuh"

static_assert(BLOCK % 32 == 0, "softmax.cu: BLOCK must be a multiple of 32");
static_assert(0 <= MASK && MASK <= 2, "softmax.cu: MASK is 0 (none), 1 (keep) or 2 (add)");

// The logits of one row, -inf where they are not seen.
struct Row {
    const scalar* x;
    const void* mask;
    long long mask_start, mask_stride;
    int visible;
    float scale;

    __device__ float operator[](int j) const {
        if (j >= visible) return NEG_INF;
        float logit = (float)x[j] * scale;
        if constexpr (MASK == 1) return ((const bool*)mask)[mask_start + j * mask_stride] ? logit : NEG_INF;
        if constexpr (MASK == 2) return logit + (float)((const scalar*)mask)[mask_start + j * mask_stride];
        return logit;
    }
};

extern "C" __global__ void softmax_forward(
    const scalar* __restrict__ x,   // (rows, cols)
    const void* __restrict__ mask,  // bool or scalar, broadcast by strides to (i0, size1, size2, cols); or null
    scalar* __restrict__ y,         // (rows, cols)
    long long rows,
    int cols,
    int queries,                    // causal: the rows of one matrix; 0: not causal
    float scale,
    long long size1,
    long long size2,
    long long stride0,              // elements
    long long stride1,
    long long stride2,
    long long stride3) {
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        long long start = 0;
        if constexpr (MASK != 0)
            start = r / (size1 * size2) * stride0 + r / size2 % size1 * stride1 + r % size2 * stride2;
        const int visible = queries ? min(cols, (int)(r % queries) + 1 + cols - queries) : cols;
        const Row row{x + r * cols, mask, start, stride3, visible, scale};

        float peak = NEG_INF;
        for (int j = threadIdx.x; j < cols; j += BLOCK) peak = fmaxf(peak, row[j]);
        peak = block_reduce<BLOCK>(peak, Max{}, NEG_INF);
        if (peak == NEG_INF) peak = 0.f;  // nothing to see: exp(-inf - 0) = 0, and NaN stays NaN

        float total = 0.f;
        for (int j = threadIdx.x; j < cols; j += BLOCK) total += expf(row[j] - peak);
        total = block_reduce<BLOCK>(total, Sum{}, 0.f);
        if (total == 0.f) total = 1.f;

        for (int j = threadIdx.x; j < cols; j += BLOCK)
            y[r * cols + j] = (scalar)(expf(row[j] - peak) / total);
    }
}

extern "C" __global__ void softmax_backward(
    const scalar* __restrict__ y,   // (rows, cols)
    const scalar* __restrict__ dy,  // (rows, cols)
    scalar* __restrict__ dx,        // (rows, cols)
    long long rows,
    int cols,
    float scale) {
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const long long row = r * cols;
        float dot = 0.f;
        for (int j = threadIdx.x; j < cols; j += BLOCK) dot += (float)y[row + j] * (float)dy[row + j];
        dot = block_reduce<BLOCK>(dot, Sum{}, 0.f);
        for (int j = threadIdx.x; j < cols; j += BLOCK)
            dx[row + j] = (scalar)(scale * (float)y[row + j] * ((float)dy[row + j] - dot));
    }
}
