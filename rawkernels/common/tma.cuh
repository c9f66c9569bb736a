#pragma once
// TMA (Tensor Memory Accelerator, sm_90 and up), issued by one thread: tiles by a tensor map, contiguous bytes without one.
// gpuattn/cuda/tensor_maps.py encodes maps over (columns, rows, heads, batches) of 16-bit numbers.
#include "common/barrier.cuh"

struct alignas(64) TensorMap { u64 word[16]; };  // passed by value: const __grid_constant__ TensorMap

[[maybe_unused]] constexpr u64 L2_NORMAL = 0x1000000000000000ull;
[[maybe_unused]] constexpr u64 L2_EVICT_FIRST = 0x12F0000000000000ull, L2_EVICT_LAST = 0x14F0000000000000ull;

// Coordinates are in elements, innermost first. Elements outside the array arrive as zeros and count in the bytes of `bar`.
__device__ __forceinline__ void tma_load(u32 dst, const TensorMap& map, u32 bar, int column, int row, int head, int batch,
                                         u64 hint = L2_NORMAL) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(dst), "l"(&map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(hint) : "memory");
}
// Loads to the same address in every block of the cluster whose bit in `blocks` is set; each block's own `bar` counts.
__device__ __forceinline__ void tma_load_multicast(u32 dst, const TensorMap& map, u32 bar, int column, int row, int head,
                                                   int batch, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(dst), "l"(&map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(blocks) : "memory");
}
// Elements outside the array are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 src, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(&map), "r"(src), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}
// Contiguous bytes; addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, u64 hint) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(hint) : "memory");
}
// Prefetches to L2; does nothing before sm_90.
__device__ __forceinline__ void bulk_prefetch(const void* src, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(src), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_add(float* dst, u32 src, u32 bytes) {  // dst[i] += src[i], in L2
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until shared memory may be reused: all stores but the last PENDING groups have read it.
template <int PENDING = 0> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}
// Waits until the stores are complete in global memory.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
