#pragma once
// Two 16-bit floats in one 32-bit register, the lower element in the lower half.
#include "common/math.cuh"

// Four bytes chosen from the eight of a and b, one by each hexadecimal digit of the selector (prmt). A digit from 8 on
// gives the sign of byte digit - 8, eight times.
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
    return y;
}

// Two floats rounded to 16 bits.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u32 pack_pair(bf16, float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 pack_pair(f16, float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
#else
__device__ __forceinline__ u32 pack_pair(bf16, float low, float high) {
    return permute_bytes(bf16::rounded(low), bf16::rounded(high), 0x7632);
}
__device__ __forceinline__ u32 pack_pair(f16, float low, float high) {
    return f16(low).bits | (u32)f16(high).bits << 16;
}
#endif
// The same with negative values replaced by zero.
__device__ __forceinline__ u32 pack_positive(bf16, float low, float high) {
    u32 x;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ __forceinline__ u32 pack_positive(f16, float low, float high) {
    u32 x;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ __forceinline__ float2 unpack_pair(bf16, u32 x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack_pair(f16, u32 x) {
    float2 y;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}

// a * b + c of both elements, rounded once.
__device__ __forceinline__ u32 fma_pair(bf16, u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
__device__ __forceinline__ u32 fma_pair(f16, u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
// Minimum and maximum of both elements; NaN where one operand is NaN.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u32 min_nan_pair(bf16, u32 a, u32 b) {
    u32 y;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ u32 min_nan_pair(f16, u32 a, u32 b) {
    u32 y;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ u32 max_nan_pair(bf16, u32 a, u32 b) {
    u32 y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ u32 max_nan_pair(f16, u32 a, u32 b) {
    u32 y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
#else
template <typename T> __device__ __forceinline__ u32 max_nan_pair(T, u32 a, u32 b) {
    const float2 x = unpack_pair(T(), a), y = unpack_pair(T(), b);
    return pack_pair(T(), max_nan(x.x, y.x), max_nan(x.y, y.y));
}
template <typename T> __device__ __forceinline__ u32 min_nan_pair(T, u32 a, u32 b) {
    return max_nan_pair(T(), a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}
#endif
