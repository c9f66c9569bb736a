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
#if __CUDA_ARCH__ >= 800
    __device__ explicit bf16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
#else
    __device__ explicit bf16(float value) : bits((unsigned short)(rounded(value) >> 16)) {}
#endif
    // The bits of a value rounded to nearest even, in the upper half; for GPUs before 8.0, which have no such instruction.
    static __device__ u32 rounded(float value) {
        const u32 x = __float_as_uint(value);
        return value != value ? 0x7fff0000u : x + 0x7fffu + (x >> 16 & 1);
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};

constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);
