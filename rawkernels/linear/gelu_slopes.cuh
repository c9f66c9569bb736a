#pragma once
// GELU by tanh with its slope, and the slopes as bytes. A byte is the low one of a 16-bit number that is exact as a whole
// number: of bf16 164 + 256 slope, of f16 1050 + 200 slope, both rounded. So 0 and 1 are exact; a slope, -0.13 to 1.13, is
// off by 1/256 at most in bf16 (1/512 below 0.36), 1/400 in f16; what is no number becomes some slope.
// Codes of 64 rows x 32 columns lie together, 16 of each thread, in the order of its accumulators (wgmma.cuh).
#include "linear/gelu.cuh"
#include "common/tile.cuh"

constexpr int CODES = 16, CODE_BLOCK = 128 * CODES;  // bytes of a thread and of 64 rows x 32 columns

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
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
    return y;
}

__device__ constexpr float scale(bf16) { return 256.f; }
__device__ constexpr float scale(f16) { return 200.f; }
__device__ constexpr float origin(bf16) { return 164.f; }
__device__ constexpr float origin(f16) { return 1050.f; }

// GELU is z / (1 + odds), odds = exp(-2 u(z)), and its slope 1 / (1 + odds) + z odds / (1 + odds)^2 2 u'(z).
struct Curve { float value, code; };  // code: to be rounded to 16 bits
__device__ __forceinline__ Curve curve(float z) {
    constexpr float SCALE = scale(scalar()), ORIGIN = origin(scalar());
    const float square = z * z, steep = SCALE * STEEP + SCALE * STEEP_CUBIC * square;
    const float gate = reciprocal(1.f + exp2_fast(z * (EXPONENT + EXPONENT * TANH_CUBIC * square)));
    const float value = z * gate, rest = fmaf(-value, gate, value);
    return {value, fmaf(rest, steep, fmaf(gate, SCALE, ORIGIN))};
}
// Two pairs of codes as one word, and the slopes of its first or second pair.
__device__ __forceinline__ u32 code_word(u32 first, u32 second) { return permute(first, second, 0x6420); }
__device__ __forceinline__ u32 slope_pair(bf16, u32 word, int second) {  // v / 256 - 164 / 256: exact
    return fma_pair(bf16(), permute(word, 0x43434343, second ? 0x4342 : 0x4140), 0x3b803b80, 0xbf24bf24);
}
__device__ __forceinline__ u32 slope_pair(f16, u32 word, int second) {  // (v - 1050) / 200
    const u32 v = permute(word, 0x64646464, second ? 0x4342 : 0x4140);
    return fma_pair(f16(), fma_pair(f16(), v, 0x3c003c00, 0xe41ae41a), 0x1d1f1d1f, 0x80008000);
}
__device__ __forceinline__ u32 times_slopes(u32 pair, u32 word, int second) {  // rounded once
    return fma_pair(scalar(), pair, slope_pair(scalar(), word, second), 0x80008000);
}
