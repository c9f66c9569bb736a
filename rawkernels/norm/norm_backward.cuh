#pragma once
// The gradient of a norm: dx = rstd * (g - mean(g) - normalized * mean(g * normalized)) with g = weight * dy; RMSNorm has
// no mean(g). Blocks are persistent: block b takes rows b, b + grid, ... and keeps column sums over its rows in registers.
#include "norm/norm.cuh"

// ---- rows prefetched to shared memory: each thread copies the packs that it reads itself, so no barrier is needed
constexpr bool PREFETCHED = HELD && sizeof(Pack) == 16;
static_assert(!PREFETCHED || !BY_REGISTERS || STAGES == 2, "norm_backward.cuh: registers hold one row, shared memory one");

// Copies by registers: a row is on its way until the next one is fetched; shared memory has the one that is read.
template <int ARRAYS> struct RowStages {
    Copy held[BY_REGISTERS ? ARRAYS : 1][BY_REGISTERS && PREFETCHED ? PACKS : 1];

    __device__ static u32 address(int stage, int array, int p) {
        if (BY_REGISTERS) stage = 0;
        return shared_tiles() + (((stage * ARRAYS + array) * PACKS + p) * BLOCK + threadIdx.x) * 16;
    }
    // Zeros unless `there`.
    __device__ __forceinline__ void fetch(int stage, int array, const scalar* row, int cols, bool there) {
        if constexpr (PREFETCHED && BY_REGISTERS) {
            each_pack(cols, [&](int p, int j) {
                held[array][p].finish(address(0, array, p));
                held[array][p].start(0, row + j, there);
            });
        } else if constexpr (PREFETCHED) {
            each_pack(cols, [&](int p, int j) { cp_async(address(stage, array, p), row + j, there); });
        }
    }
    __device__ static void end_fetch() {
        if constexpr (PREFETCHED) cp_async_commit();
    }
    // Waits for the oldest of STAGES rows.
    __device__ static void wait() {
        if constexpr (PREFETCHED) cp_async_wait<STAGES - 1>();
    }
    // The pack at column j of a row, from its stage or from memory; zeros unless `there`.
    template <typename P = Pack>
    __device__ static P pack(int stage, int array, int p, const scalar* row, int j, bool there) {
        if constexpr (PREFETCHED) return __builtin_bit_cast(P, load_shared_uint4(address(stage, array, p)));
        else return there ? load_pack(row + j) : P{};
    }
};

// The gradient of one element. With VEC = 1 a row may have a single column: this order of operations then gives exactly 0.
__device__ __forceinline__ float element_gradient(float rstd, float g, float mean_g, float normalized, float mean_dot) {
    if constexpr (VEC == 1) return rstd * (g - mean_g - normalized * mean_dot);
    return fmaf(g, rstd, fmaf(normalized, -rstd * mean_dot, -rstd * mean_g));
}

// ---- column sums over this block's rows, in registers or, for long rows, in memory. Unless `started` the value replaces
// the sum instead of being added.
struct ColumnSums {
    float sum[SLOTS][VEC];

    __device__ __forceinline__ void add(int p, int i, float value, float* out, int j, bool started) {
        if constexpr (HELD) sum[p][i] = started ? sum[p][i] + value : value;
        else if (out) out[j + i] = started ? out[j + i] + value : value;
    }
};

// Adds COUNT column sums over the block's teams, in order, and writes them to the rows out[n] that are not null.
template <int COUNT>
__device__ __forceinline__ void write_sums(const ColumnSums (&sums)[COUNT], float* const (&out)[COUNT], int cols) {
    if constexpr (HELD) {
        extern __shared__ __align__(128) float columns[];
        constexpr int FEW = VEC < 4 ? 1 : 4, WIDTH = TEAM * PACKS * VEC;
        struct alignas(FEW * 4) Few { float x[FEW]; };
        const int team = team_of_thread();
        if constexpr (PREFETCHED) cp_async_wait<0>();  // copies of rows past the end still target the same memory
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            if (!out[n]) continue;
            __syncthreads();  // the rows, or the previous sums, have been read
            each_pack(cols, [&](int p, int j) {
#pragma unroll
                for (int i = 0; i < VEC; i += FEW) {
                    Few few;
#pragma unroll
                    for (int m = 0; m < FEW; ++m) few.x[m] = sums[n].sum[p][i + m];
                    *reinterpret_cast<Few*>(&columns[team * WIDTH + j + i]) = few;
                }
            });
            __syncthreads();
            for (int j = threadIdx.x * FEW; j < cols; j += BLOCK * FEW) {
                Few total = {};
#pragma unroll 8
                for (int t = 0; t < TEAMS; ++t) {
                    const Few few = *reinterpret_cast<const Few*>(&columns[t * WIDTH + j]);
#pragma unroll
                    for (int m = 0; m < FEW; ++m) total.x[m] += few.x[m];
                }
                *reinterpret_cast<Few*>(&out[n][j]) = total;
            }
        }
    }
}
