#pragma once
// Asynchronous copies from global to shared memory by single threads: cp.async from sm_80 on. Before, the same calls copy
// at once, through registers, and there is nothing to wait for.

// The dynamic shared memory, for what needs an alignment of 128 bytes.
__device__ __forceinline__ u32 shared_tiles() {
    extern __shared__ __align__(128) unsigned char tiles[];
    return (u32)__cvta_generic_to_shared(tiles);
}
// A copy of 16 bytes in two parts, with work between them, by the thread that calls both: start() does all by cp.async, or
// loads to registers, which finish() stores. Zeros instead unless `there`.
constexpr bool BY_REGISTERS = __CUDA_ARCH__ < 800;
struct Copy {
#if __CUDA_ARCH__ >= 800
    __device__ __forceinline__ void start(u32 address, const void* source, bool there);
    __device__ __forceinline__ void finish(u32) const {}
#else
    u32 x[4];
    __device__ __forceinline__ void start(u32, const void* source, bool there) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
                     "@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(source), "r"((int)there));
    }
    __device__ __forceinline__ void finish(u32 address) const {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
#endif
};
#if __CUDA_ARCH__ >= 800
// 16 bytes, past L1; zeros instead unless `there`.
__device__ __forceinline__ void cp_async(u32 address, const void* source, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(source), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void Copy::start(u32 address, const void* source, bool there) { cp_async(address, source, there); }
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
#else
__device__ __forceinline__ void cp_async(u32 address, const void* source, bool there = true) {
    Copy copy;
    copy.start(address, source, there);
    copy.finish(address);
}
__device__ __forceinline__ void cp_async_16(u32 address, const void* source) { cp_async(address, source); }
template <int BYTES> __device__ __forceinline__ void cp_async_small(u32 address, const void* source) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp_async.cuh: a copy has 4, 8 or 16 bytes");
    struct alignas(BYTES) Words { u32 x[BYTES / 4]; };
    const Words words = *(const Words*)source;
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i)
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(address + 4 * i), "r"(words.x[i]) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {}
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {}
__device__ inline void cp_async_wait_all() {}
#endif
