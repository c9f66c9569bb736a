// h = residual + dropout(x + x_bias), normed = LayerNorm or RMSNorm of h; and the gradients.
// Constants: scalar = float, f16, bf16; RMS = false, true; BLOCK = 128, 512
// Launch:    grid = (up to rows,), block = (BLOCK,).  A block takes rows b, b + grid, ...
//            column_sum.cu then adds the blocks' sums of the backward, in order.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/norm.cuh"
#include "common/philox.cuh"

static_assert(BLOCK % 32 == 0, "dropout_add_norm.cu: BLOCK must be a multiple of 32");

// What an element is multiplied with. A threshold of 65536 keeps everything and draws nothing.
__device__ inline float dropout_factor(PhiloxKey key, long long index, unsigned int threshold, float factor) {
    return threshold > 0xFFFFu || philox_u16(key, index) < threshold ? factor : 0.f;
}

extern "C" __global__ void dropout_add_norm_forward(
    const scalar* __restrict__ x,         // (rows, cols)
    const scalar* __restrict__ residual,  // (rows, cols)
    const scalar* __restrict__ weight,    // (cols,) or null: ones
    const scalar* __restrict__ bias,      // (cols,) or null: zeros
    const scalar* __restrict__ x_bias,    // (cols,) or null: zeros
    scalar* normed,                       // (rows, cols)
    scalar* h,                            // (rows, cols), written and read again
    float* __restrict__ mean,             // (rows,) of h minus the row's first element; null: not wanted
    float* __restrict__ rstd,             // (rows,) or null
    long long rows,
    int cols,
    float eps,
    unsigned int threshold,               // keep lanes below it; 65536 keeps all
    float factor,                         // 1 / (1 - p)
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* __restrict__ device_step) {
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const long long start = r * cols;
        for (int j = threadIdx.x; j < cols; j += BLOCK) {
            float value = (float)x[start + j] + at(x_bias, j, 0.f);
            value *= dropout_factor(key, start + j, threshold, factor);
            h[start + j] = (scalar)((float)residual[start + j] + value);
        }
        __syncthreads();  // every thread reads the row's first element
        const RowStatistics row = row_statistics<RMS>(h + start, cols, eps);
        for (int j = threadIdx.x; j < cols; j += BLOCK)
            normed[start + j] = (scalar)(row(h[start + j]) * at(weight, j, 1.f) + at(bias, j, 0.f));
        if (rstd && threadIdx.x == 0) {
            mean[r] = row.mean;
            rstd[r] = row.rstd;
        }
    }
}

extern "C" __global__ void dropout_add_norm_backward(
    const scalar* __restrict__ h,        // (rows, cols)
    const scalar* __restrict__ weight,   // (cols,) or null: ones
    const float* __restrict__ mean,      // (rows,)
    const float* __restrict__ rstd,      // (rows,)
    const scalar* __restrict__ dnormed,  // (rows, cols)
    const scalar* __restrict__ dh,       // (rows, cols), of h as an output; null: zeros
    scalar* __restrict__ dx,             // (rows, cols); null: without dropout it is dresidual
    scalar* __restrict__ dresidual,      // (rows, cols)
    float* __restrict__ dweight,         // (grid, cols) sums over this block's rows; null: not wanted
    float* __restrict__ dbias,           // (grid, cols) or null
    float* __restrict__ dx_bias,         // (grid, cols) or null
    long long rows,
    int cols,
    unsigned int threshold,
    float factor,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* __restrict__ device_step) {
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const long long start = r * cols;
        const scalar *row_h = h + start, *row_dnormed = dnormed + start;
        const RowStatistics row{row_pivot<RMS>(row_h), mean[r], rstd[r]};
        const RowGradient means = row_gradient<RMS>(row, row_h, weight, row_dnormed, cols);
        const bool first = r == blockIdx.x;
        for (int j = threadIdx.x; j < cols; j += BLOCK) {
            float normalized = row(row_h[j]), g = (float)row_dnormed[j];
            add_to_column(dweight, cols, j, first, g * normalized);
            add_to_column(dbias, cols, j, first, g);
            g = row.rstd * (g * at(weight, j, 1.f) - means.mean - normalized * means.projection);
            if (dh) g += (float)dh[start + j];
            dresidual[start + j] = (scalar)g;
            g *= dropout_factor(key, start + j, threshold, factor);
            if (dx) dx[start + j] = (scalar)g;
            add_to_column(dx_bias, cols, j, first, g);
        }
    }
}
