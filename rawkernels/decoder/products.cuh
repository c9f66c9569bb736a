#pragma once
// Matmuls of decoder_step.cu, with the norm before them, and bias, activation and residual sum behind them. The weights are
// operand a (16 outputs), the texts operand b (8 rows).
#include "common/mma_sync.cuh"
#include "common/pair.cuh"
#include "decoder/program.cuh"
#include "linear/gelu.cuh"

__device__ float activated(float x, int activation) {
    if (activation == RELU) return fmaxf(x, 0.f);
    if (activation == GELU) return __fdividef(x, 1.f + exp2_fast(x * EXPONENT * (1.f + TANH_CUBIC * x * x)));
    return x;
}

// out = activation(W x + bias) + residual for the units of this block: TILE outputs of ROWS rows, two units at a time. Of
// each stage a warp multiplies every eighth piece; the partial sums of the warps are added in shared memory. The number of
// blocks is a multiple of the groups of rows, so that all units of a block are of the same rows.
__device__ void multiply(const Phase& phase, const Shared& shared, const Grid& grid, PipelineState<SLOTS>& slot,
                         const Texts& texts) {
    constexpr int PAIRS = ROWS * TILE / 2;                                  // of outputs of a unit, two of a row in each
    constexpr int ITEMS = UNITS * PAIRS <= CONSUMERS ? 1 : UNITS * PAIRS / CONSUMERS;  // pairs of a thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int shift = texts.shift, split = split_of(phase), share = g & ((1 << split) - 1);
    const int inputs = phase.inputs, outputs = phase.outputs, stages = ceil_div(inputs, DEPTH * WARPS * PIECES);
    const int units = ceil_div(outputs, TILE) << shift, norm = phase.norm;
    int unit = first_unit(phase);
    if (unit >= units) return grid.wait();
    const int first_row = (unit & ((1 << shift) - 1)) * ROWS, row = first_row + threadIdx.x % ROWS;  // row: of its pairs
    const scalar* x = phase.x + (first_row + g) * inputs + warp * DEPTH + t * 8;
    uint4 even[PIECES][COLUMNS], odd[PIECES][COLUMNS];  // operands b of two stages
    const auto load = [&](uint4 (&b)[PIECES][COLUMNS], int stage) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const int k = (stage * PIECES + p) * WARPS * DEPTH;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                b[p][c] = make_uint4(0, 0, 0, 0);
                if (k + warp * DEPTH < inputs) b[p][c] = load_states(x + k + c * 8 * inputs);
            }
        }
    };
    int shares = 1;  // of the row of which column g is a share
    if (split && g >> split < texts.rows)
        shares = shares_of(phase, keys_of(phase, g >> split, quotient(g >> split, phase.per_beam))).count;
    // Lane t of a row computes the weight of its share in the head of piece t: one shuffle a piece, not six.
    const auto load_shares = [&](float2 (&known)[ROWS], int stage) {
        const int k = ((stage * PIECES + t) * WARPS + warp) * DEPTH;
#pragma unroll
        for (int s = 0; s < ROWS; ++s) {
            known[s] = make_float2(NEG_INF, 0);
            if (shares > 1 && s < shares && k < inputs) known[s] = phase.shares[k / HEAD_DIM * ROWS + g - share + s];
        }
    };
    const auto scale_shares = [&](uint4 (&b)[PIECES][COLUMNS], const float2 (&known)[ROWS]) {
        float level = known[0].x, all = 0, own = 0;
#pragma unroll
        for (int s = 1; s < ROWS; ++s) level = fmaxf(level, known[s].x);
#pragma unroll
        for (int s = 0; s < ROWS; ++s) {
            const float weight = known[s].y * exp2_fast(known[s].x - level);
            all += weight;
            if (s == share) own = weight;
        }
        own *= reciprocal(all);
        if (shares == 1) own = 1;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const float weight = __shfl_sync(~0u, own, lane - t + p);
            const auto scaled = [&](u32 pair) {
                const float2 x = unpack_pair(scalar(), pair);
                return pack_pair(scalar(), x.x * weight, x.y * weight);
            };
            uint4& x = b[p][0];
            x = make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
            if (share >= shares) x = make_uint4(0, 0, 0, 0);  // left by another step
        }
    };
    float* partial = shared.partial();
    bool first = true;
#pragma unroll 1
    for (; unit < units; unit += UNITS * gridDim.x) {
        const int here = unit + gridDim.x < units ? UNITS : 1;
        // what the end needs
        u32 before[ITEMS], gain[ITEMS], bias[ITEMS];
        float2 known = {}, sums[ITEMS], offsets[ITEMS];
        int columns[ITEMS];  // of the pair in the output; -1: none
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = threadIdx.x + i * CONSUMERS, u = item / PAIRS;
            columns[i] = ((unit + u * gridDim.x) >> shift) * TILE + item % PAIRS / ROWS * 2;
            if (u >= here || columns[i] >= outputs) columns[i] = -1;
            before[i] = gain[i] = bias[i] = 0;
            if (columns[i] < 0 || !phase.residual) continue;
            before[i] = *reinterpret_cast<const u32*>(phase.residual + row * outputs + columns[i]);
            if (phase.statistics) {
                gain[i] = *reinterpret_cast<const u32*>(phase.gain + columns[i]);
                if (phase.shift) bias[i] = *reinterpret_cast<const u32*>(phase.shift + columns[i]);
            }
        }
        if (first) grid.wait();
        if (first || stages > 2) {
            load(even, 0);
            if (stages > 1) load(odd, 1);
        }
        if (first && split) {  // then there are two stages at most
            float2 of_even[ROWS], of_odd[ROWS];
            load_shares(of_even, 0);
            load_shares(of_odd, 1);
            scale_shares(even, of_even);
            if (stages > 1) scale_shares(odd, of_odd);
        }
        if (phase.statistics) known = *reinterpret_cast<const float2*>(phase.statistics + row * 2);
        float d[UNITS][COLUMNS][4] = {}, sums_of[COLUMNS][4] = {};
        const auto accumulate = [&](const uint4 (&b)[PIECES][COLUMNS], int stage) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                if (u >= here) break;
                const u32 from = shared.ring + slot.stage * SLOT_BYTES;
                mbar_wait(shared.full(slot.stage), slot.parity);
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    if (((stage * PIECES + p) * WARPS + warp) * DEPTH >= inputs) continue;
                    const u32 piece = from + (p * WARPS + warp) * PIECE * 2 + lane * 16;
                    const uint4 low = load_shared_uint4(piece), high = load_shared_uint4(piece + PIECE);
                    const u32 a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        mma(scalar(), d[u][c], a0, b[p][c].x, b[p][c].y);
                        mma(scalar(), d[u][c], a1, b[p][c].z, b[p][c].w);
                    }
                }
                if (stage == stages - 1) {
                    const u32 tail = from + inputs * TILE * 2 - (stages - 1) * STAGE_BYTES;
#pragma unroll
                    for (int i = 0; i < ITEMS; ++i) {
                        const int item = threadIdx.x + i * CONSUMERS;
                        if (item / PAIRS != u) continue;
                        sums[i] = load_shared_float2(tail + item % PAIRS / ROWS * 8);
                        offsets[i] = load_shared_float2(tail + TILE * 4 + item % PAIRS / ROWS * 8);
                    }
                }
                __syncwarp();
                release(shared.empty(slot.stage));
                slot.next();
            }
            if (!first || !norm) return;
            const u32 one = pack_pair(scalar(), 1.f, 1.f);
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {  // operand a: the 8 rows themselves, then ones
                    const u32 low[4] = {b[p][c].x, one, b[p][c].y, one}, high[4] = {b[p][c].z, one, b[p][c].w, one};
                    mma(scalar(), sums_of[c], low, b[p][c].x, b[p][c].y);
                    mma(scalar(), sums_of[c], high, b[p][c].z, b[p][c].w);
                }
        };
#pragma unroll 1
        for (int stage = 0; stage < stages; stage += 2) {
            accumulate(even, stage);
            if (stage + 2 < stages) load(even, stage + 2);
            if (stage + 1 < stages) accumulate(odd, stage + 1);
            if (stage + 3 < stages) load(odd, stage + 3);
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                float* own = partial + u * PARTIAL + (warp * TILE + g) * PITCH + c * 8 + 2 * t;
                if (split) {  // the sums of a row's shares; the columns of other rows may hold anything
                    if (u >= here) break;
                    float low = d[u][c][0] + d[u][c][1], high = d[u][c][2] + d[u][c][3];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float2 other = {__shfl_xor_sync(~0u, low, 1 << i), __shfl_xor_sync(~0u, high, 1 << i)};
                        if (i + 1 < split) low += other.x, high += other.y;
                    }
                    own += (2 * t >> split) - 2 * t;
                    if (!(2 * t & ((1 << split) - 1))) own[0] = low, own[8 * PITCH] = high;
                    continue;
                }
                *reinterpret_cast<float2*>(own) = make_float2(d[u][c][0], d[u][c][1]);
                *reinterpret_cast<float2*>(own + 8 * PITCH) = make_float2(d[u][c][2], d[u][c][3]);
            }
            if (first && norm) {  // the squares of row g are on the diagonal, sums below it
                float* to = shared.rows() + (warp * ROWS + c * 8) * 2;
                if (g == 0) to[4 * t] = sums_of[c][2], to[4 * t + 2] = sums_of[c][3];
                if (t == g / 2) to[2 * g + 1] = g % 2 ? sums_of[c][1] : sums_of[c][0];
            }
        }
        sync_consumers();
        float mean = 0, rstd = 1;
        if (norm) {
            float2 all = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 part = *reinterpret_cast<const float2*>(shared.rows() + (w * ROWS + threadIdx.x % ROWS) * 2);
                all.x += part.x, all.y += part.y;
            }
            const float each = reciprocal(inputs);
            if (norm == LAYER_NORM) mean = all.x * each;
            rstd = rsqrtf(fmaxf(all.y * each - mean * mean, 0.f) + phase.eps);
            if (first && phase.statistics_out && unit >> shift == 0 && threadIdx.x < ROWS)
                *reinterpret_cast<float2*>(phase.statistics_out + row * 2) = make_float2(mean, rstd);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = threadIdx.x + i * CONSUMERS;
            if (columns[i] < 0) continue;
            float2 y = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float* from = partial + item / PAIRS * PARTIAL + (w * TILE + item % PAIRS / ROWS * 2) * PITCH;
                y.x += from[item % ROWS], y.y += from[item % ROWS + PITCH];
            }
            if (norm) y.x = rstd * (y.x - mean * sums[i].x), y.y = rstd * (y.y - mean * sums[i].y);
            y.x = activated(y.x + offsets[i].x, phase.activation), y.y = activated(y.y + offsets[i].y, phase.activation);
            if (phase.residual) {
                float2 old = unpack_pair(scalar(), before[i]);
                if (phase.statistics) {
                    const float2 scale = unpack_pair(scalar(), gain[i]), add = unpack_pair(scalar(), bias[i]);
                    old.x = (old.x - known.x) * known.y * scale.x + add.x;
                    old.y = (old.y - known.x) * known.y * scale.y + add.y;
                }
                y.x += old.x, y.y += old.y;
            }
            *reinterpret_cast<u32*>(phase.out + (long long)row * outputs + columns[i]) = pack_pair(scalar(), y.x, y.y);
        }
        first = false;
        if (BUFFERS > UNITS) partial = partial == shared.partial() ? shared.partial() + UNITS * PARTIAL : shared.partial();
        else if (unit + UNITS * gridDim.x < units) sync_consumers();  // before the partial sums are overwritten
    }
}
