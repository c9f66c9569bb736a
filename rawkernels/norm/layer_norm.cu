// LayerNorm and RMSNorm over the last axis. A row is read once and stays in registers.
// Constants: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 128;
//   BLOCKS = 6; EARLY = true; WEIGHT = true; BIAS = true
// Constants: scalar = bf16; RMS = false; TEAM = 8, 256; PACKS = 2; VEC = 8; FULL = false; BLOCK = 256; BLOCKS = 4;
//   EARLY = true; WEIGHT = false, true; BIAS = false
// Constants: scalar = float; RMS = false; TEAM = 16, 512; PACKS = 8; VEC = 4; FULL = true; BLOCK = 512; BLOCKS = 1;
//   EARLY = true; WEIGHT = true; BIAS = true
// Constants: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false; BLOCK = 256;
//   BLOCKS = 1; EARLY = true; WEIGHT = true; BIAS = true
// Launch:    grid = (ceil(rows / (BLOCK / TEAM)),), block = (BLOCK,).
//            dependent: layer_norm_forward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "norm/norm.cuh"
#include "common/tma.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) layer_norm_forward(
    const scalar* x,       // (rows, cols), rows x_step elements apart
    const scalar* weight,  // (cols,), of WEIGHT
    const scalar* bias,    // (cols,), of BIAS
    scalar* __restrict__ y,             // (rows, cols)
    float* __restrict__ mean,           // (rows,) of x minus the row's first element, or null
    float* __restrict__ rstd,           // (rows,) or null
    long long rows,
    int cols,
    long long x_step,
    long long ahead,                    // prefetch the row this many rows later to L2; 0: do not
    float eps) {
    grid_dependency_wait();
    const long long r = (long long)blockIdx.x * TEAMS + team_of_thread();
    const bool there = TEAMS == 1 || r < rows;
    const scalar* row_x = x + (there ? r : rows - 1) * x_step;
    if (VEC > 1 && ahead && lane_of_thread() == 0 && r + ahead < rows)
        bulk_prefetch(row_x + ahead * x_step, cols * sizeof(scalar));
    const float pivot = row_pivot(row_x);
    Pack held[SLOTS];
    if constexpr (HELD) each_pack(cols, [&](int p, int j) { held[p] = load_pack(row_x + j); });
    const Vector<WEIGHT> weights(weight, cols);
    const Vector<BIAS> biases(bias, cols);
    const auto pack = [&](int p, int j) { return HELD ? held[p] : load_pack(row_x + j); };
    const RowStatistics row = row_statistics(pivot, pack, cols, eps);
    if (!there) return;
    write_normed(y + r * cols, row, pack, weights, biases, cols);
    if (rstd && lane_of_thread() == 0) {
        mean[r] = row.mean;
        rstd[r] = row.rstd;
    }
}
