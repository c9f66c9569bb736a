// The gradients of LayerNorm and RMSNorm. x and dy are read once; a team takes ROWS rows at a time.
// Constants: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 192;
//   BLOCKS = 2; EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = true
// Constants: scalar = f16, bf16; RMS = false; TEAM = 512; PACKS = 2; VEC = 8; FULL = true; BLOCK = 512; BLOCKS = 1;
//   EARLY = true; STAGES = 3; ROWS = 2; WEIGHT = true
// Constants: scalar = bf16; RMS = false; TEAM = 8, 256; PACKS = 2; VEC = 8; FULL = false; BLOCK = 256; BLOCKS = 2;
//   EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = false, true
// Constants: scalar = float; RMS = false; TEAM = 16, 512; PACKS = 4; VEC = 4; FULL = true; BLOCK = 512; BLOCKS = 1;
//   EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = true
// Constants: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false; BLOCK = 256;
//   BLOCKS = 1; EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = true
// Constants below sm_80: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 128;
//   BLOCKS = 2; EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = true
// Constants below sm_80: scalar = f16, bf16; RMS = false; TEAM = 512; PACKS = 2; VEC = 8; FULL = true; BLOCK = 512;
//   BLOCKS = 1; EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = true
// Constants below sm_80: scalar = f16; RMS = false; TEAM = 32, 128; PACKS = 2; VEC = 8; FULL = false; BLOCK = 256;
//   BLOCKS = 2; EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = false, true
// Constants below sm_80: scalar = float; RMS = false; TEAM = 256; PACKS = 4; VEC = 4; FULL = true; BLOCK = 256;
//   BLOCKS = 1; EARLY = true; STAGES = 2; ROWS = 1; WEIGHT = true
// Constants below sm_80: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false;
//   BLOCK = 256; BLOCKS = 1; EARLY = true; STAGES = 1; ROWS = 1; WEIGHT = true
// Launch:    grid = (up to BLOCKS per multiprocessor,), block = (BLOCK,), dynamic shared memory: STAGES
//            times the packs of ROWS rows of each array, or 4 bytes for each element in registers if that is more.
//            column_sum.cu then adds the blocks' sums, in order.
//            dependent: layer_norm_backward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "norm/norm_backward.cuh"

// ROWS on Hopper only: elsewhere two rows spill, and shared memory has no room for three stages of them.
constexpr int AT_ONCE = __CUDA_ARCH__ == 900 ? ROWS : 1;

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) layer_norm_backward(
    const scalar* x,       // (rows, cols), rows x_step elements apart
    const scalar* weight,  // (cols,), of WEIGHT
    const scalar* dy,      // (rows, cols), rows dy_step elements apart
    const float* mean,     // (rows,)
    const float* rstd,     // (rows,)
    scalar* __restrict__ dx,            // (rows, cols)
    float* dweight,                     // (grid, cols) sums over this block's rows, or null
    float* dbias,                       // (grid, cols) or null
    long long rows,
    int cols,
    long long x_step,
    long long dy_step) {
    grid_dependency_wait();
    RowStages<2 * AT_ONCE> prefetched;
    const int team = threadIdx.x / TEAM;  // a runtime value even where it is always 0
    const long long step = (long long)gridDim.x * TEAMS;
    float* const sums_out[2] = {dweight ? dweight + (long long)blockIdx.x * cols : nullptr,
                                dbias ? dbias + (long long)blockIdx.x * cols : nullptr};
    const auto fetch = [&](int stage, long long r) {
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q, r += step) {
            const bool there = r < rows;
            prefetched.fetch(stage, 2 * q, x + (there ? r : 0) * x_step, cols, there);
            prefetched.fetch(stage, 2 * q + 1, dy + (there ? r : 0) * dy_step, cols, there);
        }
        prefetched.end_fetch();
    };
    const auto statistics = [&](long long r) {
        if (r >= rows) return RowStatistics{0.f, 0.f, 0.f};
        return RowStatistics{row_pivot(x + r * x_step), RMS ? 0.f : mean[r], rstd[r]};
    };

    long long first = (long long)blockIdx.x * TEAMS;
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, first + team + stage * AT_ONCE * step);
    RowStatistics next[AT_ONCE];
#pragma unroll
    for (int q = 0; q < AT_ONCE; ++q) next[q] = statistics(first + team + q * step);
    ColumnSums sums[2] = {};  // the gradients of weight and bias
    int stage = 0, slot = 0;
    const float share = 1.f / cols;
    for (bool started = HELD; first < rows; first += AT_ONCE * step, started = true) {
        const long long r = first + team;
        RowStatistics row[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q) {
            row[q] = next[q];
            next[q] = statistics(r + (AT_ONCE + q) * step);
        }
        fetch(stage == 0 ? STAGES - 1 : stage - 1, r + (STAGES - 1) * AT_ONCE * step);
        prefetched.wait();

        float g[AT_ONCE][SLOTS][VEC], normalized[AT_ONCE][SLOTS][VEC], dots[2 * AT_ONCE] = {};
        const Vector<WEIGHT> weights(weight, cols);
        const auto read = [&](int q, int p, int j, bool adding) {
            const bool there = r + q * step < rows;
            const long long place = there ? r + q * step : 0;
            const Pack x_j = prefetched.pack(stage, 2 * q, p, x + place * x_step, j, there);
            const Pack dy_j = prefetched.pack(stage, 2 * q + 1, p, dy + place * dy_step, j, there);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[q][p][i] = dy_j[i];
            weights.scale(g[q][p], p, j);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                normalized[q][p][i] = row[q](x_j[i]);
                if (!adding) continue;
                dots[2 * q] += g[q][p][i];
                dots[2 * q + 1] = fmaf(g[q][p][i], normalized[q][p][i], dots[2 * q + 1]);
                sums[0].add(p, i, dy_j[i] * normalized[q][p][i], sums_out[0], j, started);
                sums[1].add(p, i, dy_j[i], sums_out[1], j, started);
            }
        };
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q) each_pack(cols, [&](int p, int j) { read(q, p, j, true); });
        team_sum(dots, slot ^= 1);
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q) {
            if (r + q * step >= rows) break;
            const float mean_g = RMS ? 0.f : dots[2 * q] * share, mean_dot = dots[2 * q + 1] * share;
            each_pack(cols, [&](int p, int j) {
                if constexpr (!HELD) read(q, p, j, false);
                float out[VEC];
#pragma unroll
                for (int i = 0; i < VEC; ++i)
                    out[i] = element_gradient(row[q].rstd, g[q][p][i], mean_g, normalized[q][p][i], mean_dot);
                store_pack(dx + (r + q * step) * cols + j, out);
            });
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    write_sums(sums, sums_out, cols);
    grid_launch_dependents();
}
