#pragma once
// The statistics of a row whose equal parts have them already.

struct RowParts {
    float pivot;                                // the mean of some part: what is summed is relative to it
    float apart = 0, squares = 0, within = 0;   // sums over parts: of means, of their squares, and of squares within parts

    __device__ __forceinline__ void add(float2 part) {
        apart += part.x - pivot, squares = fmaf(part.x - pivot, part.x - pivot, squares), within += part.y;
    }
    // The mean of the row and 1 / its standard deviation.
    __device__ __forceinline__ float2 joined(int parts, int width, float eps) const {
        const float mean = apart / parts, between = fmaxf(squares - apart * mean, 0.f);
        return {pivot + mean, rsqrtf(within / width + between / parts + eps)};
    }
};
