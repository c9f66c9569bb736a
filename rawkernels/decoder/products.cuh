#pragma once
// Matmuls of decoder_step.cu, with the norm before them, and bias, activation and residual sum behind them. The weights are
// operand a (16 outputs), the texts operand b (8 rows).
#include "common/mma_sync.cuh"
#include "common/pair.cuh"
#include "decoder/activation.cuh"
#include "decoder/program.cuh"

// Of the parts of all warps, in pairs.
__device__ float sum_of(const float (&x)[WARPS]) {
    static_assert(WARPS == 8);
    return (x[0] + x[1] + (x[2] + x[3])) + (x[4] + x[5] + (x[6] + x[7]));
}

// out = activation(W x + bias) + residual for the units of this block: TILE outputs of ROWS rows, up to UNITS units at a
// time. Of each stage a warp multiplies every eighth piece; the partial sums of the warps are added in shared memory. The
// number of blocks is a multiple of the groups of rows, so that all units of a block are of the same rows.
__device__ void multiply(const Phase& phase, const Shared& shared, const Grid& grid, PipelineState<SLOTS>& slot,
                         const Texts& texts, int thread) {
    constexpr int PAIRS = ROWS * TILE / 2, ITEMS = UNITS * PAIRS / CONSUMERS;  // pairs: two outputs of a row; of a thread
    constexpr int CHAINS = COLUMNS == 1 ? 2 : 1;                              // of products that wait for one another
    static_assert(UNITS * PAIRS % CONSUMERS == 0);
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int shift = texts.shift, split = split_of(phase), share = g & ((1 << split) - 1);
    const int inputs = phase.inputs, outputs = phase.outputs, stages = ceil_div(inputs, DEPTH * WARPS * PIECES);
    const int units = ceil_div(outputs, TILE) << shift, norm = phase.norm;
    int unit = first_unit(phase);
    if (unit >= units) return grid.wait();
    const int first_row = (unit & ((1 << shift) - 1)) * ROWS, row = first_row + thread % ROWS;  // row: of its pairs
    const int pieces = (inputs / DEPTH + WARPS - 1 - warp) / WARPS;  // of this warp in a unit
    // Of up to 8 rows, columns past the last row repeat it: they take no loads of their own.
    const int column = COLUMNS == 1 ? min(first_row + g, (texts.rows << split) - 1) : first_row + g;
    const scalar* x = phase.x + grid.own + column * inputs + warp * DEPTH + t * 8;
    uint4 states[STATES][PIECES][COLUMNS];  // operands b of some stages
    // Nothing may depend on whether a piece is there, or loads of one stage wait for those of another: past the end of a row
    // is the next one, or the room behind the last one (decoder_step.py), which are not used.
    const auto load = [&](uint4 (&b)[PIECES][COLUMNS], int stage) {
        const scalar* from = x + stage * PIECES * WARPS * DEPTH;
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) b[p][c] = load_handed(from + c * 8 * inputs + p * WARPS * DEPTH);
    };
    // POLLED: loads a stage again until all of it is there.
    const auto await = [&](uint4 (&b)[PIECES][COLUMNS], int stage) {
        const auto missing = [&] {
            bool some = false;
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (stage * PIECES + p < pieces) some |= lacks(b[p][0]);
            return __any_sync(~0u, some);
        };
        if (!missing()) return;
        const long long begin = clock64();
        do {
            load(b, stage);
            fault_after_seconds(begin);
        } while (missing());
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
        // what the end needs
        u32 before[ITEMS], gain[ITEMS], bias[ITEMS];
        float2 known = {}, sums[ITEMS], offsets[ITEMS];
        int columns[ITEMS];  // of the pair in the output; -1: none
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = thread + i * CONSUMERS, of = unit + item / PAIRS * gridDim.x;
            columns[i] = (of >> shift) * TILE + item % PAIRS / ROWS * 2;
            if (of >= units || columns[i] >= outputs || row >= texts.rows) columns[i] = -1;
            before[i] = gain[i] = bias[i] = 0;
            if (columns[i] < 0) continue;
            const int at = row * outputs + columns[i];
            if (POLLED && !grid.last) clear_word(phase.out + grid.other + at);
            if (!phase.residual) continue;
            const u32* old = reinterpret_cast<const u32*>(phase.residual + grid.own + at);
            before[i] = POLLED ? load_relaxed(old) : *old;
            if (phase.statistics) {
                gain[i] = *reinterpret_cast<const u32*>(phase.gain + columns[i]);
                if (phase.shift) bias[i] = *reinterpret_cast<const u32*>(phase.shift + columns[i]);
            }
        }
        if (first) grid.wait();
#pragma unroll 1
        for (int u = 0; u < UNITS && unit + u * gridDim.x < units; ++u) {
            const bool start = first && u == 0, squares = start && norm;
            if (start && split) {  // then there are two stages at most
                float2 of_first[ROWS], of_second[ROWS];
                load(states[0], 0);
                load(states[1], 1);
                load_shares(of_first, 0);
                load_shares(of_second, 1);
                scale_shares(states[0], of_first);
                scale_shares(states[1], of_second);
            } else if (start || stages > STATES) {
#pragma unroll
                for (int i = 0; i < STATES; ++i)
                    if (i < stages) load(states[i], i);
            }
            float d[CHAINS][COLUMNS][4] = {}, sums_of[CHAINS][COLUMNS][4] = {};
            const auto accumulate = [&](uint4 (&b)[PIECES][COLUMNS], int stage) {
                if (POLLED && (start || stages > STATES)) await(b, stage);
                const int there = pieces - stage * PIECES;
                const u32 from = shared.ring + slot.stage * SLOT_BYTES;
                uint4 a[PIECES][2];
                const auto product = [&](int p) {
                    const u32 low[4] = {a[p][0].x, a[p][0].y, a[p][0].z, a[p][0].w};
                    const u32 high[4] = {a[p][1].x, a[p][1].y, a[p][1].z, a[p][1].w};
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        mma(scalar(), d[0][c], low, b[p][c].x, b[p][c].y);
                        mma(scalar(), d[CHAINS - 1][c], high, b[p][c].z, b[p][c].w);
                    }
                };
                const auto square = [&](int p) {  // operand a: the 8 rows themselves, then ones
                    const u32 one = pack_pair(scalar(), 1.f, 1.f);
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        const u32 low[4] = {b[p][c].x, one, b[p][c].y, one}, high[4] = {b[p][c].z, one, b[p][c].w, one};
                        mma(scalar(), sums_of[0][c], low, b[p][c].x, b[p][c].y);
                        mma(scalar(), sums_of[CHAINS - 1][c], high, b[p][c].z, b[p][c].w);
                    }
                };
                mbar_wait(shared.full(slot.stage), slot.parity);
                u32 loaded = 0;
                if (stage == stages - 1) {
                    const u32 tail = from + inputs * TILE * 2 - (stages - 1) * STAGE_BYTES;
#pragma unroll
                    for (int i = 0; i < ITEMS; ++i) {
                        const int item = thread + i * CONSUMERS;
                        if (item / PAIRS != u) continue;
                        sums[i] = load_shared_float2(tail + item % PAIRS / ROWS * 8);
                        offsets[i] = load_shared_float2(tail + TILE * 4 + item % PAIRS / ROWS * 8);
                        loaded |= bits(sums[i]) | bits(offsets[i]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2 * PIECES; ++i)  // past the end of a unit something else, which is not used
                    a[i / 2][i % 2] = load_shared_uint4(
                        from + (i / 2 * WARPS + warp) * PIECE * 2 + i % 2 * PIECE + lane * 16);
                // all pieces, all but one, or fewer; with the squares of rows between products, as each waits for the one before it
                if (there >= PIECES - 1 && !squares) {
#pragma unroll
                    for (int p = 0; p < PIECES - 1; ++p) product(p);
                    if (there >= PIECES) product(PIECES - 1);
                } else if (there >= PIECES) {
#pragma unroll
                    for (int p = 0; p < PIECES; ++p) product(p), square(p);
                } else {
#pragma unroll
                    for (int p = 0; p < PIECES - 1; ++p) {
                        if (p >= there) break;
                        product(p);
                        if (squares) square(p);
                    }
                }
                __syncwarp();
                release(freed(shared.empty(slot.stage), loaded, texts.zero()));
                slot.next();
            };
#pragma unroll 1
            for (int stage = 0; stage < stages; stage += STATES) {
#pragma unroll
                for (int i = 0; i < STATES; ++i) {
                    if (stage + i >= stages) break;
                    accumulate(states[i], stage + i);
                    if (stage + i + STATES < stages) load(states[i], stage + i + STATES);
                }
            }
            if (CHAINS == 2) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    d[0][0][i] += d[CHAINS - 1][0][i];
                    sums_of[0][0][i] += sums_of[CHAINS - 1][0][i];
                }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                float* own = partial + u * PARTIAL + (warp * TILE + g) * PITCH + c * 8 + 2 * t;
                if (split) {  // the sums of a row's shares; the columns of other rows may hold anything
                    float low = d[0][c][0] + d[0][c][1], high = d[0][c][2] + d[0][c][3];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float2 other = {__shfl_xor_sync(~0u, low, 1 << i), __shfl_xor_sync(~0u, high, 1 << i)};
                        if (i + 1 < split) low += other.x, high += other.y;
                    }
                    own += (2 * t >> split) - 2 * t;
                    if (!(2 * t & ((1 << split) - 1))) own[0] = low, own[8 * PITCH] = high;
                } else {
                    *reinterpret_cast<float2*>(own) = make_float2(d[0][c][0], d[0][c][1]);
                    *reinterpret_cast<float2*>(own + 8 * PITCH) = make_float2(d[0][c][2], d[0][c][3]);
                }
                if (squares) {  // the squares of row g are on the diagonal, sums below it
                    float* to = shared.rows() + (warp * ROWS + c * 8) * 2;
                    if (g == 0) to[4 * t] = sums_of[0][c][2], to[4 * t + 2] = sums_of[0][c][3];
                    if (t == g / 2) to[2 * g + 1] = g % 2 ? sums_of[0][c][1] : sums_of[0][c][0];
                }
            }
        }
        if (phase.statistics) known = *reinterpret_cast<const float2*>(phase.statistics + row * 2);
        sync_consumers();
        float mean = 0, rstd = 1;
        if (norm) {
            const float each = reciprocal(inputs);
            float total[WARPS], squared[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 part = *reinterpret_cast<const float2*>(shared.rows() + (w * ROWS + thread % ROWS) * 2);
                total[w] = part.x, squared[w] = part.y;
            }
            if (norm == LAYER_NORM) mean = sum_of(total) * each;
            rstd = rsqrtf(fmaxf(sum_of(squared) * each - mean * mean, 0.f) + phase.eps);
            if (first && phase.statistics_out && unit >> shift == 0 && thread < ROWS)
                *reinterpret_cast<float2*>(phase.statistics_out + row * 2) = make_float2(mean, rstd);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = thread + i * CONSUMERS;
            if (columns[i] < 0) continue;
            const float* from = partial + item / PAIRS * PARTIAL + item % PAIRS / ROWS * 2 * PITCH + item % ROWS;
            float parts[2][WARPS];
#pragma unroll
            for (int w = 0; w < 2 * WARPS; ++w) parts[w % 2][w / 2] = from[w / 2 * TILE * PITCH + w % 2 * PITCH];
            float2 y = {sum_of(parts[0]), sum_of(parts[1])};
            if (norm) y.x = rstd * (y.x - mean * sums[i].x), y.y = rstd * (y.y - mean * sums[i].y);
            y.x = activated(y.x + offsets[i].x, phase.activation), y.y = activated(y.y + offsets[i].y, phase.activation);
            if (phase.residual) {
                if (POLLED) before[i] = await_word(before[i], phase.residual + grid.own + row * outputs + columns[i]);
                float2 old = unpack_pair(scalar(), before[i]);
                if (phase.statistics) {
                    const float2 scale = unpack_pair(scalar(), gain[i]), add = unpack_pair(scalar(), bias[i]);
                    old.x = (old.x - known.x) * known.y * scale.x + add.x;
                    old.y = (old.y - known.x) * known.y * scale.y + add.y;
                }
                y.x += old.x, y.y += old.y;
            }
            scalar* out = phase.out + (long long)row * outputs + columns[i];
            const u32 pair = pack_pair(scalar(), y.x, y.y);
            if (POLLED && !grid.last) hand_on(out + grid.own, pair);
            else *reinterpret_cast<u32*>(out) = pair;
        }
        first = false;
        if (BUFFERS > UNITS) partial = partial == shared.partial() ? shared.partial() + UNITS * PARTIAL : shared.partial();
        else if (unit + UNITS * gridDim.x < units) sync_consumers();  // before the partial sums are overwritten
    }
}
