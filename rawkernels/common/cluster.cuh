#pragma once
// Thread block clusters (sm_90 and up), whose blocks access each other's shared memory: one wrapper per instruction.
#include "common/barrier.cuh"

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of all blocks of the cluster arrive, then wait for all arrivals. A relaxed arrival does not order stores; the
// fence of the default one waits for all outstanding operations of the thread, copies included.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The address of `shared` in the block of this rank.
__device__ __forceinline__ u32 address_in(u32 shared, int rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}
// One arrival at the mbarrier `bar` of another block.
__device__ __forceinline__ void mbar_arrive_at(u32 bar, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(address_in(bar, rank)) : "memory");
}
__device__ __forceinline__ void store_shared_at(u32 address, int rank, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(address_in(address, rank)), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void store_shared_at(u32 address, int rank, u64 x) {
    asm volatile("st.shared::cluster.b64 [%0], %1;" :: "r"(address_in(address, rank)), "l"(x) : "memory");
}
__device__ __forceinline__ u64 load_shared_at(u32 address, int rank) {
    u64 x;
    asm volatile("ld.shared::cluster.b64 %0, [%1];" : "=l"(x) : "r"(address_in(address, rank)) : "memory");
    return x;
}
// Stores a pair to `there`, of which `bar` counts the bytes: addresses of `address_in`, in a block that has started.
__device__ __forceinline__ void send_shared(u32 there, float2 x, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 :: "r"(there), "f"(x.x), "f"(x.y), "r"(bar) : "memory");
}
__device__ __forceinline__ void send_shared(u32 there, u32 x, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :: "r"(there), "r"(x), "r"(bar) : "memory");
}
__device__ __forceinline__ void send_shared(u32 there, uint4 x, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(there), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(bar) : "memory");
}
// Store a struct of 32-bit words to `place` in the shared memory of another block, which must have started. The bytes count
// at that block's mbarrier `bar`: a thread that has waited for it sees the struct.
template <typename T> __device__ __forceinline__ void send(T& place, const T& value, u32 bar, int rank) {
    const u32 address = address_in((u32)__cvta_generic_to_shared(&place), rank), there = address_in(bar, rank);
    for (int i = 0; i < sizeof(T) / 4; ++i)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(address + 4 * i), "r"(((const u32*)&value)[i]), "r"(there) : "memory");
}
