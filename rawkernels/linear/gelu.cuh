#pragma once
// GELU by tanh (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016): z / (1 + odds) with odds =
// exp(-2 u(z)) = 2^(z EXPONENT (1 + TANH_CUBIC z^2)), and 2 u'(z) = STEEP + STEEP_CUBIC z^2.
#include "common/math.cuh"

constexpr float SQRT_HALF = 0.7071067812f;
constexpr float DENSITY = 0.3989422804f;    // 1 / sqrt(2 pi)
constexpr float TANH_INNER = 0.7978845608f;  // sqrt(2 / pi)
constexpr float TANH_CUBIC = 0.044715f;
constexpr float EXPONENT = -2.f * LOG2E * TANH_INNER;
constexpr float STEEP = 2.f * TANH_INNER, STEEP_CUBIC = 6.f * TANH_INNER * TANH_CUBIC;

// The normal distribution below z, Phi, within 1.6e-7 and exact in its tail: Phi(-|z|) = bell p(1 / (2 + |z| / sqrt(2))). GELU
// is z Phi(z), and its slope Phi(z) + DENSITY z bell.
struct Normal { float below, bell; };  // bell: exp(-z^2 / 2)
__device__ __forceinline__ Normal normal(float z) {
    const float w = reciprocal(2.f + SQRT_HALF * fabsf(z)), bell = exp2_fast(-0.5f * LOG2E * z * z);
    float p = -5.5632008f;
    p = p * w + 19.4504324f;
    p = p * w - 25.8461504f;
    p = p * w + 14.5040418f;
    p = p * w - 2.53869076f;
    p = p * w + 1.72312326f;
    p = p * w + 0.480245301f;
    p = p * w + 0.287467211f;
    p = p * w - 0.000147617388f;
    const float tail = p * bell;
    return {z > 0.f ? 1.f - tail : tail, bell};
}
