#pragma once
// Tiles of 16-bit numbers in shared memory: R rows x C columns are ceil(C / 64) slabs of R rows x 128 bytes. The index of a
// 16-byte chunk is XORed with the row modulo 8 (TMA's 128-byte swizzle), so 8 rows of a chunk cause no bank conflict.
#include "common/barrier.cuh"
#include "common/pair.cuh"

// The address of columns 8 * chunk .. 8 * chunk + 7 of a row, in a tile of ROWS rows.
template <int ROWS> __device__ __forceinline__ u32 chunk_address(u32 tile, int row, int chunk) {
    return tile + (chunk >> 3) * (ROWS * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

// Load or store 16 x 16 numbers of a tile as pairs in the lanes of a warp; mma.cuh has the layout. stmatrix: sm_90 and up.
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
// Transposes 8 x 8 numbers, of which each lane holds two adjacent ones of a row.
__device__ __forceinline__ u32 movmatrix(u32 pair) {
    u32 transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}
