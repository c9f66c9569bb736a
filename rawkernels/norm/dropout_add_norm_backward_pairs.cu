// The gradients of dropout_add_norm for 16-bit rows of WARPS * COLUMNS columns. A team of WARPS warps, with COLUMNS each,
// loads two rows at a time to registers and samples their dropout mask while the loads are in flight. With SECOND the gradient
// of the norm's result is dnormed + second, added in float32.
// Constants: scalar = f16, bf16; COLUMNS = 384; WARPS = 1; TEAMS = 8; BLOCKS = 2; RMS = false, true; WEIGHT = true; SUMS = 1;
//   DROPOUT = true; SECOND = false
// Constants: scalar = bf16; COLUMNS = 256; WARPS = 1; TEAMS = 8; BLOCKS = 2; RMS = false; WEIGHT = false; SUMS = 7;
//   DROPOUT = false; SECOND = false
// Constants: scalar = bf16; COLUMNS = 384; WARPS = 2; TEAMS = 3; BLOCKS = 2; RMS = false; WEIGHT = true; SUMS = 7;
//   DROPOUT = false, true; SECOND = false, true
// Constants: scalar = f16; COLUMNS = 256; WARPS = 5; TEAMS = 3; BLOCKS = 1; RMS = false; WEIGHT = true; SUMS = 7;
//   DROPOUT = true; SECOND = false
// Launch:    grid = (up to BLOCKS per multiprocessor,), block = (32 * WARPS * TEAMS,), shared = 4 bytes for each of the
//            SUMS of a column and team. column_sum.cu then adds the blocks' sums, in order.
//            dependent: dropout_add_norm_backward_pairs
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/barrier.cuh"
#include "common/grid_dependency.cuh"
#include "common/philox.cuh"
#include "common/tile.cuh"

constexpr int TEAM = 32 * WARPS, THREADS = TEAMS * TEAM, ROW = WARPS * COLUMNS;
constexpr int PACKS = COLUMNS / 128;  // packs of four columns per lane
// Bits of SUMS: the column sums to compute.
constexpr bool OF_WEIGHT = SUMS & 1, OF_BIAS = SUMS & 2, OF_X_BIAS = SUMS & 4;
constexpr int BIAS_SUM = OF_WEIGHT, X_BIAS_SUM = BIAS_SUM + OF_BIAS, COUNT = X_BIAS_SUM + OF_X_BIAS;
static_assert(COLUMNS % 128 == 0 && COUNT > 0, "dropout_add_norm_backward_pairs.cu: COLUMNS is a multiple of 128, SUMS not 0");

struct Pack {
    uint2 words;

    __device__ __forceinline__ void unpack(float (&x)[4]) const {
        const float2 low = unpack_pair(scalar(), words.x), high = unpack_pair(scalar(), words.y);
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
};
__device__ __forceinline__ Pack load_pack(const scalar* from) { return {*reinterpret_cast<const uint2*>(from)}; }
__device__ __forceinline__ void store_pack(scalar* to, const float (&x)[4]) {
    *reinterpret_cast<uint2*>(to) = {pack_pair(scalar(), x[0], x[1]), pack_pair(scalar(), x[2], x[3])};
}

// Sums dots[row][n] over the warp, for all lanes. Half of the warp reduces one row, a quarter one number.
__device__ __forceinline__ void warp_sums(float (&dots)[2][2]) {
    const bool second_row = threadIdx.x & 16, second = threadIdx.x & 8;
    float own[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float other = __shfl_xor_sync(~0u, second_row ? dots[0][n] : dots[1][n], 16);
        own[n] = (second_row ? dots[1][n] : dots[0][n]) + other;
    }
    float sum = (second ? own[1] : own[0]) + __shfl_xor_sync(~0u, second ? own[0] : own[1], 8);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int n = 0; n < 2; ++n) dots[q][n] = __shfl_sync(~0u, sum, 16 * q + 8 * n);
}

// Adds the sums of the team's warps, in order. Alternate `slot`, so that one barrier per call is enough.
__device__ __forceinline__ void team_sums(float (&dots)[2][2], int team, int warp, int slot) {
    if constexpr (WARPS > 1) {
        __shared__ float4 parts[2][TEAMS][WARPS];
        if (threadIdx.x % 32 == 0) parts[slot][team][warp] = {dots[0][0], dots[0][1], dots[1][0], dots[1][1]};
        if constexpr (TEAMS > 1) bar_sync(1 + team, TEAM);
        else __syncthreads();
        float4 total = parts[slot][team][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) {
            const float4 part = parts[slot][team][w];
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        dots[0][0] = total.x, dots[0][1] = total.y, dots[1][0] = total.z, dots[1][1] = total.w;
    }
}

// Which of this lane's elements of rows first and first + 1 are kept: bit 8 p + i for element i of pack p. Two adjacent
// lanes share eight random numbers, so each lane samples those of one row for both.
__device__ __forceinline__ void sample_mask(u32 (&kept)[2], const PhiloxKey& key, u32 threshold, int first, int column) {
    const int lane = threadIdx.x % 32;
    u32 bits = 0;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const unsigned long long counter = (unsigned long long)(first + lane % 2) * (ROW / 8) + column / 8 + 16 * p;
        const uint4 drawn = philox(key, (u32)counter, (u32)(counter >> 32));
        const u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (words[i] << 16 < threshold << 16) bits |= 1u << 8 * p + 2 * i;
            if (words[i] < threshold << 16) bits |= 2u << 8 * p + 2 * i;
        }
    }
    const u32 other = __shfl_xor_sync(~0u, bits, 1);
    kept[0] = (lane % 2 ? other : bits) >> lane % 2 * 4;
    kept[1] = (lane % 2 ? bits : other) >> lane % 2 * 4;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) dropout_add_norm_backward_pairs(
    const scalar* h,        // (rows, ROW)
    const scalar* weight,   // (ROW,), of WEIGHT
    const float* mean,      // (rows,)
    const float* rstd,      // (rows,)
    const scalar* dnormed,  // (rows, ROW), rows dnormed_step elements apart
    const scalar* dh,       // (rows, ROW), rows dh_step elements apart, of h as an output; null: zeros
    const scalar* second,   // (rows, ROW), rows second_step elements apart, of SECOND
    scalar* __restrict__ dx,         // (rows, ROW), of DROPOUT; else it is dresidual
    scalar* __restrict__ dresidual,  // (rows, ROW)
    float* dweight,                  // (grid, ROW) sums over this block's rows, of OF_WEIGHT
    float* dbias,                    // (grid, ROW), of OF_BIAS
    float* dx_bias,                  // (grid, ROW), of OF_X_BIAS
    int rows,
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
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    const int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / 32, column = warp * COLUMNS + threadIdx.x % 32 * 4;
    const int pairs = rows / 2 + rows % 2;
    const auto share = [&](int block) { return (int)((long long)block * pairs / gridDim.x); };
    Pack weights[PACKS];
    if (WEIGHT)
#pragma unroll
        for (int p = 0; p < PACKS; ++p) weights[p] = load_pack(weight + column + 128 * p);
    const auto weight_of = [&](float (&w)[4], int p) {
        if constexpr (WEIGHT) weights[p].unpack(w);
        else for (float& x : w) x = 1.f;
    };
    float sums[COUNT][PACKS][4] = {};

#pragma unroll 1
    for (int pair = share(blockIdx.x) + team, slot = 0; pair < share(blockIdx.x + 1); pair += TEAMS, slot ^= 1) {
        Pack rows_h[2][PACKS], rows_dnormed[2][PACKS], rows_dh[2][PACKS], rows_second[2][PACKS];
        float center[2], scale[2], deviations[2][PACKS][4], dots[2][2] = {};
        const auto gradient_of = [&](float (&dy)[4], int q, int p) {
            rows_dnormed[q][p].unpack(dy);
            if (!SECOND) return;
            float more[4];
            rows_second[q][p].unpack(more);
#pragma unroll
            for (int i = 0; i < 4; ++i) dy[i] += more[i];
        };
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            // a last row without a partner is read twice and counted once
            const long long row = 2 * pair + (2 * pair + q < rows ? q : 0);
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                const int at = column + 128 * p;
                rows_h[q][p] = load_pack(h + row * ROW + at);
                rows_dnormed[q][p] = load_pack(dnormed + row * dnormed_step + at);
                rows_dh[q][p] = dh ? load_pack(dh + row * dh_step + at) : Pack{};
                if (SECOND) rows_second[q][p] = load_pack(second + row * second_step + at);
            }
            center[q] = RMS ? 0.f : mean[row];
            if (!RMS && WARPS > 1) center[q] += (float)h[row * ROW];
            scale[q] = rstd[row];
        }
        u32 kept[2];
        if (DROPOUT) sample_mask(kept, key, threshold, 2 * pair, column);

        // ---- row sums, and this lane's part of the column sums
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const bool there = q == 0 || 2 * pair + 1 < rows;
            if (!RMS && WARPS == 1) center[q] += __shfl_sync(~0u, unpack_pair(scalar(), rows_h[q][0].words.x).x, 0);
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                float x[4], dy[4], w[4];
                rows_h[q][p].unpack(x);
                gradient_of(dy, q, p);
                weight_of(w, p);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float deviation = x[i] - center[q], product = dy[i] * deviation;
                    dots[q][0] = fmaf(dy[i], w[i], dots[q][0]);
                    dots[q][1] = fmaf(product, w[i], dots[q][1]);
                    if (OF_WEIGHT) sums[0][p][i] = fmaf(product, there ? scale[q] : 0.f, sums[0][p][i]);
                    if (OF_BIAS) sums[BIAS_SUM][p][i] += there ? dy[i] : 0.f;
                    deviations[q][p][i] = deviation;
                }
            }
        }
        warp_sums(dots);
        team_sums(dots, team, warp, slot);

        // ---- rstd (g - mean(g) - normalized mean(g normalized)) with g = weight * dnormed
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const bool there = q == 0 || 2 * pair + 1 < rows;
            const float slope = -scale[q] * scale[q] * scale[q] * dots[q][1] * (1.f / ROW);
            const float shift = RMS ? 0.f : -scale[q] * dots[q][0] * (1.f / ROW);
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                float dy[4], w[4], more[4], out[4];
                gradient_of(dy, q, p);
                rows_dh[q][p].unpack(more);
                weight_of(w, p);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    out[i] = fmaf(dy[i] * w[i], scale[q], fmaf(deviations[q][p][i], slope, more[i] + shift));
                const long long at = (2 * pair + q) * (long long)ROW + column + 128 * p;
                if (there) store_pack(dresidual + at, out);
                if (DROPOUT) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) out[i] *= kept[q] & 1u << 8 * p + i ? factor : 0.f;
                    if (there) store_pack(dx + at, out);
                }
                if (OF_X_BIAS)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[X_BIAS_SUM][p][i] += there ? out[i] : 0.f;
            }
        }
    }

    // ---- column sums over the teams, in order
    extern __shared__ float4 packs[];  // (TEAMS, COUNT, ROW / 4)
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            packs[((team * COUNT + n) * ROW + column) / 4 + 32 * p] =
                {sums[n][p][0], sums[n][p][1], sums[n][p][2], sums[n][p][3]};
    __syncthreads();
    for (int j = threadIdx.x; j < COUNT * ROW; j += THREADS) {
        float total = 0.f;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) total += reinterpret_cast<const float*>(packs)[t * COUNT * ROW + j];
        const int n = j / ROW;
        float* const out = OF_WEIGHT && n == 0 ? dweight : OF_BIAS && n == BIAS_SUM ? dbias : dx_bias;
        out[blockIdx.x * (long long)ROW + j % ROW] = total;
    }
    grid_launch_dependents();
}
