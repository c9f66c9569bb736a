#pragma once
// Products of 16 keys and 8 columns by mma.sync: a lane has the columns 2 (lane % 4) and the next.

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
