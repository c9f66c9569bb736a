#pragma once
// GELU by tanh: z / (1 + odds), odds = exp(-2 u(z)) = 2^(z EXPONENT (1 + TANH_CUBIC z^2)), and 2 u'(z) = STEEP + STEEP_CUBIC z^2
// (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
constexpr float TANH_INNER = 0.7978845608f, TANH_CUBIC = 0.044715f;  // sqrt(2 / pi)
constexpr float EXPONENT = -2.f * 1.4426950409f * TANH_INNER;
constexpr float STEEP = 2.f * TANH_INNER, STEEP_CUBIC = 6.f * TANH_INNER * TANH_CUBIC;

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
