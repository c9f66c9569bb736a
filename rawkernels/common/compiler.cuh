#pragma once
// An optimization barrier for single values.

// Returns x, which the compiler treats as a new, unknown value. What depends on it is computed where it is used; computed
// earlier, it would occupy registers around a loop.
template <typename T> __device__ __forceinline__ T opaque(T x) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ float opaque(float x) {
    asm volatile("" : "+f"(x));
    return x;
}
