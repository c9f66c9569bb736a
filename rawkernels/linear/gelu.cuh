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

// The normal distribution below z, Phi: Phi(-|z|) = bell p(w), with w = 1 / (a + b |z|). GELU is z Phi(z), and its slope
// Phi(z) + DENSITY z bell.
struct Normal { float below, bell; };  // bell: exp(-z^2 / 2)
__device__ __forceinline__ Normal normal_of(float z, float p) {
    const float bell = exp2_fast(-0.5f * LOG2E * z * z), tail = p * bell;
    return {z > 0.f ? 1.f - tail : tail, bell};
}
// Within 1.6e-7 and exact in its tail.
__device__ __forceinline__ Normal normal(float, float z) {
    const float w = reciprocal(2.f + SQRT_HALF * fabsf(z));
    float p = -5.5632008f;
    p = p * w + 19.4504324f;
    p = p * w - 25.8461504f;
    p = p * w + 14.5040418f;
    p = p * w - 2.53869076f;
    p = p * w + 1.72312326f;
    p = p * w + 0.480245301f;
    p = p * w + 0.287467211f;
    p = p * w - 0.000147617388f;
    return normal_of(z, p);
}
// For results of 16 bits: within 8e-6 of Phi, relative, where it is above 1e-4, and within 1e-9 below.
__device__ __forceinline__ Normal normal(bf16, float z) {
    const float w = reciprocal(1.f + 0.420445692f * fabsf(z));
    float p = -0.13063215f;
    p = p * w + 0.408433286f;
    p = p * w + 0.0195954993f;
    p = p * w + 0.206608119f;
    p = p * w - 0.00400802713f;
    return normal_of(z, p);
}
__device__ __forceinline__ Normal normal(f16, float z) { return normal(bf16(), z); }
