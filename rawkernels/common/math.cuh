#pragma once
// Constants and approximate functions of float32, each one instruction.
[[maybe_unused]] constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Whether one of two values is NaN: one comparison.
__device__ __forceinline__ bool is_nan(float a, float b) { return (a != a) | (b != b); }
// The greater of two values; NaN if one is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return is_nan(a, b) ? a + b : fmaxf(a, b);
#endif
}
