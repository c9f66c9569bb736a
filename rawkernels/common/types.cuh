#pragma once
// 16-bit floats without CUDA headers: stored as bits, computed in float, rounded to nearest even.

typedef unsigned int u32;
typedef unsigned long long u64;

struct f16 {
    unsigned short bits;
    f16() = default;
    __device__ explicit f16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

struct bf16 {
    unsigned short bits;
    bf16() = default;
    __device__ explicit bf16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};

constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);
