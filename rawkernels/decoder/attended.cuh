#pragma once
// Sums of values in the attention of decoder_step.cu and cluster_step.cu.
#include "common/math.cuh"
#include "common/pack.cuh"

// What a warp has of a row and head: values summed by their weights, which are relative to the greatest logit so far, `peak`.
// A lane has 8 columns of the values of some keys, and the sum of some weights.
struct Attended {
    static constexpr int WIDE = 8, SIZE = HEAD_DIM + 8;  // SIZE: in shared memory, (HEAD_DIM,), peak and sum
    float acc[WIDE] = {}, peak = NEG_INF, sum = 0;

    // Makes weights of logits, of which the lanes 4 g to 4 g + 3 have the same. `most`: the greatest of them and the peak.
    template <int N> __device__ void weigh(float (&logits)[N], float most) {
#pragma unroll
        for (int other = 4; other < 32; other <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        const float level = most == NEG_INF ? 0.f : most, correction = exp2_fast(peak - level);
        peak = most, sum *= correction;
#pragma unroll
        for (int i = 0; i < WIDE; ++i) acc[i] *= correction;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            logits[i] = exp2_fast(logits[i] - level);
            sum += logits[i];
        }
    }
    __device__ void add(float weight, uint4 value) {
        float x[WIDE];
        unpack(x, __builtin_bit_cast(Pack<scalar, WIDE>, value));
#pragma unroll
        for (int i = 0; i < WIDE; ++i) acc[i] += weight * x[i];
    }
    // The sums of all lanes; those with the same columns are FIRST, 2 * FIRST, ... apart, less than END.
    template <int FIRST, int END> __device__ void reduce() {
#pragma unroll
        for (int other = 4; other < 32; other <<= 1) sum += __shfl_xor_sync(~0u, sum, other);
#pragma unroll
        for (int other = FIRST; other < END; other <<= 1)
#pragma unroll
            for (int i = 0; i < WIDE; ++i) acc[i] += __shfl_xor_sync(~0u, acc[i], other);
    }
    // For other warps, after `reduce`: by one group of the lanes with different columns.
    __device__ void store(float* to, int lane, int group, int column) const {
        if (group == 0) {
            *reinterpret_cast<float4*>(to + column) = make_float4(acc[0], acc[1], acc[2], acc[3]);
            *reinterpret_cast<float4*>(to + column + 4) = make_float4(acc[4], acc[5], acc[6], acc[7]);
        }
        if (lane == 0) *reinterpret_cast<float2*>(to + HEAD_DIM) = make_float2(peak, sum);
    }
    // The values that a warp stored.
    __device__ void add(float weight, const float* from, int column) {
        const float4 a = *reinterpret_cast<const float4*>(from + column);
        const float4 b = *reinterpret_cast<const float4*>(from + column + 4);
        acc[0] += weight * a.x, acc[1] += weight * a.y, acc[2] += weight * a.z, acc[3] += weight * a.w;
        acc[4] += weight * b.x, acc[5] += weight * b.y, acc[6] += weight * b.z, acc[7] += weight * b.w;
    }
};
