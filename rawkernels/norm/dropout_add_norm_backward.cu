// The gradients of dropout_add_norm. h, dnormed and dh are read once. With SECOND the gradient of the norm's result is
// dnormed + second, added in float32.
// Constants: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 128;
//   BLOCKS = 2; EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = false; SECOND = false
// Constants: scalar = bf16; RMS = false; TEAM = 32; PACKS = 3; VEC = 8; FULL = true; BLOCK = 128; BLOCKS = 2; EARLY = true;
//   STAGES = 2; WEIGHT = true; X_BIAS = false, true; SECOND = false, true
// Constants: scalar = f16, float; RMS = true; TEAM = 256; PACKS = 0; VEC = 1; FULL = false; BLOCK = 256; BLOCKS = 1;
//   EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = true; SECOND = true
// Constants: scalar = bf16; RMS = false; TEAM = 8, 256; PACKS = 2; VEC = 8; FULL = false; BLOCK = 256; BLOCKS = 2;
//   EARLY = true; STAGES = 2; WEIGHT = false, true; X_BIAS = true; SECOND = false
// Constants: scalar = float; RMS = false; TEAM = 16, 128; PACKS = 4; VEC = 4; FULL = true; BLOCK = 128; BLOCKS = 3;
//   EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = false; SECOND = false
// Constants: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false; BLOCK = 256;
//   BLOCKS = 1; EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = false; SECOND = false
// Constants below sm_80: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 128;
//   BLOCKS = 2; EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = false; SECOND = false
// Constants below sm_80: scalar = f16; RMS = false; TEAM = 64; PACKS = 2; VEC = 8; FULL = false; BLOCK = 192; BLOCKS = 2;
//   EARLY = true; STAGES = 2; WEIGHT = false, true; X_BIAS = true; SECOND = false
// Constants below sm_80: scalar = f16; RMS = false; TEAM = 512; PACKS = 0; VEC = 8; FULL = false; BLOCK = 512; BLOCKS = 1;
//   EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = true; SECOND = false
// Constants below sm_80: scalar = float; RMS = false; TEAM = 128; PACKS = 4; VEC = 4; FULL = true; BLOCK = 128; BLOCKS = 2;
//   EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = true; SECOND = false
// Constants below sm_80: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false;
//   BLOCK = 256; BLOCKS = 1; EARLY = true; STAGES = 1; WEIGHT = true; X_BIAS = false; SECOND = false
// Constants below sm_80: scalar = f16; RMS = false; TEAM = 64; PACKS = 2; VEC = 8; FULL = false; BLOCK = 192; BLOCKS = 2;
//   EARLY = true; STAGES = 2; WEIGHT = true; X_BIAS = true; SECOND = true
// Launch:    grid = (up to BLOCKS per multiprocessor,), block = (BLOCK,), dynamic shared memory: STAGES
//            times the packs of each array that it reads, or 4 bytes for each element in registers if that is more.
//            column_sum.cu then adds the blocks' sums, in order.
//            dependent: dropout_add_norm_backward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "norm/norm_backward.cuh"
#include "norm/norm_dropout.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) dropout_add_norm_backward(
    const scalar* h,        // (rows, cols)
    const scalar* weight,   // (cols,), of WEIGHT
    const float* mean,      // (rows,)
    const float* rstd,      // (rows,)
    const scalar* dnormed,  // (rows, cols), rows dnormed_step elements apart
    const scalar* dh,       // (rows, cols), rows dh_step elements apart, of h as an output; null: zeros
    const scalar* second,   // (rows, cols), rows second_step elements apart, of SECOND
    scalar* __restrict__ dx,             // (rows, cols); null without dropout, when dx = dresidual
    scalar* __restrict__ dresidual,      // (rows, cols)
    float* dweight,                      // (grid, cols) sums over this block's rows, or null
    float* dbias,                        // (grid, cols) or null
    float* dx_bias,                      // (grid, cols), of X_BIAS
    long long rows,
    int cols,
    long long dnormed_step,
    long long dh_step,
    long long second_step,
    unsigned int threshold,
    float factor,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step) {
    grid_dependency_wait();
    RowStages<3 + SECOND> prefetched;
    const Dropout dropout{philox_key(seed_low, seed_high, stream, step, device_step), threshold, factor};
    const int team = threadIdx.x / TEAM;  // a runtime value even where it is always 0
    const long long next_rows = (long long)gridDim.x * TEAMS;
    const long long mine = (long long)blockIdx.x * cols;
    constexpr int SUMS = X_BIAS ? 3 : 2;
    float* sums_out[SUMS] = {dweight ? dweight + mine : nullptr, dbias ? dbias + mine : nullptr};
    if constexpr (X_BIAS) sums_out[2] = dx_bias + mine;
    const auto fetch = [&](int stage, long long r) {
        const bool there = r < rows;
        prefetched.fetch(stage, 0, h + (there ? r : 0) * cols, cols, there);
        prefetched.fetch(stage, 1, dnormed + (there ? r : 0) * dnormed_step, cols, there);
        if (dh) prefetched.fetch(stage, 2, dh + (there ? r : 0) * dh_step, cols, there);
        if constexpr (SECOND) prefetched.fetch(stage, 3, second + (there ? r : 0) * second_step, cols, there);
        prefetched.end_fetch();
    };
    const auto statistics = [&](long long r) {
        if (r >= rows) return RowStatistics{0.f, 0.f, 0.f};
        return RowStatistics{row_pivot(h + r * cols), RMS ? 0.f : mean[r], rstd[r]};
    };

    long long first = (long long)blockIdx.x * TEAMS;
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, first + team + stage * next_rows);
    RowStatistics next = statistics(first + team);
    ColumnSums sums[SUMS] = {};  // the gradients of weight, bias and x_bias
    int stage = 0, slot = 0;
    const float share = 1.f / cols;
    for (bool started = HELD; first < rows; first += next_rows, started = true) {
        const long long r = first + team;
        const bool there = r < rows;
        const scalar *row_h = h + (there ? r : 0) * cols, *row_dnormed = dnormed + (there ? r : 0) * dnormed_step;
        const RowStatistics row = next;
        next = statistics(r + next_rows);
        fetch(stage == 0 ? STAGES - 1 : stage - 1, r + (STAGES - 1) * next_rows);
        prefetched.wait();

        float g[SLOTS][VEC], normalized[SLOTS][VEC], dots[2] = {};
        const Vector<WEIGHT> weights(weight, cols);
        const auto read = [&](int p, int j, bool adding) {
            const Pack h_j = prefetched.pack(stage, 0, p, row_h, j, there), dy_j = prefetched.pack(stage, 1, p, row_dnormed, j, there);
            float dy[VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) dy[i] = dy_j[i];
            if constexpr (SECOND) {
                const Pack more = prefetched.pack(stage, 3, p, second + (there ? r : 0) * second_step, j, there);
#pragma unroll
                for (int i = 0; i < VEC; ++i) dy[i] += more[i];
            }
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[p][i] = dy[i];
            weights.scale(g[p], p, j);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                normalized[p][i] = row(h_j[i]);
                if (!adding) continue;
                dots[0] += g[p][i];
                dots[1] = fmaf(g[p][i], normalized[p][i], dots[1]);
                sums[0].add(p, i, dy[i] * normalized[p][i], sums_out[0], j, started);
                sums[1].add(p, i, dy[i], sums_out[1], j, started);
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
            if (dh) {
                const Pack dh_j = prefetched.pack(stage, 2, p, dh + r * dh_step, j, true);
#pragma unroll
                for (int i = 0; i < VEC; ++i) out[i] += dh_j[i];
            }
            store_pack(dresidual + r * cols + j, out);
            dropout(out, r * cols + j);
            if (dx) store_pack(dx + r * cols + j, out);
            if constexpr (X_BIAS)
#pragma unroll
                for (int i = 0; i < VEC; ++i) sums[2].add(p, i, out[i], sums_out[2], j, started);
        });
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    write_sums(sums, sums_out, cols);
    grid_launch_dependents();
}
