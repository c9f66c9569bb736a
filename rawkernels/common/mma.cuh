#pragma once
// Matrix products of one warp (sm_80 and up): cp.async and mma.sync as one wrapper per instruction; where ldmatrix reads.
// Operands lie in tiles (tile.cuh) on 128-byte boundaries.
//
// Floats as tf32 (10 bits of mantissa): d (16 x 8) += a (16 x 8) b (8 x 8). Lane holds
//   a[0] row g, k t;  a[1] row g + 8;  a[2] row g, k t + 4;  a[3] row g + 8, k t + 4
//   b0 column g, k t;  b1 k t + 4
// so ldmatrix of floats, taken for twice as many 16-bit numbers, gives operands (not transposed ones).
#include "common/mma_sync.cuh"
#include "common/tile.cuh"

// The dynamic shared memory: tiles here need no more than its own alignment.
__device__ __forceinline__ u32 shared_tiles() {
    extern __shared__ __align__(128) unsigned char tiles[];
    return (u32)__cvta_generic_to_shared(tiles);
}
__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// ---- 16 bytes from global to shared memory, asynchronously; zeros unless `there`
__device__ __forceinline__ void cp_async(u32 address, const void* source, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(source), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last PENDING groups of this thread have arrived; others' need a __syncthreads more.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// ---- ldmatrix: 16 x 16 numbers of a tile as one operand a, or as the operands b of 16 columns (r[0..1], r[2..3])
//   tile is a as [row][k]:     ldmatrix            at straight
//   tile is a as [k][row]:     ldmatrix_transposed at crossed
//   tile is b as [column][k]:  ldmatrix            at crossed
//   tile is b as [k][column]:  ldmatrix_transposed at straight
// What this lane passes for the 16 x 16 numbers at (0, 0) of a tile.
__device__ __forceinline__ u32 straight(u32 tile) {
    const int lane = threadIdx.x % 32;
    return chunk_address<8>(tile, lane & 15, lane >> 4);
}
__device__ __forceinline__ u32 crossed(u32 tile) {
    const int lane = threadIdx.x % 32;
    return chunk_address<8>(tile, (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1);
}
// The same at (row, column), multiples of 8 and of 16, in a tile of ROWS rows.
template <int ROWS> __device__ __forceinline__ u32 moved(u32 lane_address, int row, int column) {
    return (lane_address ^ ((column & 63) << 1)) + (column >> 6) * (ROWS * 128) + row * 128;
}

// ---- mma.sync for floats, and two of those for 16 bits
__device__ __forceinline__ void mma(float, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// x such that the bits of tf32, which are all that mma reads, are it rounded to nearest.
__device__ __forceinline__ float for_tf32(float x) {
    return fabsf(x) < -NEG_INF ? __uint_as_float(__float_as_uint(x) + 0x1000) : x;
}
// d += a b for 16 columns: what one ldmatrix of b serves.
__device__ __forceinline__ void mma_pair(float (&left)[4], float (&right)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    mma(scalar(), left, a, b[0], b[1]);
    mma(scalar(), right, a, b[2], b[3]);
}

// ---- accumulators to 16 bits
// Two neighbouring 16 x 8 accumulators as one operand a (16 x 16), rounded to 16 bits.
template <typename T = scalar>
__device__ __forceinline__ void pack(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair(T(), left[0], left[1]);
    a[1] = pack_pair(T(), left[2], left[3]);
    a[2] = pack_pair(T(), right[0], right[1]);
    a[3] = pack_pair(T(), right[2], right[3]);
}
// An accumulator into a tile of ROWS rows, rounded to 16 bits; row a multiple of 8, column too.
template <int ROWS, typename T = scalar>
__device__ __forceinline__ void store_fragment(u32 tile, int row, int column, const float (&d)[4]) {
    const int lane = threadIdx.x % 32;
    const u32 address = chunk_address<ROWS>(tile, row + lane / 4, column / 8) + lane % 4 * 4;
    store_shared(address, pack_pair(T(), d[0], d[1]));
    store_shared(address + 8 * 128, pack_pair(T(), d[2], d[3]));
}
