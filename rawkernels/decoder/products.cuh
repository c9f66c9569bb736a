#pragma once
// Matmuls of decoder_step.cu, with the norm before them, and bias, activation and residual sum behind them. The weights are
// operand a (16 outputs), the texts operand b (8 rows).
#include "common/mma_sync.cuh"
#include "common/pair.cuh"
#include "decoder/program.cuh"
#include "decoder/words.cuh"
#include "linear/gelu.cuh"

__device__ float activated(float x, int activation) {
    if (activation == RELU) return fmaxf(x, 0.f);
    if (activation == GELU) return __fdividef(x, 1.f + exp2_fast(x * EXPONENT * (1.f + TANH_CUBIC * x * x)));
    return x;
}

// out = activation(W x + bias) + residual for the units of this block: TILE outputs of ROWS rows, two units at a time. Of
// each stage a warp multiplies every eighth piece; the partial sums of the warps are added in shared memory.
__device__ void multiply(const Phase& phase, const Shared& shared, const Texts& texts, u32 mark, PipelineState<SLOTS>& slot,
                         u32& turn) {
    constexpr int PAIRS = ROWS * TILE / 2;                                  // of outputs of a unit, two of a row in each
    constexpr int ITEMS = UNITS * PAIRS <= CONSUMERS ? 1 : UNITS * PAIRS / CONSUMERS;  // pairs of a thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int inputs = phase.inputs, outputs = phase.outputs, steps = ceil_div(inputs, STAGE_DEPTH) * STEPS;
    const int units = ceil_div(outputs, TILE), norm = phase.norm, row = threadIdx.x % ROWS;  // row: of this thread's pairs
    int unit = first_unit(phase);
    if (unit >= units) return;
    const u32* x = words_of(phase.x) + g * inputs + warp * DEPTH + t * 4;
    Eight even[STEP * COLUMNS], odd[STEP * COLUMNS];  // operands b of two steps, a part of a stage each
    const auto source = [&](int i, int step) {
        return x + (step * STEP + i / COLUMNS) * WARPS * DEPTH + i % COLUMNS * 8 * inputs;
    };
    const auto load = [&](Eight (&b)[STEP * COLUMNS], int step) {
#pragma unroll
        for (int i = 0; i < STEP * COLUMNS; ++i) {
            b[i].clear(mark - 1);
            const bool inside = ((step * STEP + i / COLUMNS) * WARPS + warp) * DEPTH < inputs;
            if (inside && i % COLUMNS * 8 + g < texts.rows) b[i].load(source(i, step));
        }
    };
    load(even, 0);
    load(odd, 1);  // or zeros, so that ptxas does not keep what the registers had in phases before
    float mean = 0, rstd = 1;  // of `row`
    bool first = true;
#pragma unroll 1
    for (; unit < units; unit += UNITS * gridDim.x) {
        const int here = unit + gridDim.x < units ? UNITS : 1;
        // what the end needs
        u64 before[ITEMS], known[2] = {};
        u32 gain[ITEMS], bias[ITEMS];
        float2 sums[ITEMS] = {}, offsets[ITEMS] = {};
        int columns[ITEMS];  // of the pair in the output; -1: none
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = threadIdx.x + i * CONSUMERS, u = item / PAIRS;
            columns[i] = (unit + u * gridDim.x) * TILE + item % PAIRS / ROWS * 2;
            if (u >= here || columns[i] >= outputs || row >= texts.rows) columns[i] = -1;
            before[i] = gain[i] = bias[i] = 0;
            if (columns[i] < 0 || !phase.residual) continue;
            before[i] = load_word(words_of(phase.residual) + row * outputs + word_at(columns[i]));
            if (phase.statistics) {
                gain[i] = *reinterpret_cast<const u32*>(phase.gain + columns[i]);
                if (phase.shift) bias[i] = *reinterpret_cast<const u32*>(phase.shift + columns[i]);
            }
        }
        if (phase.statistics && row < texts.rows) load_relaxed(known[0], known[1], phase.statistics + row * 2);
        float d[UNITS][COLUMNS][4] = {}, sums_of[COLUMNS][4] = {};
        const auto accumulate = [&](Eight (&b)[STEP * COLUMNS], int step) {
            await(b, mark - 1, texts.rows, [&](int i) { return source(i, step); });
            const int part = step % STEPS;
            PipelineState<SLOTS> at = slot;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                if (u >= here) break;
                const u32 ring = shared.ring + at.stage * SLOT_BYTES;
                mbar_wait(shared.full(at.stage), at.parity);
#pragma unroll
                for (int p = 0; p < STEP; ++p) {
                    if (((step * STEP + p) * WARPS + warp) * DEPTH >= inputs) continue;
                    const u32 piece = ring + ((part * STEP + p) * WARPS + warp) * PIECE * 2 + lane * 16;
                    const uint4 low = load_shared_uint4(piece), high = load_shared_uint4(piece + PIECE);
                    const u32 a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        const uint4 of = b[p * COLUMNS + c].numbers();
                        mma(scalar(), d[u][c], a0, of.x, of.y);
                        mma(scalar(), d[u][c], a1, of.z, of.w);
                    }
                }
                if (step == steps - 1) {
                    const u32 tail = ring + (inputs - (step / STEPS) * STAGE_DEPTH) * TILE * 2;
#pragma unroll
                    for (int i = 0; i < ITEMS; ++i) {
                        const int item = threadIdx.x + i * CONSUMERS;
                        if (item / PAIRS != u) continue;
                        sums[i] = load_shared_float2(tail + item % PAIRS / ROWS * 8);
                        offsets[i] = load_shared_float2(tail + TILE * 4 + item % PAIRS / ROWS * 8);
                    }
                }
                if (part == STEPS - 1) {
                    __syncwarp();
                    release(shared.empty(at.stage));
                }
                at.next();
            }
            if (part == STEPS - 1) slot = at;
            if (!first || !norm) return;
            const u32 one = pack_pair(scalar(), 1.f, 1.f);
#pragma unroll
            for (int i = 0; i < STEP * COLUMNS; ++i) {  // operand a: the 8 rows themselves, then ones
                const uint4 of = b[i].numbers();
                const u32 low[4] = {of.x, one, of.y, one}, high[4] = {of.z, one, of.w, one};
                mma(scalar(), sums_of[i % COLUMNS], low, of.x, of.y);
                mma(scalar(), sums_of[i % COLUMNS], high, of.z, of.w);
            }
        };
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            accumulate(even, step);
            if (step + 2 < steps) load(even, step + 2);
            if (step + 1 < steps) accumulate(odd, step + 1);
            if (step + 3 < steps) load(odd, step + 3);
        }
        if (steps > 2 && unit + UNITS * gridDim.x < units) {
            load(even, 0);
            load(odd, 1);
        }
        float *partial = shared.partial(turn), *of_rows = shared.rows(turn);
        begin_turn();
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                float* own = partial + u * PARTIAL + (warp * TILE + g) * PITCH + c * 8 + 2 * t;
                *reinterpret_cast<float2*>(own) = make_float2(d[u][c][0], d[u][c][1]);
                *reinterpret_cast<float2*>(own + 8 * PITCH) = make_float2(d[u][c][2], d[u][c][3]);
            }
            if (first && norm) {  // the squares of row g are on the diagonal, sums below it
                float* to = of_rows + (warp * ROWS + c * 8) * 2;
                if (g == 0) to[4 * t] = sums_of[c][2], to[4 * t + 2] = sums_of[c][3];
                if (t == g / 2) to[2 * g + 1] = g % 2 ? sums_of[c][1] : sums_of[c][0];
            }
        }
        sync_consumers();
        if (first && norm) {
            float2 all = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 part = *reinterpret_cast<const float2*>(of_rows + (w * ROWS + threadIdx.x % ROWS) * 2);
                all.x += part.x, all.y += part.y;
            }
            const float each = reciprocal(inputs);
            if (norm == LAYER_NORM) mean = all.x * each;
            rstd = rsqrtf(fmaxf(all.y * each - mean * mean, 0.f) + phase.eps);
            if (phase.statistics_out && unit == 0 && threadIdx.x < ROWS && row < texts.rows)
                store_relaxed(phase.statistics_out + row * 2, marked(__float_as_uint(mean), mark),
                              marked(__float_as_uint(rstd), mark));
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
                const u32* const there = words_of(phase.residual) + row * outputs + word_at(columns[i]);
                float2 old = unpack_pair(scalar(), await_word(before[i], there, mark - phase.residual_age));
                if (phase.statistics) {
                    const u32* const pair = reinterpret_cast<const u32*>(phase.statistics + row * 2);
                    const u32 age = phase.statistics_age;
                    const float known_mean = __uint_as_float(await_word(known[0], pair, mark - age));
                    const float known_rstd = __uint_as_float(await_word(known[1], pair + 2, mark - age));
                    const float2 scale = unpack_pair(scalar(), gain[i]), add = unpack_pair(scalar(), bias[i]);
                    old.x = (old.x - known_mean) * known_rstd * scale.x + add.x;
                    old.y = (old.y - known_mean) * known_rstd * scale.y + add.y;
                }
                y.x += old.x, y.y += old.y;
            }
            const u32 pair = pack_pair(scalar(), y.x, y.y);
            if (phase.marked) store_word(words_of(phase.out) + row * outputs + word_at(columns[i]), pair, mark);
            else *reinterpret_cast<u32*>(phase.out + (long long)row * outputs + columns[i]) = pair;
        }
        first = false;
        ++turn;
    }
}
