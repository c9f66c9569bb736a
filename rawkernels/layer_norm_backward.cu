// The gradients of LayerNorm and RMSNorm: x and dy are read once.
// Constants: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 192;
//   BLOCKS = 2; EARLY = true; STAGES = 2; WEIGHT = true
// Constants: scalar = bf16; RMS = false; TEAM = 8, 256; PACKS = 2; VEC = 8; FULL = false; BLOCK = 256; BLOCKS = 2;
//   EARLY = true; STAGES = 2; WEIGHT = false, true
// Constants: scalar = float; RMS = false; TEAM = 16, 512; PACKS = 4; VEC = 4; FULL = true; BLOCK = 512; BLOCKS = 1;
//   EARLY = true; STAGES = 2; WEIGHT = true
// Constants: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false; BLOCK = 256;
//   BLOCKS = 1; EARLY = true; STAGES = 2; WEIGHT = true
// Launch:    grid = (up to BLOCKS a multiprocessor,), block = (BLOCK,), dynamic shared memory: STAGES
//            times the packs of each array that it reads, and 4 bytes for each element held.
//            column_sum.cu then adds the blocks' sums, in order.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/grid_dependency.cuh"
#include "common/norm_backward.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) layer_norm_backward(
    const scalar* x,       // (rows, cols), rows x_step elements apart
    const scalar* weight,  // (cols,), of WEIGHT
    const scalar* dy,      // (rows, cols), rows dy_step elements apart
    const float* mean,     // (rows,)
    const float* rstd,     // (rows,)
    scalar* __restrict__ dx,            // (rows, cols)
    float* dweight,                     // (grid, cols) sums over this block's rows; null: not wanted
    float* dbias,                       // (grid, cols) or null
    long long rows,
    int cols,
    long long x_step,
    long long dy_step) {
    grid_dependency_wait();
    using Rows = Ring<2>;
    const int team = threadIdx.x / TEAM;  // left unknown to the compiler where it is 0
    const long long step = (long long)gridDim.x * TEAMS;
    float* const sums_out[2] = {dweight ? dweight + (long long)blockIdx.x * cols : nullptr,
                                dbias ? dbias + (long long)blockIdx.x * cols : nullptr};
    const auto fetch = [&](int stage, long long r) {
        const bool there = r < rows;
        Rows::fetch(stage, 0, x + (there ? r : 0) * x_step, cols, there);
        Rows::fetch(stage, 1, dy + (there ? r : 0) * dy_step, cols, there);
        Rows::end_fetch();
    };
    const auto statistics = [&](long long r) {
        if (r >= rows) return RowStatistics{0.f, 0.f, 0.f};
        return RowStatistics{row_pivot(x + r * x_step), RMS ? 0.f : mean[r], rstd[r]};
    };

    long long first = (long long)blockIdx.x * TEAMS;
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, first + team + stage * step);
    RowStatistics next = statistics(first + team);
    ColumnSums sums[2] = {};  // of the weight's and of the bias's gradient
    int stage = 0, slot = 0;
    const float share = 1.f / cols;
    for (bool begun = HELD; first < rows; first += step, begun = true) {
        const long long r = first + team;
        const bool there = r < rows;
        const scalar *row_x = x + (there ? r : 0) * x_step, *row_dy = dy + (there ? r : 0) * dy_step;
        const RowStatistics row = next;
        next = statistics(r + step);
        fetch(stage == 0 ? STAGES - 1 : stage - 1, r + (STAGES - 1) * step);
        Rows::wait();

        float g[SLOTS][VEC], normalized[SLOTS][VEC], dots[2] = {};
        const Vector<WEIGHT> weights(weight, cols);
        const auto read = [&](int p, int j, bool adding) {
            const Pack x_j = Rows::pack(stage, 0, p, row_x, j, there), dy_j = Rows::pack(stage, 1, p, row_dy, j, there);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[p][i] = dy_j[i];
            weights.scale(g[p], p, j);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                normalized[p][i] = row(x_j[i]);
                if (!adding) continue;
                dots[0] += g[p][i];
                dots[1] = fmaf(g[p][i], normalized[p][i], dots[1]);
                sums[0].add(p, i, dy_j[i] * normalized[p][i], sums_out[0], j, begun);
                sums[1].add(p, i, dy_j[i], sums_out[1], j, begun);
            }
        };
        each_pack(cols, [&](int p, int j) { read(p, j, true); });
        team_sum(dots, slot ^= 1);
        const float mean_g = RMS ? 0.f : dots[0] * share, mean_dot = dots[1] * share;
        if (there) each_pack(cols, [&](int p, int j) {
            if constexpr (!HELD) read(p, j, false);
            float out[VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) out[i] = element_gradient(row.rstd, g[p][i], mean_g, normalized[p][i], mean_dot);
            store_pack(dx + r * cols + j, out);
        });
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    write_sums(sums, sums_out, cols);
    grid_launch_dependents();
}
