#pragma once
// Indices from outside. What is out of range is noted in a flag that the host reads when it next
// copies something (gpuattn.arrays.check_indices), and never followed.

__device__ inline bool out_of_range(long long index, long long size, long long* flag) {
    if (0 <= index && index < size) return false;
    flag[0] = (1LL << 62) + index;
    flag[1] = size;
    return true;
}
