#pragma once
// The blocks of a cluster (sm_90 and up), which see each other's shared memory: one wrapper per instruction.
#include "common/barrier.cuh"

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of all blocks arrive, and wait until all have; what was stored before is then seen.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Store a struct of words where `place` is in the shared memory of another block, which has to have begun.
template <typename T> __device__ __forceinline__ void store_remote(T& place, const T& value, int rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address) : "r"((u32)__cvta_generic_to_shared(&place)), "r"(rank));
    for (int i = 0; i < sizeof(T) / 4; ++i)
        asm volatile("st.shared::cluster.b32 [%0], %1;" :: "r"(address + 4 * i), "r"(((const u32*)&value)[i]) : "memory");
}
