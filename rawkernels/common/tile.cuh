#pragma once
// Tiles of 16-bit numbers in shared memory: R rows x C columns are ceil(C / 64) slabs of R rows x 128 bytes, the 16-byte
// chunk index XORed with the row modulo 8 (the copy engine's 128-byte swizzle). Eight rows of a chunk meet no bank twice.
#include "common/barrier.cuh"

// The address of columns 8 chunk .. 8 chunk + 7 of a row, in a tile of ROWS rows.
template <int ROWS> __device__ __forceinline__ u32 chunk_address(u32 tile, int row, int chunk) {
    return tile + (chunk >> 3) * (ROWS * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

// Two neighbours of a row, rounded to 16 bits.
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
// Zeros in place of negative ones.
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

// 16 x 16 numbers of a tile to or from pairs of a warp: mma.cuh says whose. stmatrix: sm_90 and up.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
