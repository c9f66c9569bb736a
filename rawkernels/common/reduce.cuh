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

// The minimum and maximum of integers over the warp, in every lane; `redux` from sm_80 on.
template <typename T> __device__ __forceinline__ T warp_min(T value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(~0u, value);
#else
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) value = min(value, __shfl_xor_sync(~0u, value, lane));
    return value;
#endif
}
template <typename T> __device__ __forceinline__ T warp_max(T value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) value = max(value, __shfl_xor_sync(~0u, value, lane));
    return value;
#endif
}
