#pragma once
// Accesses to global memory that plain C++ cannot express: acquire and release, streaming, vectors; one wrapper each.

// ---- synchronization between thread blocks
__device__ __forceinline__ int load_acquire(const int* from) {
    int x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(int* to, int x) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_release(u32* to, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void increment_release(int* to) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(to) : "memory");
}
// Returns the old value; the new one is old + 1, or 0 where old was `last`.
__device__ __forceinline__ u32 increment_acq_rel(u32* to, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(last) : "memory");
    return before;
}
// For loops that wait: after some seconds the kernel faults instead of hanging, by a store to address 0: with a trap
// instruction ptxas would ignore setmaxnreg.
__device__ __forceinline__ void fault_after_seconds(long long start) {
    if (clock64() - start > 8000000000ll) asm volatile("st.global.b32 [%0], %1;" :: "l"(0ull), "r"(0));
}
// Waits until a counter has reached `count`.
__device__ __forceinline__ void wait_for_count(const int* counter, int count) {
    const long long start = clock64();
    while (load_acquire(counter) < count) fault_after_seconds(start);
}
// Orders accesses to global memory by this thread with those by TMA, in both directions.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- words of 4 bytes that other blocks read while they are written: each is read and written as a whole, also of a vector,
// and nothing is promised of two words, nor of the order of accesses
__device__ __forceinline__ u32 load_relaxed(const u32* from) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
__device__ __forceinline__ void store_relaxed(u32* to, u32 x) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_relaxed(u32* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ---- caches
__device__ __forceinline__ void prefetch_to_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }

// ---- vectors of 16 bytes
// One store instruction; for a plain assignment the compiler sometimes emits four.
__device__ inline void store_16_bytes(void* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// One load instruction, which the compiler does not move past branches.
__device__ __forceinline__ uint4 load_16_bytes(const void* from) {
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
// The same if `wanted`; otherwise x keeps its value.
__device__ __forceinline__ void load_16_bytes_if(bool wanted, uint4& x, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w) : "l"(from), "r"((int)wanted));
}
// Evict-first (.cs): for data that is accessed once.
__device__ __forceinline__ uint4 load_streaming(const void* from) {
    uint4 x;
    asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
__device__ __forceinline__ void store_streaming(void* to, const u32 (&x)[4]) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// to[0 .. 3] += a, b, c, d, each element atomically; sm_90 and up.
__device__ __forceinline__ void add_global(float* to, float a, float b, float c, float d) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// x + by for 16-bit elements, in one instruction instead of three.
template <typename T> __device__ __forceinline__ T* advance(T* x, int by) {
    static_assert(sizeof(T) == 2);
    T* y;
    asm("mad.wide.s32 %0, %1, 2, %2;" : "=l"(y) : "r"(by), "l"(x));
    return y;
}
