#pragma once
// Shared memory by 32-bit addresses, mbarriers and named barriers: one wrapper per instruction.

// The dynamic shared memory from the next multiple of 1024 bytes on, as the 128-byte swizzle requires: launch with 1024
// bytes more.
__device__ __forceinline__ u32 shared_base() {
    extern __shared__ unsigned char dynamic_shared[];
    return ((u32)__cvta_generic_to_shared(dynamic_shared) + 1023) & ~1023u;
}
__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ u32 load_shared_u16(u32 address) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ float load_shared_float(u32 address) { return __uint_as_float(load_shared(address)); }
__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_shared_uint2(u32 address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_shared_uint4(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(u32 address, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// Makes this thread's stores to shared memory visible to wgmma and TMA: call it in every thread that stored, before the
// barrier after which they read or overwrite the data.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- mbarriers. The first phase has parity 0; on a new barrier a wait for parity 1 returns at once.
__device__ __forceinline__ void mbar_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// One arrival; the phase also waits for this many bytes from TMA.
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
// The address of a barrier to arrive at when `loaded` has been loaded from the memory that the arrival frees. An arrival can
// overtake a load of shared memory that waits behind loads of global memory, and the next copy overwrites what the load
// should find. So the address depends on what was loaded: all bits of `loaded`, since a load of known bits would be left out.
// Of a load of several registers one is enough. zero: unknown_zero().
__device__ __forceinline__ u32 freed(u32 bar, u32 loaded, u32 zero) { return bar + (loaded & zero); }
// 0, but the compiler does not know it. argument: of the kernel, never negative.
__device__ __forceinline__ u32 unknown_zero(int argument) { return (u32)(argument >> 31); }
// One arrival per warp.
__device__ __forceinline__ void release(u32 bar) { if (threadIdx.x % 32 == 0) mbar_arrive(bar); }
// release(freed(bar, loaded, zero)), where no register is free for `zero` and the address. `loaded` is never ~0, but the
// compiler does not know it.
__device__ __forceinline__ void release_loaded(u32 bar, u32 loaded) {
    if (threadIdx.x % 32 == 0)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, -1; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                     :: "r"(bar), "r"(loaded) : "memory");
}
__device__ __forceinline__ bool mbar_try_wait(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
// After some seconds without the arrival the kernel faults instead of hanging. It stores to address 0: with a trap
// instruction ptxas would ignore setmaxnreg.
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
    if (mbar_try_wait(bar, parity)) return;
    const long long start = clock64();
    while (!mbar_try_wait(bar, parity))
        if (clock64() - start > 8000000000ll) asm volatile("st.global.b32 [%0], %1;" :: "l"(0ull), "r"(0));
}

// ---- named barriers (id 0 is __syncthreads). `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// Waits, and returns whether x is true for any of these threads.
__device__ __forceinline__ bool bar_sync_or(int id, int threads, bool x) {
    u32 any;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"(id), "r"(threads), "r"((u32)x) : "memory");
    return __shfl_sync(~0u, any, 0);  // tells ptxas that the value is warp-uniform
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// The shuffle tells ptxas that the value is warp-uniform.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
