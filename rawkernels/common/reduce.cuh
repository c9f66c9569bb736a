#pragma once
// Reductions over a warp and over a block, in a fixed order.

struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };

// Returns the reduction of `value` over the warp, in every lane.
template <typename Op>
__device__ float warp_reduce(float value, Op op) {
    for (int lane = 16; lane > 0; lane >>= 1) value = op(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

// Returns the reduction of `value` over the block, in every thread.
template <int BLOCK, typename Op>
__device__ float block_reduce(float value, Op op, float identity) {
    __shared__ float partial[BLOCK / 32];
    value = warp_reduce(value, op);
    __syncthreads();  // `partial` may still be read by the previous call
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = identity;
    for (int warp = 0; warp < BLOCK / 32; ++warp) value = op(value, partial[warp]);
    return value;
}
