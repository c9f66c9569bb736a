// h = residual + dropout(x + x_bias), normed = LayerNorm or RMSNorm of h. Every input is read once.
// Constants: scalar = f16, bf16; RMS = false, true; TEAM = 32; PACKS = 4; VEC = 8; FULL = true; BLOCK = 128;
//   BLOCKS = 4; EARLY = true; WEIGHT = true; BIAS = true; X_BIAS = true
// Constants: scalar = bf16; RMS = false; TEAM = 8, 256; PACKS = 2; VEC = 8; FULL = false; BLOCK = 256; BLOCKS = 2;
//   EARLY = true; WEIGHT = false, true; BIAS = false; X_BIAS = false
// Constants: scalar = float; RMS = false; TEAM = 16, 512; PACKS = 8; VEC = 4; FULL = true; BLOCK = 512; BLOCKS = 1;
//   EARLY = true; WEIGHT = true; BIAS = true; X_BIAS = true
// Constants: scalar = float, bf16; RMS = false; TEAM = 256; PACKS = 0, 16; VEC = 1; FULL = false; BLOCK = 256;
//   BLOCKS = 1; EARLY = true; WEIGHT = true; BIAS = true; X_BIAS = true
// Launch:    grid = (ceil(rows / (BLOCK / TEAM)),), block = (BLOCK,).
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "norm/norm_dropout.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) dropout_add_norm_forward(
    const scalar* __restrict__ x,         // (rows, cols), rows x_step elements apart
    const scalar* __restrict__ residual,  // (rows, cols), rows residual_step elements apart
    const scalar* __restrict__ weight,    // (cols,), of WEIGHT
    const scalar* __restrict__ bias,      // (cols,), of BIAS
    const scalar* __restrict__ x_bias,    // (cols,), of X_BIAS
    scalar* __restrict__ normed,          // (rows, cols)
    scalar* h,                            // (rows, cols); read again where rows are long
    float* __restrict__ mean,             // (rows,) of h minus the row's first element; or null
    float* __restrict__ rstd,             // (rows,) or null
    long long rows,
    int cols,
    long long x_step,
    long long residual_step,
    float eps,
    unsigned int threshold,               // keep 16-bit numbers below it; 65536 keeps all
    float factor,                         // 1 / (1 - p)
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* __restrict__ device_step) {
    const Dropout dropout{philox_key(seed_low, seed_high, stream, step, device_step), threshold, factor};
    const long long r = (long long)blockIdx.x * TEAMS + team_of_thread();
    const bool there = TEAMS == 1 || r < rows;
    const long long row_there = there ? r : rows - 1;
    const scalar *row_x = x + row_there * x_step, *row_residual = residual + row_there * residual_step;
    scalar* row_h = h + row_there * cols;
    Pack held[SLOTS], held_x[SLOTS];
    if constexpr (HELD) each_pack(cols, [&](int p, int j) {
        held_x[p] = load_pack(row_x + j);
        held[p] = load_pack(row_residual + j);
    });
    const Vector<X_BIAS> x_biases(x_bias, cols);
    const Vector<WEIGHT> weights(weight, cols);
    const Vector<BIAS> biases(bias, cols);
    each_pack(cols, [&](int p, int j) {
        const Pack x_j = HELD ? held_x[p] : load_pack(row_x + j), residual_j = HELD ? held[p] : load_pack(row_residual + j);
        float value[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) value[i] = x_j[i];
        x_biases.shift(value, p, j);
        dropout(value, row_there * cols + j);
#pragma unroll
        for (int i = 0; i < VEC; ++i) value[i] += residual_j[i];
        held[p] = round_pack<scalar>(value);
        if (there) store_pack(row_h + j, held[p]);
    });
    const float pivot = RMS ? 0.f : team_first(HELD ? held[0][0] : (float)row_h[0]);
    const auto pack = [&](int p, int j) { return HELD ? held[p] : load_pack(row_h + j); };
    const RowStatistics row = row_statistics(pivot, pack, cols, eps);
    if (!there) return;
    write_normed(normed + r * cols, row, pack, weights, biases, cols);
    if (rstd && lane_of_thread() == 0) {
        mean[r] = row.mean;
        rstd[r] = row.rstd;
    }
}
