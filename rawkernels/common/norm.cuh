#pragma once
#include "common/reduce.cuh"
// What the norms share: a row's statistics and its gradient. `scalar` and BLOCK are the file's constants.

// normalized = (x - pivot - mean) * rstd. LayerNorm subtracts the row's first element before it adds
// up: exact for a constant row, and right however large the mean is beside the deviation. RMSNorm
// subtracts nothing.
struct RowStatistics {
    float pivot, mean, rstd;

    __device__ float operator()(scalar x) const { return ((float)x - pivot - mean) * rstd; }
};

template <bool RMS>
__device__ float row_pivot(const scalar* x) {
    return RMS ? 0.f : (float)x[0];
}

template <bool RMS>
__device__ RowStatistics row_statistics(const scalar* x, int cols, float eps) {
    RowStatistics row{row_pivot<RMS>(x), 0.f, 1.f};
    if constexpr (!RMS) {
        float sum = 0.f;
        for (int j = threadIdx.x; j < cols; j += BLOCK) sum += (float)x[j] - row.pivot;
        row.mean = block_reduce<BLOCK>(sum, Sum{}, 0.f) / cols;
    }
    float square = 0.f;
    for (int j = threadIdx.x; j < cols; j += BLOCK) square += row(x[j]) * row(x[j]);
    row.rstd = 1.f / sqrtf(block_reduce<BLOCK>(square, Sum{}, 0.f) / cols + eps);
    return row;
}

__device__ inline float at(const scalar* values, int j, float missing) {
    return values ? (float)values[j] : missing;
}

// dx = rstd * (g - mean(g) - normalized * mean(g * normalized)) with g = weight * dy;
// RMSNorm has no mean(g).
struct RowGradient {
    float mean, projection;
};

template <bool RMS>
__device__ RowGradient row_gradient(RowStatistics row, const scalar* x, const scalar* weight, const scalar* dy,
                                    int cols) {
    float sum = 0.f, dot = 0.f;
    for (int j = threadIdx.x; j < cols; j += BLOCK) {
        float g = at(weight, j, 1.f) * (float)dy[j];
        sum += g;
        dot += g * row(x[j]);
    }
    if constexpr (RMS) sum = 0.f;
    else sum = block_reduce<BLOCK>(sum, Sum{}, 0.f);
    return {sum / cols, block_reduce<BLOCK>(dot, Sum{}, 0.f) / cols};
}

// Adds to this block's sum of a column; its first row begins the sum. Each column belongs to one thread.
__device__ inline void add_to_column(float* sums, int cols, int j, bool first, float value) {
    if (!sums) return;
    float* sum = sums + (long long)blockIdx.x * cols + j;
    *sum = first ? value : *sum + value;
}
