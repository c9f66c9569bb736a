// The gradient of an activation between two linear layers, for Hopper, in one kernel: dz = (dy weight) f'(before). The
// epilogue of each tile, which multiplies by the slopes, overlaps with the main loop of the next tile.
// Constants: scalar = f16, bf16; ACTIVATION = 1, 2 (relu, gelu by tanh); SPREAD = 2, 4, 6, 8, 12
// Launch:    grid = (min(tiles, SMs),), block = (384,), shared = SHARED bytes; depth > 64 (SPREAD - 1)
//            dependent: product_activation_backward
// Arch: sm_90a
//
// A tile is 128 rows x 256 columns, 64 rows for each of two consumer warpgroups. The producer warpgroup loads operands in
// stages of K = 64, and `before`, the input of the activation, in slots of 64 x 64 for each consumer warpgroup.
// A consumer rounds a finished tile to 16 bits and keeps it in registers beside the accumulators of the next tile. While
// wgmma runs on these asynchronously, it processes the packed tile, 16 columns at a time, evenly over the first SPREAD
// stages: it reads 16 x 16 numbers of `before` from a slot and overwrites them with the result, which TMA then stores.
#include "common/grid_dependency.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gelu.cuh"
#include "linear/product_tiles.cuh"

static_assert(ACTIVATION == 1 || ACTIVATION == 2, "bias_activation_hopper.cu: ACTIVATION is 1 or 2");

constexpr int ROWS = 128, COLUMNS = 256;  // of a tile
constexpr int DEPTH = 64, STAGES = 3;     // K of a stage; stages
constexpr int SLOTS = 4;                  // slots of `before` per warpgroup
constexpr int SLAB = 64 * 128;            // bytes of 64 x 64 numbers
constexpr int SLABS = COLUMNS / 64, GROUPS = COLUMNS / 16;
constexpr int DY_BYTES = 2 * SLAB, STAGE_BYTES = DY_BYTES + SLABS * SLAB;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // with 384 threads a launch gives 168 to each
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS == 3 * 168,
              "bias_activation_hopper.cu: setmaxnreg would wait forever");
// Shared memory, in bytes from shared_base() on. Each stage and each slot has a full and an empty barrier.
constexpr int STAGE_FULL = 0, STAGE_EMPTY = 64, SLOT_FULL = 128, SLOT_EMPTY = 192;
constexpr int STAGE = 1024, SLOT = STAGE + STAGES * STAGE_BYTES;  // the slots of a warpgroup are contiguous
[[maybe_unused]] constexpr int SHARED = 1024 + SLOT + 2 * SLOTS * SLAB;

// ---- slopes
// Clamps two numbers to -7 .. 7, beyond which the slope of GELU is 0 or 1 within 4e-14; NaN stays NaN.
__device__ __forceinline__ u32 clamp_pair(bf16, u32 x) {
    return max_nan_pair(bf16(), min_nan_pair(bf16(), x, 0x40e040e0), 0xc0e0c0e0);
}
__device__ __forceinline__ u32 clamp_pair(f16, u32 x) {
    return max_nan_pair(f16(), min_nan_pair(f16(), x, 0x47004700), 0xc700c700);
}
// GELU is z / (1 + odds), odds = exp(-2 u(z)), and its slope (1 + odds (1 + 2 z u'(z))) / (1 + odds)^2.
__device__ __forceinline__ float slope(float x) {
    if constexpr (ACTIVATION == 1) return x > 0.f ? 1.f : 0.f;
    const float square = x * x, odds = exp2_fast(x * (EXPONENT + EXPONENT * TANH_CUBIC * square));
    const float gate = reciprocal(1.f + odds), rise = 1.f + odds * (1.f + x * (STEEP + STEEP_CUBIC * square));
    return rise * gate * gate;
}
__device__ __forceinline__ u32 times_slopes(u32 product, u32 before) {
    const float2 d = unpack_pair(scalar(), product);
    const float2 x = unpack_pair(scalar(), ACTIVATION == 1 ? before : clamp_pair(scalar(), before));
    return pack_pair(scalar(), d.x * slope(x.x), d.y * slope(x.y));
}

using Tiles = ProductTiles<ROWS, COLUMNS>;

// ---- consumers
// Issues the products of a stage; add: to the sums so far.
__device__ __forceinline__ void multiply(float (&sum)[COLUMNS / 2], u32 shared, int w, const PipelineState<STAGES>& ring,
                                         bool add) {
    const u32 stage = shared + STAGE + ring.stage * STAGE_BYTES;
    mbar_wait(shared + STAGE_FULL + 8 * ring.stage, ring.parity);
    if (!add) keep_live(sum);
    wgmma_fence();
    product<K_MAJOR, MN_MAJOR, 64, DEPTH, DEPTH>(sum, stage + w * SLAB, stage + DY_BYTES, add);
    wgmma_commit();
}

// The position of this warp's packed rows in the result; row < 0: none yet.
struct PackedTile { int row, column; bool first; };

// Processes the g-th 16 columns of the packed tile.
__device__ __forceinline__ void store_group(u32 shared, int w, int g, const u32 (&packed)[4], const PackedTile& where,
                                            PipelineState<SLOTS>& ring, const TensorMap& out_map) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, slot = w * SLOTS + ring.stage;
    const u32 tile = shared + SLOT + slot * SLAB + warp * 2048;  // 16 rows
    if (g % 4 == 0) mbar_wait(shared + SLOT_FULL + 8 * slot, ring.parity);
    const u32 block = chunk_address<64>(tile, lane & 15, 2 * (g % 4) + (lane >> 4));
    u32 x[4];
    ldmatrix(x, block);
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = times_slopes(packed[n], x[n]);
    stmatrix(block, x);
    if (g % 4 == 1 && lane == 0 && (g > 4 || !where.first)) {  // the store from the previous slot was issued long ago
        bulk_wait_read();
        mbar_arrive(shared + SLOT_EMPTY + 8 * (w * SLOTS + ring.previous()));
    }
    if (g % 4 == 3) {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            tma_store(out_map, tile, where.column + g / 4 * 64, where.row, 0, 0);
            bulk_commit();
        }
        ring.next();
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) product_activation_backward(
    const __grid_constant__ TensorMap dy_map,      // (rows, depth); boxes of 128 rows
    const __grid_constant__ TensorMap weight_map,  // (depth, columns); boxes of 64 rows
    const __grid_constant__ TensorMap before_map,  // (rows, columns); boxes of 64 rows; y for relu
    const __grid_constant__ TensorMap out_map,     // (rows, columns); boxes of 16 rows
    const __grid_constant__ Problem problem) {
    grid_dependency_wait();
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(shared + STAGE_FULL + 8 * i, 1);
            mbar_init(shared + STAGE_EMPTY + 8 * i, 8);
        }
        for (int i = 0; i < 2 * SLOTS; ++i) {
            mbar_init(shared + SLOT_FULL + 8 * i, 1);
            mbar_init(shared + SLOT_EMPTY + 8 * i, 4);
        }
        mbar_init_done();
    }
    __syncthreads();
    const Tiles tiles(problem);
    const int steps = (problem.depth + DEPTH - 1) / DEPTH;

    if (warpgroup() == 2) {  // ---- producers
        decrease_registers<PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 3 || threadIdx.x % 32 != 0) return;
        PipelineState<STAGES> stages;
        PipelineState<SLOTS> slots;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
            const int row = tiles.row(tile), column = tiles.column(tile);
#pragma unroll 1
            for (int k = 0; k < steps && warp == 2; ++k, stages.next()) {
                const u32 full = shared + STAGE_FULL + 8 * stages.stage, to = shared + STAGE + stages.stage * STAGE_BYTES;
                mbar_wait(shared + STAGE_EMPTY + 8 * stages.stage, stages.parity ^ 1);
                mbar_expect(full, STAGE_BYTES);
                tma_load(to, dy_map, full, k * DEPTH, row, 0, 0);
#pragma unroll
                for (int c = 0; c < SLABS; ++c)
                    tma_load(to + DY_BYTES + c * SLAB, weight_map, full, column + 64 * c, k * DEPTH, 0, 0);
            }
#pragma unroll 1
            for (int c = 0; c < SLABS && warp < 2; ++c, slots.next()) {  // `before` for warpgroup `warp`
                const int slot = warp * SLOTS + slots.stage;
                const u32 full = shared + SLOT_FULL + 8 * slot;
                mbar_wait(shared + SLOT_EMPTY + 8 * slot, slots.parity ^ 1);
                mbar_expect(full, SLAB);
                tma_load(shared + SLOT + slot * SLAB, before_map, full, column + 64 * c, row + 64 * warp, 0, 0,
                         L2_EVICT_FIRST);
            }
        }
    } else {  // ---- consumers
        increase_registers<CONSUMER_REGISTERS>();
        const int w = warpgroup(), warp = threadIdx.x / 32 % 4;
        PipelineState<STAGES> stages;
        PipelineState<SLOTS> slots;
        u32 packed[GROUPS][4];
        PackedTile where{-1, 0, true};
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
            float sum[COLUMNS / 2];
#pragma unroll
            for (int k = 0; k < SPREAD; ++k) {
                multiply(sum, shared, w, stages, k > 0);
                if (k > 0) {
                    wgmma_wait<1>();
                    release(shared + STAGE_EMPTY + 8 * stages.previous());
                }
                stages.next();
                if (where.row < 0) continue;
#pragma unroll
                for (int g = k * GROUPS / SPREAD; g < (k + 1) * GROUPS / SPREAD; ++g)
                    store_group(shared, w, g, packed[g], where, slots, out_map);
            }
#pragma unroll 1
            for (int k = SPREAD; k < steps; ++k) {
                multiply(sum, shared, w, stages, true);
                wgmma_wait<1>();
                release(shared + STAGE_EMPTY + 8 * stages.previous());
                stages.next();
            }
            wgmma_wait<0>(); keep_live(sum);
            release(shared + STAGE_EMPTY + 8 * stages.previous());
            pack(packed, sum);
            where = {tiles.row(tile) + 64 * w + 16 * warp, tiles.column(tile), where.row < 0};
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) store_group(shared, w, g, packed[g], where, slots, out_map);
        if (threadIdx.x % 32 == 0) bulk_wait_read();
    }
}
