// dz = dy * slopes, for a gradient dy in memory; the slopes are codes of one byte, as linear_gelu_hopper.cu stores them.
// Constants: scalar = f16, bf16
// Launch:    grid = (blocks of 64 rows x 32 columns,), block = (128,)
//            dependent: gelu_slopes_backward
// Arch: sm_90
#include "common/grid_dependency.cuh"
#include "linear/gelu_slopes.cuh"

extern "C" __global__ void __launch_bounds__(128) gelu_slopes_backward(
    const scalar* dy,  // (rows, columns), like dz; columns are a multiple of 8
    const uint4* codes, scalar* dz, int rows, int columns, int across) {  // across: blocks in a row
    grid_dependency_wait();
    const int lane = threadIdx.x % 32, block = blockIdx.x;
    const int first_row = block / across * 64 + threadIdx.x / 32 * 16 + lane / 4;
    const int first_column = block % across * 32 + lane % 4 * 2;
    const uint4 four = codes[block * 128ll + threadIdx.x];
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    u32 pairs[8];  // of two rows alternately, in four groups of columns
    const auto pair_at = [&](int n) { return ((first_row + n % 2 * 8ll) * columns + first_column + n / 2 * 8) / 2; };
    const auto is_there = [&](int n) { return first_row + n % 2 * 8 < rows && first_column + n / 2 * 8 < columns; };
#pragma unroll
    for (int n = 0; n < 8; ++n)
        if (is_there(n)) pairs[n] = reinterpret_cast<const u32*>(dy)[pair_at(n)];
#pragma unroll
    for (int n = 0; n < 8; ++n)
        if (is_there(n)) reinterpret_cast<u32*>(dz)[pair_at(n)] = times_slopes(pairs[n], words[n / 2], n % 2);
}
