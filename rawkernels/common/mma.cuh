#pragma once
// Matrix products of one warp by mma.sync (float32 and bf16: sm_80 and up), and the addresses that ldmatrix takes. Operands lie in tiles
// (tile.cuh) on 128-byte boundaries.
//
// float32 as TF32 (10 bits of mantissa): d (16 x 8) += a (16 x 8) b (8 x 8). A lane holds
//   a[0] row g, k t;  a[1] row g + 8;  a[2] row g, k t + 4;  a[3] row g + 8, k t + 4
//   b0 column g, k t;  b1 k t + 4
// which is what ldmatrix gives for floats, each taken as two 16-bit numbers (not transposed).
#include "common/cp_async.cuh"
#include "common/mma_sync.cuh"
#include "common/tile.cuh"

// ---- ldmatrix: 16 x 16 numbers of a tile as one operand a, or as the operands b of 16 columns (r[0..1], r[2..3])
//   the tile is a as [row][k]:     ldmatrix            at lane_address
//   the tile is a as [k][row]:     ldmatrix_transposed at lane_address_swapped
//   the tile is b as [column][k]:  ldmatrix            at lane_address_swapped
//   the tile is b as [k][column]:  ldmatrix_transposed at lane_address
// The address that this lane passes for the 16 x 16 numbers at (0, 0) of a tile.
__device__ __forceinline__ u32 lane_address(u32 tile) {
    const int lane = threadIdx.x % 32;
    return chunk_address<8>(tile, lane & 15, lane >> 4);
}
__device__ __forceinline__ u32 lane_address_swapped(u32 tile) {
    const int lane = threadIdx.x % 32;
    return chunk_address<8>(tile, (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1);
}
// The address for (row, column) instead of (0, 0), in a tile of ROWS rows; row is a multiple of 8, column of 16.
template <int ROWS> __device__ __forceinline__ u32 offset_address(u32 address, int row, int column) {
    return (address ^ ((column & 63) << 1)) + (column >> 6) * (ROWS * 128) + row * 128;
}

// ---- mma.sync for float32, and products of 16 columns
__device__ __forceinline__ void mma(float, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// x + half a unit of TF32: mma.sync only reads the bits of TF32, so the sum is x rounded to nearest.
__device__ __forceinline__ float for_tf32(float x) {
    return fabsf(x) < -NEG_INF ? __uint_as_float(__float_as_uint(x) + 0x1000) : x;
}
// d += a b for 16 columns, the operands b of one ldmatrix.
__device__ __forceinline__ void mma_pair(float (&left)[4], float (&right)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    mma(scalar(), left, a, b[0], b[1]);
    mma(scalar(), right, a, b[2], b[3]);
}

// ---- accumulators to 16 bits
// Two adjacent 16 x 8 accumulators as one operand a (16 x 16), rounded to 16 bits.
template <typename T = scalar>
__device__ __forceinline__ void pack(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair(T(), left[0], left[1]);
    a[1] = pack_pair(T(), left[2], left[3]);
    a[2] = pack_pair(T(), right[0], right[1]);
    a[3] = pack_pair(T(), right[2], right[3]);
}
// Stores an accumulator, rounded to 16 bits, to a tile of ROWS rows; row and column are multiples of 8.
template <int ROWS, typename T = scalar>
__device__ __forceinline__ void store_fragment(u32 tile, int row, int column, const float (&d)[4]) {
    const int lane = threadIdx.x % 32;
    const u32 address = chunk_address<ROWS>(tile, row + lane / 4, column / 8) + lane % 4 * 4;
    store_shared(address, pack_pair(T(), d[0], d[1]));
    store_shared(address + 8 * 128, pack_pair(T(), d[2], d[3]));
}
