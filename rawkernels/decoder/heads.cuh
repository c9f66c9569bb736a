#pragma once
// HEAD, SUM and WIDE of decoder_step.cu. HEAD: a block computes what a head of a group of rows needs, around its attention
// (attention.cuh): queries, and the new keys and values if the text is its own; and the share that the head has in the
// output projection. The shares of heads are added by who reads the sum: the next HEAD, or SUM.
#include "common/mma_sync.cuh"
#include "common/pack.cuh"
#include "common/pair.cuh"
#include "decoder/program.cuh"

// The block's rows in shared memory, in place of the partial sums of LINEAR.
struct Head {
    static constexpr int ROWS_BYTES = 9216, MOST = 8;           // of a group
    static constexpr int STATE = HEAD_DIM + 8;                  // of a warp's attention: see attention.cuh
    static constexpr int QUERIES = ROWS_BYTES, ATTENDED = QUERIES + MOST * 3 * HEAD_DIM * 2;
    static constexpr int STATES = ATTENDED + MOST * HEAD_DIM * 2, BYTES = STATES + WARPS * STATE * 4;
    unsigned char* base;
    __device__ explicit Head(const Shared& shared) : base(shared.base + Shared::SUMS) {
        static_assert(!HEADS || BYTES <= BUFFERS * PARTIAL * 4);
    }
    __device__ scalar* rows() const { return reinterpret_cast<scalar*>(base); }                  // (each, pitch)
    __device__ scalar* queries() const { return reinterpret_cast<scalar*>(base + QUERIES); }     // (each, 3, HEAD_DIM)
    __device__ scalar* attended() const { return reinterpret_cast<scalar*>(base + ATTENDED); }   // (each, HEAD_DIM)
    __device__ float* states() const { return reinterpret_cast<float*>(base + STATES); }         // (WARPS, STATE)
};

// Of rows of x in shared memory: two of them begin in different halves of the 32 banks.
__device__ int pitch_of(int inputs) { return inputs | DEPTH; }

// Four columns of each of N rows of norm(x) + bias + the sum of its shares, or of x alone; of rows below 0 nothing. All
// loads of N rows are on their way at once.
template <int N>
__device__ void sums_of(const Phase& phase, const int (&rows)[N], const int (&columns)[N], float4 (&all)[N]) {
    const int inputs = phase.inputs, adds = phase.added ? phase.adds : 0;
    Pack<scalar, 4> x[N], gain[N], shift[N], bias[N];
    float2 known[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        x[i] = gain[i] = shift[i] = bias[i] = {}, known[i] = {}, all[i] = {};
        if (rows[i] < 0) continue;
        x[i] = load_pack<4>(phase.x + rows[i] * inputs + columns[i]);
        if (phase.bias) bias[i] = load_pack<4>(phase.bias + columns[i]);
        if (!phase.statistics) continue;
        known[i] = *reinterpret_cast<const float2*>(phase.statistics + rows[i] * 2);
        gain[i] = load_pack<4>(phase.gain + columns[i]);
        if (phase.shift) shift[i] = load_pack<4>(phase.shift + columns[i]);
    }
#pragma unroll 1
    for (int first = 0; first < adds; first += 8) {
        float4 part[N][8];
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int h = 0; h < 8; ++h) {
                part[i][h] = make_float4(0, 0, 0, 0);
                if (rows[i] >= 0 && first + h < adds)
                    part[i][h] = *reinterpret_cast<const float4*>(
                        phase.added + (rows[i] * adds + first + h) * inputs + columns[i]);
            }
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int h = 0; h < 8; ++h) {
                const float4& y = part[i][h];
                all[i].x += y.x, all[i].y += y.y, all[i].z += y.z, all[i].w += y.w;
            }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float own[4], scale[4], add[4], more[4];
        unpack(own, x[i]), unpack(scale, gain[i]), unpack(add, shift[i]), unpack(more, bias[i]);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (phase.statistics) own[c] = (own[c] - known[i].x) * known[i].y * scale[c] + add[c];
            own[c] += more[c];
        }
        all[i].x += own[0], all[i].y += own[1], all[i].z += own[2], all[i].w += own[3];
    }
}

__device__ uint2 packed(const float4& x) {
    return make_uint2(pack_pair(scalar(), x.x, x.y), pack_pair(scalar(), x.z, x.w));
}

// SUM: each block adds for 32 times four columns.
__device__ void add_shares(const Phase& phase, const Grid& grid, const Texts& texts) {
    grid.wait();
    const int width = phase.inputs / 4, items = texts.rows * width;
    if (threadIdx.x >= 32) return;
    for (int item = first_unit(phase) * 32 + threadIdx.x; item < items; item += 32 * gridDim.x) {
        const int row[1] = {quotient(item, reciprocal(width))}, column[1] = {(item - row[0] * width) * 4};
        float4 sum[1];
        sums_of(phase, row, column, sum);
        *reinterpret_cast<uint2*>(phase.out + row[0] * phase.inputs + column[0]) = packed(sum[0]);
    }
}

// The block's rows of x from first_row on, with what is added to them: to head.rows(). `writes`: also to global memory.
__device__ void gather(const Phase& phase, const Shared& shared, int first_row, bool writes) {
    const int inputs = phase.inputs, pitch = pitch_of(inputs), width = inputs / 4, items = phase.each * width;
    scalar* rows = Head(shared).rows();
#pragma unroll 1
    for (int start = threadIdx.x; start < items; start += 2 * CONSUMERS) {
        float4 sums[2];
        int row[2], column[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int item = start + i * CONSUMERS, inside = quotient(item, reciprocal(width));
            row[i] = item < items ? first_row + inside : -1, column[i] = (item - inside * width) * 4;
        }
        sums_of(phase, row, column, sums);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row[i] < 0) break;
            const uint2 both = packed(sums[i]);
            *reinterpret_cast<uint2*>(rows + (row[i] - first_row) * pitch + column[i]) = both;
            if (phase.added && writes) *reinterpret_cast<uint2*>(phase.out + row[i] * inputs + column[i]) = both;
        }
    }
    sync_consumers();
}

// Mean and 1 / deviation of a row of x in shared memory, by a warp.
__device__ float2 statistics_of(const Phase& phase, const scalar* row) {
    const int inputs = phase.inputs;
    float sum = 0, squares = 0;
    for (int k = threadIdx.x % 32 * 8; k < inputs; k += 32 * 8) {
        float x[8];
        unpack(x, load_pack<8>(row + k));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i], squares += x[i] * x[i];
    }
#pragma unroll
    for (int other = 1; other < 32; other <<= 1) {
        sum += __shfl_xor_sync(~0u, sum, other);
        squares += __shfl_xor_sync(~0u, squares, other);
    }
    const float part = reciprocal(inputs), mean = phase.norm == LAYER_NORM ? sum * part : 0.f;
    return make_float2(mean, rsqrtf(fmaxf(squares * part - mean * mean, 0.f) + phase.eps));
}

// The product of a tile of weights in shared memory and N times 8 rows of x, of which there are `rows`; by a warp.
template <int N>
__device__ void multiply_tile(float (&y)[N][4], u32 weights, const scalar* x, int rows, int inputs) {
    constexpr int AHEAD = 4, CHAINS = N == 1 ? 4 : 2;  // sums that do not wait for each other
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pitch = pitch_of(inputs), pieces = inputs / DEPTH;
    const u32 own = (u32)__cvta_generic_to_shared(x + g * pitch + t * 8);
    float d[N][CHAINS][4] = {};
#pragma unroll 1
    for (int piece = 0; piece < pieces; piece += AHEAD)
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) {
            if (piece + p >= pieces) break;
            const u32 from = weights + (piece + p) * PIECE * 2 + lane * 16;
            const uint4 low = load_shared_uint4(from), high = load_shared_uint4(from + PIECE);
            const u32 a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int n = 0; n < N; ++n) {
                uint4 b = make_uint4(0, 0, 0, 0);
                if (n * 8 + g < rows) b = load_shared_uint4(own + (n * 8 * pitch + (piece + p) * DEPTH) * 2);
                mma(scalar(), d[n][p * 2 % CHAINS], a0, b.x, b.y);
                mma(scalar(), d[n][p * 2 % CHAINS + 1], a1, b.z, b.w);
            }
        }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y[n][i] = d[n][0][i] + d[n][1][i];
            if (CHAINS == 4) y[n][i] += d[n][CHAINS - 2][i] + d[n][CHAINS - 1][i];
        }
}

// WIDE: a product of many outputs, norm(x) W^T + bias, by tiles: a warp has the tiles of every eighth place in the block's
// range with all their inputs, so that no partial sums are added.
__device__ void multiply_tiles(const Phase& phase, const Shared& shared, const Grid& grid, PipelineState<SLOTS>& slot,
                               const Texts& texts) {
    constexpr int LOADS = 8;
    grid.wait();
    const Tiles tiles = tiles_of(phase);
    if (tiles.first >= tiles.end) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int inputs = phase.inputs, outputs = phase.outputs, norm = phase.norm, pitch = pitch_of(inputs);
    const int width = inputs / 8, items = texts.rows * width;
    scalar* rows = reinterpret_cast<scalar*>(shared.partial());  // (texts.rows, pitch)
#pragma unroll 1
    for (int start = threadIdx.x; start < items; start += LOADS * CONSUMERS) {
        uint4 x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            x[i] = make_uint4(0, 0, 0, 0);
            if (start + i * CONSUMERS < items) x[i] = load_states(phase.x + (start + i * CONSUMERS) * 8);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int item = start + i * CONSUMERS, row = quotient(item, reciprocal(width));
            if (item < items) *reinterpret_cast<uint4*>(rows + row * pitch + (item - row * width) * 8) = x[i];
        }
    }
    sync_consumers();
    float2* statistics = reinterpret_cast<float2*>(shared.rows());
    for (int row = warp; norm && row < texts.rows; row += WARPS) {
        const float2 found = statistics_of(phase, rows + row * pitch);
        if (lane == 0) statistics[row] = found;
    }
    sync_consumers();
    const int step = tiles_of_slot(inputs);
#pragma unroll 1
    for (int first = tiles.first; first < tiles.end; first += step) {
        mbar_wait(shared.full(slot.stage), slot.parity);
#pragma unroll 1
        for (int u = 0; u < step && first + u < tiles.end; ++u) {
            if ((first + u - tiles.first) % WARPS != warp) continue;
            const u32 weights = shared.ring + slot.stage * SLOT_BYTES + u * (inputs * TILE * 2 + TAIL_BYTES);
            float d[COLUMNS][4];
            multiply_tile(d, weights, rows, texts.rows, inputs);
            const u32 tail = weights + inputs * TILE * 2 + g * 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // output g or g + 8
                const float sum = load_shared_float(tail + half * 32), offset = load_shared_float(tail + TILE * 4 + half * 32);
                const int column = (first + u) * TILE + half * 8 + g;
                if (column >= outputs) continue;
#pragma unroll
                for (int i = 0; i < 2 * COLUMNS; ++i) {
                    const int row = i / 2 * 8 + 2 * t + i % 2, at = 2 * half + i % 2;
                    if (row >= texts.rows) continue;
                    const float2 known = norm ? statistics[row] : make_float2(0, 1);
                    const float y = known.y * (d[i / 2][at] - known.x * sum) + offset;
                    phase.out[(long long)row * outputs + column] = scalar(y);
                }
            }
        }
        __syncwarp();
        release(shared.empty(slot.stage));
        slot.next();
    }
}

// Queries, and keys and values, of the block's head for its rows: to head.queries().
__device__ void project(const Phase& phase, const Shared& shared, PipelineState<SLOTS>& slot, int first_row, bool writes) {
    constexpr int TILES = HEAD_DIM / TILE;
    const Head head(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int inputs = phase.inputs, each = phase.each, norm = phase.norm, pitch = pitch_of(inputs);
    const scalar* rows = head.rows();
    float2* statistics = reinterpret_cast<float2*>(shared.rows());  // mean and 1 / deviation of the block's rows
    if (norm && warp < each) {
        const float2 found = statistics_of(phase, rows + warp * pitch);
        if (lane == 0) {
            statistics[warp] = found;
            if (phase.statistics_out && writes)
                *reinterpret_cast<float2*>(phase.statistics_out + (first_row + warp) * 2) = found;
        }
    }
    sync_consumers();
    float2 known[2];  // of the rows 2t, 2t + 1
#pragma unroll
    for (int i = 0; i < 2; ++i) known[i] = norm && 2 * t + i < each ? statistics[2 * t + i] : make_float2(0, 1);
    const int tiles = (phase.slots ? 3 : 1) * TILES, step = tiles_of_slot(inputs);
#pragma unroll 1
    for (int first = 0; first < tiles; first += step) {
        mbar_wait(shared.full(slot.stage), slot.parity);
#pragma unroll 1
        for (int u = 0; u < step; ++u) {  // a warp multiplies every eighth tile
            if ((first + u) % WARPS != warp) continue;
            const u32 weights = shared.ring + slot.stage * SLOT_BYTES + u * (inputs * TILE * 2 + TAIL_BYTES);
            float d[1][4];
            multiply_tile(d, weights, rows, each, inputs);
            const u32 tail = weights + inputs * TILE * 2 + g * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // output g or g + 8 of row 2t or 2t + 1
                const int row = 2 * t + i % 2;
                const float sum = load_shared_float(tail + i / 2 * 32), offset = load_shared_float(tail + TILE * 4 + i / 2 * 32);
                const float y = known[i % 2].y * (d[0][i] - known[i % 2].x * sum) + offset;
                if (row < each)
                    head.queries()[row * 3 * HEAD_DIM + (first + u) * TILE + i / 2 * 8 + g] = scalar(y);
            }
        }
        __syncwarp();
        release(shared.empty(slot.stage));
        slot.next();
    }
    sync_consumers();
}

// The head's share of the output projection for `each` rows: its columns of the weights times head.attended(). The rows are
// operand a here, so that a lane has two outputs side by side.
__device__ void project_out(const Phase& phase, const Shared& shared, PipelineState<SLOTS>& slot, int first_row, int index) {
    constexpr int PARTS = HEAD_DIM / DEPTH, MOST = STAGE_BYTES / (HEAD_DIM * TILE * 2);
    const Head head(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, each = phase.each;
    sync_consumers();
    uint4 x[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        x[p] = make_uint4(0, 0, 0, 0);
        if (g < each) x[p] = load_states(head.attended() + g * HEAD_DIM + p * DEPTH + t * 8);
    }
    const int outputs = phase.outputs, tiles = ceil_div(outputs, TILE);
    float* out = phase.parts + ((long long)(first_row + g) * phase.heads + index) * outputs + 2 * t;
#pragma unroll 1
    for (int first = 0; first < tiles; first += MOST) {
        mbar_wait(shared.full(slot.stage), slot.parity);
#pragma unroll 2
        for (int u = warp; u < MOST; u += WARPS) {
            if (first + u >= tiles) break;
            float low[4] = {}, high[4] = {};  // of outputs 0 to 7 and 8 to 15
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const u32 from = shared.ring + slot.stage * SLOT_BYTES + (u * PARTS + p) * PIECE * 2 + lane * 16;
                const uint4 a = load_shared_uint4(from), b = load_shared_uint4(from + PIECE);
                const u32 x0[4] = {x[p].x, 0, x[p].y, 0}, x1[4] = {x[p].z, 0, x[p].w, 0};
                mma(scalar(), low, x0, a.x, a.y);
                mma(scalar(), high, x0, b.x, b.y);
                mma(scalar(), low, x1, a.z, a.w);
                mma(scalar(), high, x1, b.z, b.w);
            }
            if (g >= each) continue;
            *reinterpret_cast<float2*>(out + (first + u) * TILE) = make_float2(low[0], low[1]);
            *reinterpret_cast<float2*>(out + (first + u) * TILE + 8) = make_float2(high[0], high[1]);
        }
        __syncwarp();
        release(shared.empty(slot.stage));
        slot.next();
    }
}
