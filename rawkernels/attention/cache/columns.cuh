#pragma once
// Maxima and sums of columns of products by mma.sync, 16 keys and 8 columns: lanes 4 apart have the same columns.

// The maximum, or the sum, over the lanes with the same columns.
__device__ float most_of_columns(float x) {
#pragma unroll
    for (int lane = 4; lane < 32; lane <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}
__device__ float sum_of_columns(float x) {
#pragma unroll
    for (int lane = 4; lane < 32; lane <<= 1) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
