#pragma once
// Asynchronous copies from global to shared memory by single threads (cp.async, sm_80 and up).

// The dynamic shared memory, for what needs an alignment of 128 bytes.
__device__ __forceinline__ u32 shared_tiles() {
    extern __shared__ __align__(128) unsigned char tiles[];
    return (u32)__cvta_generic_to_shared(tiles);
}
// 16 bytes, past L1; zeros instead unless `there`.
__device__ __forceinline__ void cp_async(u32 address, const void* source, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(source), "r"(there ? 16 : 0) : "memory");
}
// 16 bytes, always.
__device__ __forceinline__ void cp_async_16(u32 address, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(source) : "memory");
}
// 4, 8 or 16 bytes, through L1.
template <int BYTES> __device__ __forceinline__ void cp_async_small(u32 address, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(address), "l"(source), "n"(BYTES));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread are incomplete. To read what other threads copied takes __syncthreads()
// as well.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
