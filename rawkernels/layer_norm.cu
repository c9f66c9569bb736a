// LayerNorm and RMSNorm over the last axis, and their gradients.
// Constants: scalar = float, f16, bf16; RMS = false, true; BLOCK = 128, 512
// Launch:    grid = (up to rows,), block = (BLOCK,).  A block takes rows b, b + grid, ...; each is read
//            once per pass. column_sum.cu then adds the blocks' sums of the backward, in order.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/norm.cuh"

static_assert(BLOCK % 32 == 0, "layer_norm.cu: BLOCK must be a multiple of 32");

extern "C" __global__ void layer_norm_forward(
    const scalar* __restrict__ x,       // (rows, cols)
    const scalar* __restrict__ weight,  // (cols,) or null: ones
    const scalar* __restrict__ bias,    // (cols,) or null: zeros
    scalar* __restrict__ y,             // (rows, cols)
    float* __restrict__ mean,           // (rows,) of x minus the row's first element; null: not wanted
    float* __restrict__ rstd,           // (rows,) or null
    long long rows,
    int cols,
    float eps) {
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const scalar* row_x = x + r * cols;
        const RowStatistics row = row_statistics<RMS>(row_x, cols, eps);
        for (int j = threadIdx.x; j < cols; j += BLOCK)
            y[r * cols + j] = (scalar)(row(row_x[j]) * at(weight, j, 1.f) + at(bias, j, 0.f));
        if (rstd && threadIdx.x == 0) {
            mean[r] = row.mean;
            rstd[r] = row.rstd;
        }
    }
}

extern "C" __global__ void layer_norm_backward(
    const scalar* __restrict__ x,       // (rows, cols)
    const scalar* __restrict__ weight,  // (cols,) or null: ones
    const scalar* __restrict__ dy,      // (rows, cols)
    const float* __restrict__ mean,     // (rows,)
    const float* __restrict__ rstd,     // (rows,)
    scalar* __restrict__ dx,            // (rows, cols)
    float* __restrict__ dweight,        // (grid, cols) sums over this block's rows; null: not wanted
    float* __restrict__ dbias,          // (grid, cols) or null
    long long rows,
    int cols) {
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const scalar *row_x = x + r * cols, *row_dy = dy + r * cols;
        const RowStatistics row{row_pivot<RMS>(row_x), mean[r], rstd[r]};
        const RowGradient means = row_gradient<RMS>(row, row_x, weight, row_dy, cols);
        const bool first = r == blockIdx.x;
        for (int j = threadIdx.x; j < cols; j += BLOCK) {
            float normalized = row(row_x[j]), g = (float)row_dy[j];
            add_to_column(dweight, cols, j, first, g * normalized);
            add_to_column(dbias, cols, j, first, g);
            g = g * at(weight, j, 1.f) - means.mean - normalized * means.projection;
            dx[r * cols + j] = (scalar)(row.rstd * g);
        }
    }
}
