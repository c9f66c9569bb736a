#pragma once
// Constants of GELU by tanh (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016): z / (1 + odds) with odds =
// exp(-2 u(z)) = 2^(z EXPONENT (1 + TANH_CUBIC z^2)), and 2 u'(z) = STEEP + STEEP_CUBIC z^2.
#include "common/math.cuh"

constexpr float TANH_INNER = 0.7978845608f;  // sqrt(2 / pi)
constexpr float TANH_CUBIC = 0.044715f;
constexpr float EXPONENT = -2.f * LOG2E * TANH_INNER;
constexpr float STEEP = 2.f * TANH_INNER, STEEP_CUBIC = 6.f * TANH_INNER * TANH_CUBIC;
