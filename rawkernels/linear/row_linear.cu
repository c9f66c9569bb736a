// out = residual + activation(norm(x) W^T + bias) for the few rows of a decoding step, on Hopper. What a norm needs of the
// result is computed with it, so that norms take no launches of their own.
// Constants: scalar = f16, bf16; OUTPUTS = 64; SPLITS = 1, 4, 8; STAGES = 4; SHARE = 1; DIRECT = false
// Constants: scalar = bf16; OUTPUTS = 32, 128; SPLITS = 1; STAGES = 4; SHARE = 1; DIRECT = false
// Constants: scalar = bf16; OUTPUTS = 128; SPLITS = 1; STAGES = 4; SHARE = 2; DIRECT = false, true
// Constants: scalar = f16, bf16; OUTPUTS = 64, 128; SPLITS = 1; STAGES = 4; SHARE = 1; DIRECT = true
// Launch:    grid = (CLUSTER * outputs / OUTPUTS, ceil(rows / (ROWS * SHARE))), block = (320,), shared = SHARED bytes
//            dependent: row_linear
// Arch: sm_90a
//
// A block multiplies 64 rows with OUTPUTS outputs over a part of the depth; SPLITS blocks, a cluster, have all of it. Each
// sends its sums to the blocks that finish those rows. Weights do not change while texts are decoded, so their first stages
// are loaded before the wait for the kernel before, beside whose blocks this one's may run: what wrote weights is over, as
// row_embedding or an attention is among the kernels before, and has itself waited when it lets the next one start.
//
// With up to EAGER rows the next kernel may start as soon as all blocks of this one have, not after its wait: it has more
// time to load weights, keys and values. With more rows its blocks would take room from kernels that still compute.
//
// With SHARE > 1 a cluster has the same outputs for SHARE times 64 rows, of which the last blocks may have none: each block
// loads its part of a stage's weights into all of them. A stage is loaded again once all blocks have freed it.
//
// DIRECT: a thread finishes the results of its own sums; there is no residual. Else sums go through shared memory. The branch
// of the activation is around all results of a thread, so that they are computed beside each other.
//
// A norm is applied behind the product: with W' = gain W, norm(x) W^T = rstd (x W'^T - mean sum(W')) + shift W^T, see
// fold_norm.cu. The mean of a row and its squared distances from that come in parts, one for each tile of the launch that
// wrote x, and are stored likewise for what is written here.
#include "common/cluster.cuh"
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gelu.cuh"
#include "linear/row_parts.cuh"

constexpr int ROWS = 64, EAGER = 128;                         // ROWS: of a block
constexpr int CONSUMERS = 256, THREADS = 320, LOADER = 8;     // a warp that loads, then one for statistics of rows
constexpr bool HALVES = OUTPUTS == 32;                        // the two warpgroups have halves of a stage's depth, else of columns
constexpr int OWN = HALVES ? OUTPUTS : OUTPUTS / 2;           // columns of a warpgroup
constexpr int SLOTS = HALVES ? 2 * SPLITS : SPLITS;           // sums that are added up
constexpr int OWN_ROWS = ROWS / SPLITS;                       // rows that a block finishes
constexpr int CHUNKS = OUTPUTS / 8;                           // of eight columns
constexpr int UNIT = 8 * 8 * 4 + 16;                          // bytes of 8 x 8 sums; eight chunks of a row in different banks
constexpr int SLOT = OWN_ROWS / 8 * CHUNKS * UNIT, SUMS = SLOTS * SLOT;
constexpr int X_BYTES = ROWS * 128, STAGE = X_BYTES + OUTPUTS * 128;
constexpr int VECTORS = 1024 + STAGES * STAGE, KNOWN = VECTORS + 16 * OUTPUTS, END = KNOWN + 8 * OWN_ROWS;
constexpr int PLACE_OF_SUMS = SPLITS == 1 ? 1024 : END;  // no other block writes: they overwrite the stages
constexpr int PITCH = 2 * OWN + 16;                      // bytes of a warpgroup's rounded row: eight in different banks
constexpr int CLUSTER = SPLITS * SHARE;                  // blocks
constexpr int PART = OUTPUTS / SHARE;                    // weights' rows that a block loads
constexpr int SHARED = 1024 + END + (SPLITS == 1 ? 0 : SUMS);
constexpr int RESIDENT = 2 * (SHARED + 1024) <= 233472 ? 2 : 1;  // blocks of a multiprocessor
constexpr int PASSES = (OWN_ROWS * CHUNKS + CONSUMERS - 1) / CONSUMERS;
static_assert(SPLITS > 1 || SUMS <= STAGES * STAGE, "row_linear.cu: the sums have the place of the stages");
static_assert(!DIRECT || (SPLITS == 1 && !HALVES), "row_linear.cu: the sums of a thread are whole");
static_assert(SPLITS == 1 || SHARE == 1, "row_linear.cu: a cluster shares weights or the depth");
static_assert(STAGES <= 16, "row_linear.cu: at most 16 stages");
enum { FULL = 0, EMPTY = 128, RECEIVED = 256 };  // mbarriers
enum { MULTIPLIED = 1, READY = 2 };              // named barriers
enum { NONE, RELU, GELU };                       // activations

// The mean of a row and 1 / its standard deviation, from those of `parts` equal parts.
__device__ __forceinline__ float2 joined(const float2* parts_of_row, int parts, int width, float eps) {
    RowParts row = {parts_of_row[0].x};
#pragma unroll 4
    for (int i = 0; i < parts; ++i) row.add(parts_of_row[i]);
    return row.joined(parts, width, eps);
}

__device__ __forceinline__ float activated(float x, int activation) {
    if (activation == RELU) return max_nan(x, 0.f);
    if (activation == GELU) return x * reciprocal(1.f + exp2_fast(x * (EXPONENT + EXPONENT * TANH_CUBIC * x * x)));
    return x;
}

// One branch for all: with a branch for each, each result waits for the one before.
template <int N> __device__ __forceinline__ void activate(float (&y)[N], int activation) {
    if (activation == RELU)
#pragma unroll
        for (int n = 0; n < N; ++n) y[n] = activated(y[n], RELU);
    if (activation == GELU)
#pragma unroll
        for (int n = 0; n < N; ++n) y[n] = activated(y[n], GELU);
}

// One arrival per warp at each block that loads into the stage.
__device__ __forceinline__ void release_all(u32 bar) {
    if (threadIdx.x % 32 < SHARE) mbar_arrive_at(bar, threadIdx.x % 32);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) __cluster_dims__(CLUSTER, 1, 1) row_linear(
    const __grid_constant__ TensorMap x_map,       // (rows, inputs); boxes of ROWS rows
    const __grid_constant__ TensorMap weight_map,  // (outputs, inputs); boxes of PART rows
    const scalar* bias,                            // (outputs,) or null
    const float2* folded,                          // (outputs,): bias and sum of a row of weights, of a norm of x, or null
    const float2* statistics,                      // (rows, parts): of x, or of the residual where that has a norm, or null
    const scalar* residual,                        // (rows, outputs) or null
    const scalar* gain,                            // (outputs,) of the residual's norm, or null
    const scalar* shift,                           // (outputs,) of the residual's norm, or null
    scalar* out,                                   // (rows, outputs)
    float2* statistics_out,                        // (rows, outputs / OUTPUTS) or null
    int rows,
    int outputs,
    int depth,                                     // inputs / SPLITS
    int parts,
    int width,                                     // columns that have statistics
    int activation,
    float eps) {
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    const int group = warpgroup(), warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int member = CLUSTER > 1 ? cluster_rank() : 0, tile = blockIdx.x / CLUSTER;
    const int rank = SHARE > 1 ? 0 : member;  // which part of the depth, and of the rows that are finished
    const int column = tile * OUTPUTS, first = (SHARE > 1 ? blockIdx.y * SHARE + member : blockIdx.y) * ROWS;
    const int steps = depth / 64, first_k = rank * depth;
    const auto place = [&](int stage) { return shared + 1024 + stage * STAGE; };  // of x, then the weights
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(shared + FULL + 8 * i, 1);
            mbar_init(shared + EMPTY + 8 * i, SHARE * CONSUMERS / 32);
        }
        if (SPLITS > 1) {
            mbar_init(shared + RECEIVED, 1);
            mbar_expect(shared + RECEIVED, SLOTS * OWN_ROWS * OUTPUTS * 4);
        }
        mbar_init_done();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();

    if (warp >= LOADER) {
        if (SHARE > 1) cluster_wait();  // for the barriers of all blocks
        if (warp > LOADER) {
            grid_dependency_wait();
            if (statistics)
                for (int row = lane; row < OWN_ROWS; row += 32) {
                    const int at = min(first + rank * OWN_ROWS + row, rows - 1);
                    const float2 known = joined(statistics + (long long)at * parts, parts, width, eps);
                    store_shared(shared + KNOWN + 8 * row, __float_as_uint(known.x));
                    store_shared(shared + KNOWN + 8 * row + 4, __float_as_uint(known.y));
                }
            bar_arrive(READY, CONSUMERS + 32);
        } else if (lane == 0) {
            prefetch(x_map);
            const auto load = [&](int step, bool x, bool weights) {
                const u32 to = place(step % STAGES), full = shared + FULL + 8 * (step % STAGES);
                if (weights) {
                    mbar_expect(full, STAGE);
                    if (SHARE > 1)
                        tma_load_multicast(to + X_BYTES + member * PART * 128, weight_map, full, 64 * step, column + member * PART,
                                           0, 0, (1 << SHARE) - 1);
                    else tma_load(to + X_BYTES, weight_map, full, first_k + 64 * step, column, 0, 0);
                }
                if (x) tma_load(to, x_map, full, first_k + 64 * step, first, 0, 0);
            };
            const int ahead = min(STAGES, steps);
            if (rows <= EAGER) grid_launch_dependents();
            for (int step = 0; step < ahead; ++step) load(step, false, true);
            grid_dependency_wait();
            if (rows > EAGER) grid_launch_dependents();
            for (int step = 0; step < ahead; ++step) load(step, true, false);
            for (int step = STAGES; step < steps; ++step) {
                mbar_wait(shared + EMPTY + 8 * (step % STAGES), (step / STAGES - 1) & 1);
                load(step, true, true);
            }
            if (SHARE > 1)  // then all blocks have what this one loaded, and arrive here no more: it may end
                for (int step = steps - ahead; step < steps; ++step)
                    mbar_wait(shared + EMPTY + 8 * (step % STAGES), step / STAGES & 1);
        }
        __syncwarp();
        if (SPLITS > 1) cluster_wait();
        return;
    }

    // ---- consumers: what a column's result is made with; then the product
    if (threadIdx.x < OUTPUTS) {
        const int n = threadIdx.x, at = column + n;
        const float2 own = folded ? folded[at] : float2{bias ? (float)bias[at] : 0.f, 0.f};
        if (DIRECT) store_shared(shared + VECTORS + n * 8, own);
        else
            store_shared(shared + VECTORS + (n % 8 * CHUNKS + n / 8) * 16, own.x, own.y, gain ? (float)gain[at] : 1.f,
                         shift ? (float)shift[at] : 0.f);
    }
    if (SHARE > 1) cluster_wait();
    grid_dependency_wait();
    uint4 of_residual[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int row = (i * CONSUMERS + threadIdx.x) / CHUNKS, at = first + rank * OWN_ROWS + row;
        of_residual[i] = uint4{0, 0, 0, 0};
        if (!DIRECT && residual && row < OWN_ROWS && at < rows)
            of_residual[i] = load_16_bytes(residual + (long long)at * outputs + column + threadIdx.x % CHUNKS * 8);
    }
    float c[OWN / 2];
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) c[i] = 0.f;
    keep_live(c);
    const u32 own_x = HALVES ? group * 64 : 0;
    const u32 own_weights = X_BYTES + (HALVES ? group * 64 : group * OWN * 128);
    u32 stage = 0, parity = 0, before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        mbar_wait(shared + FULL + 8 * stage, parity);
        wgmma_fence();
        product<K_MAJOR, K_MAJOR, ROWS, OUTPUTS, HALVES ? 32 : 64>(c, place(stage) + own_x, place(stage) + own_weights, true);
        wgmma_commit();
        wgmma_wait<1>();
        if (step) SHARE == 1 ? release(shared + EMPTY + 8 * before) : release_all(shared + EMPTY + 8 * before);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    keep_live(c);
    if (SHARE > 1) release_all(shared + EMPTY + 8 * before);

    if (DIRECT) {  // ---- results of the sums that a thread has, by way of the stages: each warp its rows
        bar_sync(READY, CONSUMERS + 32);
        const int own_row = warp % 4 * 16, quad = lane % 4;
        const u32 rounded = shared + 1024 + warp * 16 * PITCH;
        float2 of_x[2] = {{0.f, 1.f}, {0.f, 1.f}};
        if (folded && statistics)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                of_x[half] = load_shared_float2(shared + KNOWN + 8 * (own_row + lane / 4 + 8 * half));
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j) {
            const uint4 two = load_shared_uint4(shared + VECTORS + (group * OWN + 8 * j + 2 * quad) * 8);
            const float bias_of[2] = {__uint_as_float(two.x), __uint_as_float(two.z)};
            const float sum_of[2] = {__uint_as_float(two.y), __uint_as_float(two.w)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 known = of_x[i / 2];
                c[4 * j + i] = fmaf(fmaf(-known.x, sum_of[i % 2], c[4 * j + i]), known.y, bias_of[i % 2]);
            }
        }
        activate(c, activation);
        u32 pairs[OWN / 16][4];
        pack(pairs, c);
#pragma unroll
        for (int k = 0; k < OWN / 16; ++k) stmatrix(rounded + lane % 16 * PITCH + (2 * k + lane / 16) * 16, pairs[k]);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < OWN / 16; ++i) {
            const int row = (32 * i + lane) / (OWN / 8), chunk = (32 * i + lane) % (OWN / 8), at = first + own_row + row;
            const uint4 x = load_shared_uint4(rounded + row * PITCH + chunk * 16);
            if (at < rows)
                store_16_bytes(out + (long long)at * outputs + column + group * OWN + 8 * chunk, x.x, x.y, x.z, x.w);
        }
        return;
    }

    // ---- sums to the blocks that finish their rows
    if (SPLITS > 1) cluster_wait();
    else bar_sync(MULTIPLIED, CONSUMERS);
    const u32 slot = shared + PLACE_OF_SUMS + (HALVES ? 2 * rank + group : rank) * SLOT;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int eight = 2 * (warp % 4) + half;  // which of the block's groups of eight rows
        const int to = eight / (OWN_ROWS / 8), chunk = HALVES ? 0 : group * (OWN / 8);
        const u32 here = slot + (eight % (OWN_ROWS / 8) * CHUNKS + chunk) * UNIT + lane * 8;
        const u32 there = SPLITS > 1 ? address_in(here, to) : here;
        const u32 received = SPLITS > 1 ? address_in(shared + RECEIVED, to) : 0;
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j) {
            const float2 pair = {c[4 * j + 2 * half], c[4 * j + 2 * half + 1]};
            if (SPLITS > 1) send_shared(there + j * UNIT, pair, received);
            else store_shared(there + j * UNIT, pair);
        }
    }
    bar_sync(READY, CONSUMERS + 32);
    if (SPLITS > 1) mbar_wait(shared + RECEIVED, 0);

    // ---- results: a thread has eight columns of a row
    if (threadIdx.x >= OWN_ROWS * CHUNKS) return;  // whole warps
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS, top = first + rank * OWN_ROWS + row;
    constexpr int DOWN = CONSUMERS / CHUNKS;  // rows from pass to pass
    const u32 sums = shared + PLACE_OF_SUMS + chunk * UNIT, vectors = shared + VECTORS + chunk * 16;
    const auto known = [&](int i, bool of_it) {
        return of_it && statistics ? load_shared_float2(shared + KNOWN + 8 * (row + i * DOWN)) : float2{0.f, 1.f};
    };
    float y[PASSES][8] = {};
    float2 of_x[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int at = row + i * DOWN;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
#pragma unroll
            for (int n = 0; n < 8; n += 4) {
                const uint4 x = load_shared_uint4(sums + s * SLOT + at / 8 * CHUNKS * UNIT + at % 8 * 32 + 4 * n);
                y[i][n] += __uint_as_float(x.x), y[i][n + 1] += __uint_as_float(x.y);
                y[i][n + 2] += __uint_as_float(x.z), y[i][n + 3] += __uint_as_float(x.w);
            }
        of_x[i] = known(i, folded);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 own = load_shared_float2(vectors + n * CHUNKS * 16);  // bias, sum
#pragma unroll
        for (int i = 0; i < PASSES; ++i) y[i][n] = fmaf(fmaf(-of_x[i].x, own.y, y[i][n]), of_x[i].y, own.x);
    }
    activate((float(&)[PASSES * 8])y, activation);
    if (residual) {
        float2 of_other[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; ++i) of_other[i] = known(i, !folded);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float2 own = load_shared_float2(vectors + n * CHUNKS * 16 + 8);  // gain, shift
#pragma unroll
            for (int i = 0; i < PASSES; ++i) {
                const u32 pairs[4] = {of_residual[i].x, of_residual[i].y, of_residual[i].z, of_residual[i].w};
                const float2 both = unpack_pair(scalar(), pairs[n / 2]);
                y[i][n] += fmaf(((n % 2 ? both.y : both.x) - of_other[i].x) * of_other[i].y, own.x, own.y);
            }
        }
    }
    uint4 rounded[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int at = top + i * DOWN;
        rounded[i] = {pack_pair(scalar(), y[i][0], y[i][1]), pack_pair(scalar(), y[i][2], y[i][3]),
                      pack_pair(scalar(), y[i][4], y[i][5]), pack_pair(scalar(), y[i][6], y[i][7])};
        if (at < rows)
            store_16_bytes(out + (long long)at * outputs + column + 8 * chunk, rounded[i].x, rounded[i].y, rounded[i].z,
                           rounded[i].w);
    }
    if (!statistics_out) return;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int at = top + i * DOWN;
        const u32 pairs[4] = {rounded[i].x, rounded[i].y, rounded[i].z, rounded[i].w};
        float sum = 0.f, square = 0.f;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const float2 both = unpack_pair(scalar(), pairs[n / 2]);
            y[i][n] = both.x, y[i][n + 1] = both.y;
            sum += both.x + both.y;
        }
#pragma unroll
        for (int other = 1; other < CHUNKS; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        const float mean = sum * (1.f / OUTPUTS);
#pragma unroll
        for (int n = 0; n < 8; ++n) square = fmaf(y[i][n] - mean, y[i][n] - mean, square);
#pragma unroll
        for (int other = 1; other < CHUNKS; other *= 2) square += __shfl_xor_sync(~0u, square, other);
        if (chunk == 0 && at < rows)
            statistics_out[(long long)at * (outputs / OUTPUTS) + tile] = float2{mean, square};
    }
}
