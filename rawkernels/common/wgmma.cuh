#pragma once
// wgmma, the matrix products of a warpgroup (sm_90a): 64 x N accumulators in registers, operands in shared memory.
// Operands lie in tiles (tile.cuh), every slab on a 1024-byte boundary. The same tile can be a K-major operand (its
// contiguous axis is the one summed over) or an MN-major one.
#include "common/tile.cuh"

[[maybe_unused]] constexpr int K_MAJOR = 0, MN_MAJOR = 1;

// The descriptor of a tile of ROWS rows: address, leading and stride byte offsets in units of 16, layout 1 = 128-byte
// swizzle. The leading offset is from slab to slab where MN-major, unused otherwise.
template <int MAJOR, int ROWS> __device__ __forceinline__ u64 operand(u32 tile) {
    const u64 leading = MAJOR == MN_MAJOR ? ROWS * 128 : 16;
    return (u64)((tile & 0x3ffff) >> 4) | leading >> 4 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// What to add to a descriptor for the k-th group of 16 along the axis summed over.
template <int MAJOR, int ROWS> __device__ __forceinline__ constexpr u64 k_step(int k) {
    return (MAJOR == MN_MAJOR ? k * 2048 : (k & 3) * 32 + (k >> 2) * (ROWS * 128)) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
// Keeps accumulators (or packed operands) live in their registers. Call it before the fence and after the wait: the
// compiler does not know that a product still runs after its instruction.
template <int R> __device__ __forceinline__ void keep_live(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int R> __device__ __forceinline__ void keep_live(u32 (&p)[R][4]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "+r"(p[i][0]), "+r"(p[i][1]), "+r"(p[i][2]), "+r"(p[i][3]) :: "memory");
}

// ---- one instruction per width: d (64 x N) = a b, or += with `add`; a in shared memory or in registers
// T is bf16 or f16; the accumulators d[N / 2] are the operands 0 .. N / 2 - 1.
template <typename T, int A_MAJOR, int B_MAJOR, int N> struct Wgmma;
#define WGMMA_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_8(d, i) WGMMA_4(d, i), WGMMA_4(d, i + 4)
#define WGMMA_16(d, i) WGMMA_8(d, i), WGMMA_8(d, i + 8)
#define WGMMA_32(d, i) WGMMA_16(d, i), WGMMA_16(d, i + 16)
#define WGMMA_64(d, i) WGMMA_32(d, i), WGMMA_32(d, i + 32)
#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 WGMMA_NAMES_16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_80 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_128 WGMMA_NAMES_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_OUTPUTS_4 WGMMA_4(d, 0)
#define WGMMA_OUTPUTS_16 WGMMA_16(d, 0)
#define WGMMA_OUTPUTS_32 WGMMA_32(d, 0)
#define WGMMA_OUTPUTS_40 WGMMA_32(d, 0), WGMMA_8(d, 32)
#define WGMMA_OUTPUTS_48 WGMMA_32(d, 0), WGMMA_16(d, 32)
#define WGMMA_OUTPUTS_56 WGMMA_32(d, 0), WGMMA_16(d, 32), WGMMA_8(d, 48)
#define WGMMA_OUTPUTS_64 WGMMA_64(d, 0)
#define WGMMA_OUTPUTS_80 WGMMA_64(d, 0), WGMMA_16(d, 64)
#define WGMMA_OUTPUTS_88 WGMMA_64(d, 0), WGMMA_16(d, 64), WGMMA_8(d, 80)
#define WGMMA_OUTPUTS_96 WGMMA_64(d, 0), WGMMA_32(d, 64)
#define WGMMA_OUTPUTS_128 WGMMA_64(d, 0), WGMMA_64(d, 64)

// N columns in R = N / 2 accumulators; a .. g are the names of the operands that follow them.
#define WGMMA_FORM(T, KIND, N, R, a, b, c, d4, e, f, g)                                                      \
    template <int A_MAJOR, int B_MAJOR> struct Wgmma<T, A_MAJOR, B_MAJOR, N> {                                        \
        static __device__ __forceinline__ void run(float (&d)[R], u64 x, u64 y, int add) {                            \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " c ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32."   \
                         KIND "." KIND " {" WGMMA_NAMES_##R "}, " a ", " b ", p, 1, 1, " d4 ", " e "; }"              \
                         : WGMMA_OUTPUTS_##R : "l"(x), "l"(y), "r"(add), "n"(A_MAJOR), "n"(B_MAJOR));                           \
        }                                                                                                             \
        static __device__ __forceinline__ void run(float (&d)[R], const u32 (&x)[4], u64 y, int add) {                \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " f ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32."   \
                         KIND "." KIND " {" WGMMA_NAMES_##R "}, {" a ", " b ", " c ", " d4 "}, " e ", p, 1, 1, " g    \
                         "; }"                                                                                        \
                         : WGMMA_OUTPUTS_##R : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(add), "n"(B_MAJOR));     \
        }                                                                                                             \
    };
#define WGMMA_FORMS(N, R, ...) WGMMA_FORM(bf16, "bf16", N, R, __VA_ARGS__) WGMMA_FORM(f16, "f16", N, R, __VA_ARGS__)
WGMMA_FORMS(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA_FORMS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA_FORMS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_FORMS(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA_FORMS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA_FORMS(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA_FORMS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA_FORMS(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA_FORMS(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
WGMMA_FORMS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA_FORMS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// ---- products over K, issued and not committed: d (64 x N) = a b, or += with `add`
template <int A_MAJOR, int B_MAJOR, int A_ROWS, int B_ROWS, int K, int R>
__device__ __forceinline__ void product(float (&d)[R], u32 a, u32 b, bool add = false) {
    const u64 da = operand<A_MAJOR, A_ROWS>(a), db = operand<B_MAJOR, B_ROWS>(b);
#pragma unroll
    for (int k = 0; k < K / 16; ++k)
        Wgmma<scalar, A_MAJOR, B_MAJOR, 2 * R>::run(d, da + k_step<A_MAJOR, A_ROWS>(k), db + k_step<B_MAJOR, B_ROWS>(k), add || k > 0);
}
template <int B_MAJOR, int B_ROWS, int R, int STEPS>
__device__ __forceinline__ void product(float (&d)[R], const u32 (&a)[STEPS][4], u32 b, bool add = false) {
    const u64 db = operand<B_MAJOR, B_ROWS>(b);
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
        Wgmma<scalar, K_MAJOR, B_MAJOR, 2 * R>::run(d, a[k], db + k_step<B_MAJOR, B_ROWS>(k), add || k > 0);
}

// ---- accumulators of m64nN: the row (of the warpgroup's 64) and the column of this thread's element i
__device__ __forceinline__ int fragment_row(int i) {
    return (threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4 + 8 * ((i >> 1) & 1);
}
__device__ __forceinline__ int fragment_column(int i) { return 8 * (i >> 2) + 2 * (threadIdx.x % 4) + (i & 1); }

// Accumulators rounded to 16 bits: p[k] holds columns 16k .. 16k + 15 in the layout of an operand a and of stmatrix.
template <int R> __device__ __forceinline__ void pack(u32 (&p)[R / 8][4], const float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R / 2; ++i) p[i / 4][i % 4] = pack_pair(scalar(), d[2 * i], d[2 * i + 1]);
}
__device__ __forceinline__ void stmatrix_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// Stores packed accumulators to a tile of ROWS rows; row0 is the first of the 16 rows that this warp holds.
template <int ROWS, int STEPS> __device__ __forceinline__ void store_tile(u32 tile, int row0, const u32 (&p)[STEPS][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) stmatrix(chunk_address<ROWS>(tile, row0 + (lane & 15), 2 * k + (lane >> 4)), p[k]);
}
// Stores them to the transposed tile: ROWS counts the accumulators' columns, row0 is a column.
template <int ROWS, int STEPS>
__device__ __forceinline__ void store_tile_transposed(u32 tile, int row0, const u32 (&p)[STEPS][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
        stmatrix_transposed(chunk_address<ROWS>(tile, 16 * k + (lane & 7) + 8 * (lane >> 4), row0 / 8 + ((lane >> 3) & 1)), p[k]);
}
