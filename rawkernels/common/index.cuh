#pragma once
// Range checks for indices given by the caller. An index out of range is recorded in a flag, which the host reads at its
// next copy (gpuattn.arrays.check_indices), and is never used to access memory.

__device__ inline bool out_of_range(long long index, long long size, long long* flag) {
    if (0 <= index && index < size) return false;
    flag[0] = (1LL << 62) + index;
    flag[1] = size;
    return true;
}
