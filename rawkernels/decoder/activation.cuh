#pragma once
// The activation behind a linear layer of decoder_step.cu and cluster_step.cu.
#include "common/math.cuh"
#include "linear/gelu.cuh"

enum Activation { NO_ACTIVATION, RELU, GELU };

__device__ float activated(float x, int activation) {
    if (activation == RELU) return fmaxf(x, 0.f);
    if (activation == GELU) return __fdividef(x, 1.f + exp2_fast(x * EXPONENT * (1.f + TANH_CUBIC * x * x)));
    return x;
}
