#pragma once
// The gradient of a norm: dx = rstd * (g - mean(g) - normalized * mean(g * normalized)) with g = weight * dy; RMSNorm has
// no mean(g). Blocks stay: each takes rows b, b + grid, ... and keeps the columns' sums over its rows in registers.
#include "norm/norm.cuh"

// ---- rows on their way to the chip: each thread copies the packs that it will read itself, so none waits for others
constexpr bool AHEAD = HELD && sizeof(Pack) == 16;

template <int ARRAYS> struct Ring {
    __device__ static u32 address(int stage, int array, int p) {
        return shared_tiles() + (((stage * ARRAYS + array) * PACKS + p) * BLOCK + threadIdx.x) * 16;
    }
    // zeros unless `there`
    __device__ static void fetch(int stage, int array, const scalar* row, int cols, bool there) {
        if constexpr (AHEAD)
            each_pack(cols, [&](int p, int j) { cp_async(address(stage, array, p), row + j, there); });
    }
    __device__ static void end_fetch() {
        if constexpr (AHEAD) cp_async_commit();
    }
    // Until the oldest of STAGES rows is here.
    __device__ static void wait() {
        if constexpr (AHEAD) cp_async_wait<STAGES - 1>();
    }
    // The pack at column j of a row, out of its stage or of memory; zeros unless `there`.
    template <typename P = Pack>
    __device__ static P pack(int stage, int array, int p, const scalar* row, int j, bool there) {
        if constexpr (AHEAD) return __builtin_bit_cast(P, load_shared_16(address(stage, array, p)));
        else return there ? load_pack(row + j) : P{};
    }
};

// The gradient of one element. Where a row may be a single one it is rounded so that x - mean(x) = 0 has gradient 0.
__device__ __forceinline__ float element_gradient(float rstd, float g, float mean_g, float normalized, float mean_dot) {
    if constexpr (VEC == 1) return rstd * (g - mean_g - normalized * mean_dot);
    return fmaf(g, rstd, fmaf(normalized, -rstd * mean_dot, -rstd * mean_g));
}

// ---- sums of columns: of this block's rows, `begun` with the first, in registers or, of long rows, in memory
struct ColumnSums {
    float sum[SLOTS][VEC];

    __device__ __forceinline__ void add(int p, int i, float value, float* out, int j, bool begun) {
        if constexpr (HELD) sum[p][i] = begun ? sum[p][i] + value : value;
        else if (out) out[j + i] = begun ? out[j + i] + value : value;
    }
};

// Writes COUNT sums over the block's teams, added in order, to the rows out[n] where not null.
template <int COUNT>
__device__ __forceinline__ void write_sums(const ColumnSums (&sums)[COUNT], float* const (&out)[COUNT], int cols) {
    if constexpr (HELD) {
        extern __shared__ __align__(128) float columns[];
        constexpr int FEW = VEC < 4 ? 1 : 4, WIDTH = TEAM * PACKS * VEC;
        struct alignas(FEW * 4) Few { float x[FEW]; };
        const int team = team_of_thread();
        if constexpr (AHEAD) cp_async_wait<0>();  // zeros beyond the last row, on their way to the same memory
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            if (!out[n]) continue;
            __syncthreads();  // the rows, or the sums before, were read
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
