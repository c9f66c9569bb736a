#pragma once
// Matmuls of cluster_step.cu. The weights are operand a (16 outputs), the texts operand b (8 rows): lane 4 g + t has the
// sums of outputs g and g + 8, and of rows 2 t and 2 t + 1.
#include "common/tile.cuh"
#include "decoder/activation.cuh"
#include "decoder/cluster.cuh"

struct Sums {
    float of[COLUMNS][4];
};

// The sum of the next COUNT pieces of this warp times the states at `states`, which begin with the first input of the
// first. SQUARES: `squares` gets squares of the rows, on the diagonal, and their sums, in every row from 8 on.
template <int COUNT, bool SQUARES>
__device__ Sums accumulate(const Shared& shared, Weights& weights, u32 states, Sums& squares, bool squared) {
    constexpr int CHAINS = 4;  // of products that wait for one another
    constexpr int STEP = COLUMNS > 1 && CHUNK > 2 ? 2 : CHUNK;  // pieces in registers at a time
    float d[CHAINS][COLUMNS][4] = {}, s[2][COLUMNS][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < COUNT / CHUNK; ++chunk) {
        const int slot = weights.slot.stage;
        u32 loaded = 0;
#pragma unroll
        for (int piece = 0; piece < CHUNK; piece += STEP) {
            uint4 b[STEP][COLUMNS], a[STEP][2];
            const u32 of_step = states + (chunk * CHUNK + piece) * (COLUMNS * 512) + shared.lane * 16;
#pragma unroll
            for (int p = 0; p < STEP; ++p)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) b[p][c] = load_shared_uint4(of_step + (p * COLUMNS + c) * 512);
            if (piece == 0) mbar_wait(shared.full(slot), weights.slot.parity);
            const u32 from = shared.slot(slot) + piece * PIECE_BYTES + shared.lane * 16;
#pragma unroll
            for (int p = 0; p < 2 * STEP; ++p) a[p / 2][p % 2] = load_shared_uint4(from + p * (PIECE_BYTES / 2));
#pragma unroll
            for (int p = 0; p < STEP; ++p) {
                const u32 low[4] = {a[p][0].x, a[p][0].y, a[p][0].z, a[p][0].w};
                const u32 high[4] = {a[p][1].x, a[p][1].y, a[p][1].z, a[p][1].w};
                loaded |= a[p][0].x | a[p][1].x;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    mma(scalar(), d[2 * p % CHAINS][c], low, b[p][c].x, b[p][c].y);
                    mma(scalar(), d[(2 * p + 1) % CHAINS][c], high, b[p][c].z, b[p][c].w);
                }
                if (SQUARES && squared) {  // operand a: the 8 rows themselves, then ones
                    const u32 one = pack_pair(scalar(), 1.f, 1.f);
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        const u32 x[4] = {b[p][c].x, one, b[p][c].y, one}, y[4] = {b[p][c].z, one, b[p][c].w, one};
                        mma(scalar(), s[0][c], x, b[p][c].x, b[p][c].y);
                        mma(scalar(), s[1][c], y, b[p][c].z, b[p][c].w);
                    }
                }
            }
        }
        if (shared.lane == 0) weights.load(shared, slot, loaded);
        __syncwarp();
        weights.slot.next();
    }
    Sums sums;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums.of[c][i] = d[0][c][i] + d[1][c][i] + (d[2][c][i] + d[3][c][i]);
            if (SQUARES) squares.of[c][i] = s[0][c][i] + s[1][c][i];
        }
    return sums;
}

// The mean and 1 / deviation of a row from the sum of its elements and that of their squares.
__device__ float2 statistics_of(float sum, float squares, float eps) {
    const float mean = sum * (1.f / WIDTH);
    return make_float2(mean, rsqrtf(fmaxf(squares * (1.f / WIDTH) - mean * mean, 0.f) + eps));
}
// rstd (y - mean sum) + offset
__device__ float finished(float y, float2 known, float sum, float offset) { return known.y * (y - known.x * sum) + offset; }

// The UNITS units of this block whose tails begin with unit `first`: activation(norm(x) W + bias), a unit by a warp.
// use(unit, row, output, pair) gets two outputs of a row.
template <int UNITS, class Use>
__device__ void multiply_units(const Shared& shared, Weights& weights, int tails, bool norm, float eps, int activation,
                               const Use& use) {
    const int lane = shared.lane, g = lane / 4, t = lane % 4;
    const int unit = shared.warp;
    if (unit >= UNITS) return weights.skip(shared, PIECES);
    Sums squares;
    const Sums sums = accumulate<PIECES, true>(shared, weights, shared.address + AT_X, squares, norm);
    const float* tail = shared.at<float>(tails) + unit * 2 * TILE + g;
    const float sum[2] = {tail[0], tail[8]}, offset[2] = {tail[TILE], tail[TILE + 8]};
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float2 known[2] = {{0, 1}, {0, 1}};
        if (norm) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // of row 2 t + i: on the diagonal
                const float of_square = __shfl_sync(~0u, squares.of[c][i], (2 * t + i) * 4 + t);
                known[i] = statistics_of(squares.of[c][2 + i], of_square, eps);
            }
            if (unit == 0 && g == 0)
                *shared.at<float4>(AT_STATISTICS + (c * 8 + 2 * t) * 8) =
                    make_float4(known[0].x, known[0].y, known[1].x, known[1].y);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float y[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                y[i] = activated(finished(sums.of[c][2 * half + i], known[i], sum[half], offset[half]), activation);
            use(unit, c * 8 + g, half * 8 + 2 * t, movmatrix(pack_pair(scalar(), y[0], y[1])));
        }
    }
}

// The two units of a result, by all warps: use(unit, row, output, y) gets two outputs of a row with their bias.
template <bool NORMED, class Use>
__device__ void multiply_result(const Shared& shared, Weights& weights, int from, int tails, bool norm, float eps,
                                const Use& use) {
    const int warp = shared.warp, lane = shared.lane, g = lane / 4, t = lane % 4;
    float* partial = shared.at<float>(AT_PARTIAL);
    if (warp < RESULT * PARTS) {
        Sums squares;
        const bool first = NORMED && norm && warp < PARTS;  // unit 0
        const Sums sums = accumulate<OF_RESULT, NORMED>(
            shared, weights, shared.address + from + warp % PARTS * OF_RESULT * (COLUMNS * 512), squares, first);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partial[(warp * ROWS + c * 8 + 2 * t + i % 2) * PITCH + g + i / 2 * 8] = sums.of[c][i];
            if (first) {
                float* to = shared.at<float>(AT_SQUARES) + (warp * ROWS + c * 8) * 2;
                if (g == 0) to[4 * t] = squares.of[c][2], to[4 * t + 2] = squares.of[c][3];
                if (t == g / 2) to[2 * g + 1] = g % 2 ? squares.of[c][1] : squares.of[c][0];
            }
        }
    } else weights.skip(shared, OF_RESULT);
    bar_sync(1, THREADS);
#pragma unroll 1
    for (int item = warp; item < 2 * RESULT * COLUMNS; item += WARPS) {  // 8 outputs of 8 rows
        const int unit = item / (2 * COLUMNS), row = item % COLUMNS * 8 + g, output = item / COLUMNS % 2 * 8 + 2 * t;
        const float* at = partial + (unit * PARTS * ROWS + row) * PITCH + output;
        const float* tail = shared.at<float>(tails) + unit * 2 * TILE + output;
        const float2 sum = *reinterpret_cast<const float2*>(tail), offset = *reinterpret_cast<const float2*>(tail + TILE);
        float2 y = {}, known = {0, 1};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const float2 of = *reinterpret_cast<const float2*>(at + part * ROWS * PITCH);
            y.x += of.x, y.y += of.y;
        }
        if (NORMED && norm) {
            float2 all = {};
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const float2 of = *(shared.at<float2>(AT_SQUARES) + part * ROWS + row);
                all.x += of.x, all.y += of.y;
            }
            known = statistics_of(all.x, all.y, eps);
            if (item < COLUMNS && t == 0) *(shared.at<float2>(AT_STATISTICS) + row) = known;
        }
        use(unit, row, output, make_float2(finished(y.x, known, sum.x, offset.x), finished(y.y, known, sum.y, offset.y)));
    }
}
