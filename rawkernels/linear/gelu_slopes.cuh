#pragma once
// GELU, by tanh or EXACT, with its slope, and slopes coded as bytes. A code is the low byte of an integer stored as a 16-bit float:
// 164 + 256 slope for bf16, 1050 + 200 slope for f16, rounded. Slopes of 0 and 1 are exact; others, from -0.13 to 1.13, have
// an error of at most 1/256 in bf16 (1/512 below 0.36) and 1/400 in f16. NaN becomes an arbitrary slope.
// The codes of 64 rows x 32 columns are contiguous, 16 per thread, in the order of its accumulators (wgmma.cuh).
#include "common/pair.cuh"
#include "linear/gelu.cuh"

constexpr int CODES = 16;                // bytes of a thread
constexpr int CODE_BLOCK = 128 * CODES;  // bytes of 64 rows x 32 columns

__device__ constexpr float scale(bf16) { return 256.f; }
__device__ constexpr float scale(f16) { return 200.f; }
__device__ constexpr float origin(bf16) { return 164.f; }
__device__ constexpr float origin(f16) { return 1050.f; }

// GELU by tanh is z / (1 + odds), odds = exp(-2 u(z)), and its slope 1 / (1 + odds) + z odds / (1 + odds)^2 2 u'(z).
struct Curve { float value, code; };  // code: the integer before it is rounded to 16 bits
template <bool EXACT> __device__ __forceinline__ Curve curve(float z) {
    constexpr float SCALE = scale(scalar()), ORIGIN = origin(scalar());
    if constexpr (EXACT) {
        const Normal at = normal(scalar(), z);
        return {z * at.below, fmaf(SCALE * DENSITY * z, at.bell, fmaf(at.below, SCALE, ORIGIN))};
    }
    const float square = z * z, steep = SCALE * STEEP + SCALE * STEEP_CUBIC * square;
    const float gate = reciprocal(1.f + exp2_fast(z * (EXPONENT + EXPONENT * TANH_CUBIC * square)));
    const float value = z * gate, rest = fmaf(-value, gate, value);
    return {value, fmaf(rest, steep, fmaf(gate, SCALE, ORIGIN))};
}
// code_word: two pairs of codes as one word; slope_pair: the slopes of its first or second pair.
__device__ __forceinline__ u32 code_word(u32 first, u32 second) { return permute_bytes(first, second, 0x6420); }
__device__ __forceinline__ u32 slope_pair(bf16, u32 word, int second) {  // v / 256 - 164 / 256: exact
    return fma_pair(bf16(), permute_bytes(word, 0x43434343, second ? 0x4342 : 0x4140), 0x3b803b80, 0xbf24bf24);
}
__device__ __forceinline__ u32 slope_pair(f16, u32 word, int second) {  // (v - 1050) / 200
    const u32 v = permute_bytes(word, 0x64646464, second ? 0x4342 : 0x4140);
    return fma_pair(f16(), fma_pair(f16(), v, 0x3c003c00, 0xe41ae41a), 0x1d1f1d1f, 0x80008000);
}
__device__ __forceinline__ u32 times_slopes(u32 pair, u32 word, int second) {  // rounded once
    return fma_pair(scalar(), pair, slope_pair(scalar(), word, second), 0x80008000);
}
