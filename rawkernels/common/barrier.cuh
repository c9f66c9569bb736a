#pragma once
// Shared memory by its 32-bit addresses, mbarriers and named barriers of Hopper, as one wrapper per instruction.
typedef unsigned int u32;
typedef unsigned long long u64;

// The dynamic shared memory, rounded up to the 1024 bytes that the 128-byte swizzle counts from: ask for 1024 more.
__device__ __forceinline__ u32 shared_base() {
    extern __shared__ unsigned char dynamic_shared[];
    return ((u32)__cvta_generic_to_shared(dynamic_shared) + 1023) & ~1023u;
}
__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
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
__device__ __forceinline__ void store_shared(u32 address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// By every thread that stored, before the barrier after which wgmma or TMA reads (or overwrites) what it stored.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- mbarriers: parity 0 is the first phase; a fresh barrier also passes a wait on parity 1
__device__ __forceinline__ void mbar_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// One arrival, and so many bytes still to come.
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void release(u32 bar) { if (threadIdx.x % 32 == 0) mbar_arrive(bar); }  // once a warp
__device__ __forceinline__ bool mbar_try_wait(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
// A lost arrival faults after seconds instead of hanging: a store to address 0, as a trap makes ptxas void setmaxnreg.
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
    if (mbar_try_wait(bar, parity)) return;
    const long long start = clock64();
    while (!mbar_try_wait(bar, parity))
        if (clock64() - start > 8000000000ll) asm volatile("st.global.b32 [%0], %1;" :: "l"(0ull), "r"(0));
}

// ---- named barriers (id 0 is __syncthreads): threads = those that sync plus those that only arrive
__device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// Whether x holds for any of these threads.
__device__ __forceinline__ bool bar_sync_or(int id, int threads, bool x) {
    u32 any;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"(id), "r"(threads), "r"((u32)x) : "memory");
    return __shfl_sync(~0u, any, 0);  // the same in all lanes, and ptxas knows it
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// The same in all lanes of a warp, and ptxas knows it.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
