// Second stage of a column sum: adds the partial sums of each column, in order.
// Constants: scalar = float, f16, bf16 (of the result); BLOCK = 128
// Launch:    column_sum:  grid = (ceil(cols / BLOCK),), block = (BLOCK,). A thread owns one column.
//            column_sums: grid = (ceil(cols / 32), 3), block = (1024,). For few columns: a warp adds
//            every 32nd part of 32 columns. Up to three sums per launch.
//            dependent: column_sum, column_sums
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"

extern "C" __global__ void column_sum(
    const float* partial,  // (parts, cols)
    scalar* __restrict__ out,           // (cols,)
    int parts,
    long long cols,
    bool accumulate) {
    grid_dependency_wait();
    const long long col = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (col >= cols) return;
    float sum = accumulate ? (float)out[col] : 0.f;
    for (int part = 0; part < parts; ++part) sum += partial[part * cols + col];
    out[col] = (scalar)sum;
}

extern "C" __global__ void column_sums(
    const float* partial0,  // (parts, cols)
    const float* partial1,
    const float* partial2,
    scalar* __restrict__ out0,           // (cols,), or null: skip this sum
    scalar* __restrict__ out1,
    scalar* __restrict__ out2,
    int parts,
    int cols,
    int accumulate) {                    // bit n: add to out<n> instead of overwriting it
    grid_dependency_wait();
    const float* partial = blockIdx.y == 0 ? partial0 : blockIdx.y == 1 ? partial1 : partial2;
    scalar* out = blockIdx.y == 0 ? out0 : blockIdx.y == 1 ? out1 : out2;
    if (!out) return;
    __shared__ float sums[32][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 32;
    float sum = 0.f;
    if (first + lane < cols) {
#pragma unroll 8
        for (int part = warp; part < parts; part += 32) sum += partial[(long long)part * cols + first + lane];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    grid_launch_dependents();
    sum = sums[lane][warp];  // the warp's column
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0 && first + warp < cols) {
        if (accumulate >> blockIdx.y & 1) sum += (float)out[first + warp];
        out[first + warp] = (scalar)sum;
    }
}
