// Gradients of many weights in one launch, for Hopper: each gradient (rows x columns) = a^T b, or += a^T b; and of their
// biases: the sums of a over its rows.
// Constants: scalar = f16, bf16; WIDE = false, true (gradients in float32, else of the same type); TEAM = 6;
//            COLUMNS = 384, 256
// Launch:    grid = (a multiple of 2 TEAM, all blocks at once,), clusters of 2, block = (384,), shared = SHARED bytes
//            dependent: weight_gradients
// Arch: sm_90a
//
// A tile is 128 x COLUMNS elements of a gradient, 64 rows for each of two consumer warpgroups; the producer warpgroup loads
// stages of 64 rows of a and b. The two blocks of a cluster, a pair, have vertically adjacent tiles: each loads half of b and
// multicasts it to both. A team is six pairs, such as for a whole gradient of 1536 x 384, that advance through K together, so
// that all but one pair find b in L2. The groups of tiles that a team computes at a time are divided evenly among the teams,
// counted in steps of K (stream-K: Osama et al., 2023): a team starts in the middle of one group and ends in the middle of
// another. It stores its partial sums of the first group to the workspace. The team that has the start of this group
// processes it last, and adds them.
//
// The sums of a are its product with a column of ones, computed with the tiles of the first column: eight equal columns, as
// wgmma has no fewer.
#include "common/cluster.cuh"
#include "common/compiler.cuh"
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int ROWS = 128;                                   // of a tile
constexpr int DEPTH = 64, STAGES = COLUMNS == 384 ? 3 : 4;  // K of a stage; stages
constexpr int PARTS = 2, PART = COLUMNS / PARTS;            // wgmma is at most 256 columns wide
constexpr int SLAB = 64 * 128, A_SLABS = ROWS / 64, B_SLABS = COLUMNS / 64;  // bytes of 64 x 64 numbers
constexpr int A_BYTES = A_SLABS * SLAB, STAGE_BYTES = A_BYTES + B_SLABS * SLAB;
constexpr int THREADS = 256;                  // of the consumers
constexpr int QUADS = PART / 8;               // groups of four sums of a thread in a part
constexpr int ALL_QUADS = ROWS * COLUMNS / 4; // groups of four sums in a tile
constexpr int PIECES = COLUMNS == 384 ? 3 : 4, QUADS_OF_PIECE = PARTS * QUADS / PIECES;  // of sums, as large as a stage holds
constexpr int PIECE_BYTES = ALL_QUADS * 16 / PIECES;
static_assert(PIECE_BYTES <= STAGE_BYTES && PIECES * QUADS_OF_PIECE == PARTS * QUADS, "weight_gradients_hopper.cu: pieces");
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // with 384 threads a launch gives 168 to each
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS == 3 * 168,
              "weight_gradients_hopper.cu: setmaxnreg would wait forever");
constexpr int FULL = 0, EMPTY = 64, ONES = 1024, STAGE = 2048;  // in bytes from shared_base() on
[[maybe_unused]] constexpr int SHARED = 1024 + STAGE + STAGES * STAGE_BYTES;
constexpr int ONE_ROWS = 8;  // of the tile of ones, ONE_ROWS x DEPTH
constexpr int MOST = 24;  // weights per launch
enum { CONSUMERS_MEET = 1 };

template <bool, typename A, typename> struct Either { typedef A type; };
template <typename A, typename B> struct Either<false, A, B> { typedef B type; };
typedef Either<WIDE, float, scalar>::type Number;  // element of a gradient

struct Weight {
    Number *gradient, *bias;  // bias: or null
    int rows, columns, row_step, column_step;  // multiples of ROWS and COLUMNS; one of the steps is 1
    int accumulate, accumulate_bias;
    int first, unused;  // first: its first tile; tiles are numbered weight by weight, by columns
};
struct Problem {
    Weight weight[MOST];
    int count, groups, steps, unused;
};
struct TensorMaps { TensorMap of[2 * MOST]; };  // for each weight, a (depth, rows) and b (depth, columns); boxes of 64 rows

struct Tile { int weight, row, column; };  // column = the weight's columns: nothing to do
__device__ __forceinline__ Tile tile_at(const Problem& p, int number) {
    int weight = 0;
    while (weight + 1 < p.count && p.weight[weight + 1].first <= number) ++weight;
    const Weight& w = p.weight[weight];
    const int down = w.rows / ROWS, at = number - w.first;
    return {weight, at % down * ROWS, min(at / down * COLUMNS, w.columns)};
}

__device__ __forceinline__ bool has_bias(const Problem& p, const Tile& tile) {
    return tile.column == 0 && p.weight[tile.weight].bias;
}

// A team's share of all groups, in steps of DEPTH.
struct Share {
    int teams, steps, all, begin, end;
    __device__ __forceinline__ Share(int team, int teams, int groups, int steps) : teams(teams), steps(steps) {
        all = groups * steps;
        begin = before(team), end = before(team + 1);
    }
    __device__ __forceinline__ int before(int team) const { return (long long)team * all / teams; }
    __device__ __forceinline__ int first() const { return begin / steps; }
    __device__ __forceinline__ int last() const { return (end - 1) / steps; }
    __device__ __forceinline__ int from(int group) const { return max(begin - group * steps, 0); }
    __device__ __forceinline__ int to(int group) const { return min(end - group * steps, steps); }
    __device__ __forceinline__ int last_team(int group) const { return ((long long)(group + 1) * steps * teams - 1) / all; }
};

__device__ __forceinline__ void release_both(u32 bar) {  // one arrival per warp, at both blocks
    if (threadIdx.x % 32 < 2) mbar_arrive_at(bar, threadIdx.x % 32);
}

// For all sums of a thread: write them to the gradient, or add the gradient to them. `step`: elements from row to row if
// BY_ROWS, else from column to column.
template <bool BY_ROWS, bool WRITE, typename T>
__device__ __forceinline__ void visit(float (&c)[PARTS][PART / 2], T* at, int step) {
#pragma unroll
    for (int i = 0; i < PARTS * QUADS; ++i, at += BY_ROWS ? 8 : 8 * step) {
        at = opaque(at);  // otherwise all addresses are computed ahead and need registers
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            T* const to = at + (BY_ROWS ? 8ll * half * step : 8 * half);
            float &x = c[i / QUADS][i % QUADS * 4 + 2 * half], &y = c[i / QUADS][i % QUADS * 4 + 2 * half + 1];
            if constexpr (sizeof(T) == 2) {
                u32 pair = WRITE ? pack_pair(scalar(), x, y) : *(const u32*)to;
                if (!BY_ROWS) pair = movmatrix(pair);
                if (WRITE) *(u32*)to = pair;
                else { const float2 old = unpack_pair(scalar(), pair); x += old.x, y += old.y; }
            } else if (BY_ROWS) {
                if (WRITE) *(float2*)to = make_float2(x, y);
                else { const float2 old = *(const float2*)to; x += old.x, y += old.y; }
            } else {
                if (WRITE) to[0] = x, to[step] = y;
                else x += to[0], y += to[step];
            }
        }
    }
}
template <bool BY_ROWS> __device__ __forceinline__ void finish(
    float (&c)[PARTS][PART / 2], const Weight& w, int row, int column) {
    const int step = BY_ROWS ? w.row_step : w.column_step, lane = threadIdx.x % 32;
    const bool turned = !WIDE && !BY_ROWS;  // a lane's two elements of 8 x 8 are then in a column
    row += threadIdx.x / 32 * 16 + (turned ? lane % 4 * 2 : lane / 4), column += turned ? lane / 4 : lane % 4 * 2;
    Number* const place = w.gradient + (BY_ROWS ? (long long)row * step + column : (long long)column * step + row);
    if (w.accumulate) visit<BY_ROWS, false>(c, place, step);
    visit<BY_ROWS, true>(c, place, step);
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) weight_gradients(
    const __grid_constant__ TensorMaps maps,
    const __grid_constant__ Problem problem,
    float4* workspace,   // (blocks, ALL_QUADS)
    float* bias_sums,    // (blocks, ROWS)
    int* filled) {       // (blocks,): whether a block has filled its part of both; zeros before and after
    grid_dependency_wait();
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(shared + FULL + 8 * i, 1);
            mbar_init(shared + EMPTY + 8 * i, 2 * THREADS / 32);
        }
        mbar_init_done();
    }
    if (threadIdx.x < ONE_ROWS * DEPTH / 8) {
        const float ones = __uint_as_float(pack_pair(scalar(), 1, 1));
        store_shared(shared + ONES + threadIdx.x * 16, ones, ones, ones, ones);
        fence_async_proxy();
    }
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
    const int rank = blockIdx.x % 2, teams = gridDim.x / (2 * TEAM), from_start = blockIdx.x / (2 * TEAM);
    const int team = teams - 1 - from_start;  // teams wait for later teams, so these have the lower blocks, which start first
    const Share share(team, teams, problem.groups, problem.steps);
    const int first = share.first(), last = share.last(), member = blockIdx.x % (2 * TEAM);

    if (warpgroup() == 2) {  // ---- producer
        decrease_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 == 0) {
            PipelineState<STAGES> ring;
#pragma unroll 1
            for (int group = first; group <= last; ++group) {
                const int number = group * 2 * TEAM + member;
                const Tile tile = tile_at(problem, number), mate = tile_at(problem, number ^ 1);  // of the pair's blocks
                const bool together = tile.weight == mate.weight && tile.column == mate.column;
                const TensorMap &a = maps.of[2 * tile.weight], &b = maps.of[2 * tile.weight + 1];
                const int from = share.from(group), to = share.to(group);
#pragma unroll 1
                for (int k = from; k < to; ++k, ring.next()) {
                    const u32 full = shared + FULL + 8 * ring.stage, place = shared + STAGE + ring.stage * STAGE_BYTES;
                    mbar_wait(shared + EMPTY + 8 * ring.stage, ring.parity ^ 1);
                    mbar_expect(full, STAGE_BYTES);
#pragma unroll 1
                    for (int s = 0; s < A_SLABS; ++s)
                        tma_load(place + s * SLAB, a, full, tile.row + 64 * s, k * DEPTH, 0, 0);
                    if (together) {
#pragma unroll 1
                        for (int i = 0; i < B_SLABS / 2; ++i) {
                            const int s = rank * (B_SLABS / 2) + i;
                            tma_load_multicast(place + A_BYTES + s * SLAB, b, full, tile.column + 64 * s, k * DEPTH, 0, 0, 3);
                        }
                    } else {
#pragma unroll 1
                        for (int s = 0; s < B_SLABS; ++s)
                            tma_load(place + A_BYTES + s * SLAB, b, full, tile.column + 64 * s, k * DEPTH, 0, 0);
                    }
                }
                if (from > 0 || to == share.steps) continue;
                const int others = share.last_team(group) - team;
#pragma unroll 1
                for (int other = 1; other <= others; ++other) {
                    const int source = blockIdx.x - other * 2 * TEAM;
                    while (!load_acquire(filled + source)) {}
                    filled[source] = 0;
                    fence_async_proxy_global();
#pragma unroll 1
                    for (int piece = 0; piece < PIECES; ++piece, ring.next()) {
                        const u32 full = shared + FULL + 8 * ring.stage;
                        mbar_wait(shared + EMPTY + 8 * ring.stage, ring.parity ^ 1);
                        mbar_expect(full, PIECE_BYTES);
                        bulk_load(shared + STAGE + ring.stage * STAGE_BYTES,
                                  workspace + (long long)source * ALL_QUADS + piece * (PIECE_BYTES / 16), PIECE_BYTES, full);
                    }
                }
            }
        }
    } else {  // ---- consumers
        increase_registers<CONSUMER_REGISTERS>();
        const u32 own = warpgroup() * SLAB;
        PipelineState<STAGES> ring, before;
        float c[PARTS][PART / 2], sums[4];
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // of sums[0], in each of eight columns; sums[2]: + 8
#pragma unroll 1
        for (int group = first; group <= last; ++group) {
            const int from = share.from(group), to = share.to(group);
            const Tile tile = tile_at(problem, group * 2 * TEAM + member);
            const bool summed = has_bias(problem, tile);
            keep_live(c[0]); keep_live(c[1]); keep_live(sums);
#pragma unroll 1
            for (int k = from; k < to; ++k) {
                const u32 place = shared + STAGE + ring.stage * STAGE_BYTES;
                mbar_wait(shared + FULL + 8 * ring.stage, ring.parity);
                wgmma_fence();
#pragma unroll
                for (int n = 0; n < PARTS; ++n)
                    product<MN_MAJOR, MN_MAJOR, DEPTH, DEPTH, DEPTH>(
                        c[n], place + own, place + A_BYTES + n * (PART / 64) * SLAB, k > from);
                if (summed) {  // a branch here: ptxas serializes the products of two loops
                    wgmma_fence();
                    product<MN_MAJOR, K_MAJOR, DEPTH, ONE_ROWS, DEPTH>(sums, place + own, shared + ONES, k > from);
                }
                wgmma_fence();  // else ptxas adds one, behind the branch
                wgmma_commit();
                wgmma_wait<1>();
                if (k > from) release_both(shared + EMPTY + 8 * before.stage);
                before = ring;
                ring.next();
            }
            wgmma_wait<0>();
            keep_live(c[0]); keep_live(c[1]); keep_live(sums);
            release_both(shared + EMPTY + 8 * before.stage);

            if (from > 0) {
                float4* const slot = workspace + (long long)blockIdx.x * ALL_QUADS + threadIdx.x;
#pragma unroll
                for (int i = 0; i < PARTS * QUADS; ++i) {
                    const float* d = &c[i / QUADS][i % QUADS * 4];
                    __stcg(slot + i * THREADS, make_float4(d[0], d[1], d[2], d[3]));
                }
                if (summed && threadIdx.x % 4 == 0) {
                    __stcg(bias_sums + blockIdx.x * ROWS + row, sums[0]);
                    __stcg(bias_sums + blockIdx.x * ROWS + row + 8, sums[2]);
                }
                bar_sync(CONSUMERS_MEET, THREADS);
                if (threadIdx.x == 0) store_release(filled + blockIdx.x, 1);
                continue;
            }
            const int others = to < share.steps ? share.last_team(group) - team : 0;
#pragma unroll 1
            for (int other = 0; other < others; ++other) {
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece, ring.next()) {
                    mbar_wait(shared + FULL + 8 * ring.stage, ring.parity);
                    const u32 place = shared + STAGE + ring.stage * STAGE_BYTES + threadIdx.x * 16;
                    u32 loaded = 0;
#pragma unroll
                    for (int i = 0; i < QUADS_OF_PIECE; ++i) {
                        const uint4 x = load_shared_uint4(place + i * THREADS * 16);
                        float* d = &c[(piece * QUADS_OF_PIECE + i) / QUADS][(piece * QUADS_OF_PIECE + i) % QUADS * 4];
                        d[0] += __uint_as_float(x.x), d[1] += __uint_as_float(x.y);
                        d[2] += __uint_as_float(x.z), d[3] += __uint_as_float(x.w);
                        loaded |= x.x;
                    }
                    __syncwarp();
                    // a number of steps is never negative
                    release_both(freed(shared + EMPTY + 8 * ring.stage, loaded, unknown_zero(problem.steps)));
                }
                if (summed) {  // stored before the parts of c, which were waited for
                    const float* const theirs = bias_sums + (blockIdx.x - (other + 1) * 2 * TEAM) * ROWS + row;
                    sums[0] += __ldcg(theirs), sums[2] += __ldcg(theirs + 8);
                }
            }
            const Weight& w = problem.weight[tile.weight];
            if (tile.column == w.columns) continue;
            if (summed && threadIdx.x % 4 == 0) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Number* const to = w.bias + tile.row + row + 8 * half;
                    *to = (Number)(sums[2 * half] + (w.accumulate_bias ? (float)*to : 0));
                }
            }
            if (w.column_step == 1) finish<true>(c, w, tile.row, tile.column);
            else finish<false>(c, w, tile.row, tile.column);
        }
    }
    cluster_arrive_relaxed();  // no block exits while the other may still access its shared memory
    cluster_wait();
}
