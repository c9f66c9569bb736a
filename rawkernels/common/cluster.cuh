#pragma once
// The blocks of a cluster (sm_90 and up), which see each other's shared memory: one wrapper per instruction.
#include "common/barrier.cuh"

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of all blocks arrive, and wait until all have. The arrival says nothing of what was stored: a fence that does
// would wait for all that the thread has under way, copies included.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ u32 address_in(u32 shared, int rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}
// Send a struct of words to where `place` is in the shared memory of another block, which has to have begun, and count its
// bytes there at the mbarrier `bar`: who waits for that sees it.
template <typename T> __device__ __forceinline__ void send(T& place, const T& value, u32 bar, int rank) {
    const u32 address = address_in((u32)__cvta_generic_to_shared(&place), rank), there = address_in(bar, rank);
    for (int i = 0; i < sizeof(T) / 4; ++i)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(address + 4 * i), "r"(((const u32*)&value)[i]), "r"(there) : "memory");
}
