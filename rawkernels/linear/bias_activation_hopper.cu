// The gradient of an activation between two linear layers on Hopper, in one kernel: dz = (dy weight) f'(before), a product
// of which each tile is multiplied by the slopes while the next one is summed.
// Constants: scalar = f16, bf16; ACTIVATION = 1, 2 (relu, gelu by tanh); SPREAD = 2, 4, 6, 8, 12
// Launch:    grid = (min(tiles, SMs),), block = (384,), shared = SHARED bytes; depth > 64 (SPREAD - 1)
//            dependent: product_activation_backward
// Arch: sm_90a
//
// A tile is 128 rows x 256 columns, 64 rows for each of two warpgroups. A third one brings operands, 64 of the sum at a time,
// and what the activation was taken of, 64 x 64 at a time for each warpgroup. A warpgroup rounds what it has summed to 16 bits
// and keeps it in registers beside the sums of its next tile. Those are made by wgmma, which runs by itself; in the meantime
// the warpgroup finishes what it keeps, 16 columns at a time, evenly over the first SPREAD stages: it takes 16 x 16 numbers
// of `before` out of shared memory and puts the result there in their place, from where the copy engine stores them.
#include "linear/gelu.cuh"
#include "common/grid_dependency.cuh"
#include "linear/product_tiles.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

static_assert(ACTIVATION == 1 || ACTIVATION == 2, "bias_activation_hopper.cu: ACTIVATION is 1 or 2");

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 3, SLOTS = 4;
constexpr int SLAB = 64 * 128, SLABS = COLUMNS / 64, GROUPS = COLUMNS / 16;  // bytes of 64 x 64 numbers
constexpr int DY_BYTES = 2 * SLAB, STAGE_BYTES = DY_BYTES + SLABS * SLAB;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // with 384 threads a launch gives 168 to each
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS == 3 * 168, "else a warpgroup waits for registers for ever");
// Shared memory, in bytes from shared_base() on; a barrier for each stage and each slot.
constexpr int STAGE_FULL = 0, STAGE_EMPTY = 64, SLOT_FULL = 128, SLOT_EMPTY = 192;
constexpr int STAGE = 1024, SLOT = STAGE + STAGES * STAGE_BYTES;  // a warpgroup's slots follow each other
[[maybe_unused]] constexpr int SHARED = 1024 + SLOT + 2 * SLOTS * SLAB;

// ---- slopes
// Two numbers brought to -7 .. 7, beyond which the slope of GELU is 0 or 1 within 4e-14; NaN stays.
__device__ __forceinline__ u32 clamp_pair(bf16, u32 x) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(0x40e040e0));
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(0xc0e0c0e0));
    return x;
}
__device__ __forceinline__ u32 clamp_pair(f16, u32 x) {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(0x47004700));
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(0xc700c700));
    return x;
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
// A place in a ring, and the parity of the round.
template <int SIZE> struct Ring {
    int at = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() { if (++at == SIZE) at = 0, parity ^= 1; }
    __device__ __forceinline__ int before() const { return (at ? at : SIZE) - 1; }
};

// ---- what the warpgroups do
// The sums of a stage begin, or go on.
__device__ __forceinline__ void multiply(float (&sum)[COLUMNS / 2], u32 shared, int w, const Ring<STAGES>& ring,
                                         bool add) {
    const u32 stage = shared + STAGE + ring.at * STAGE_BYTES;
    mbar_wait(shared + STAGE_FULL + 8 * ring.at, ring.parity);
    if (!add) hold(sum);
    wgmma_fence();
    product<K_MAJOR, MN_MAJOR, 64, DEPTH, DEPTH>(sum, stage + w * SLAB, stage + DY_BYTES, add);
    wgmma_commit();
}

// Where the rows of this warp that wait to be finished are; row < 0: there are none yet.
struct Kept { int row, column; bool first; };

// Their g-th 16 columns.
__device__ __forceinline__ void finish(u32 shared, int w, int g, const u32 (&kept)[4], const Kept& where, Ring<SLOTS>& ring,
                                       const TensorMap& out_map) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, slot = w * SLOTS + ring.at;
    const u32 tile = shared + SLOT + slot * SLAB + warp * 2048;  // 16 rows
    if (g % 4 == 0) mbar_wait(shared + SLOT_FULL + 8 * slot, ring.parity);
    const u32 block = chunk_address<64>(tile, lane & 15, 2 * (g % 4) + (lane >> 4));
    u32 x[4];
    ldmatrix(x, block);
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = times_slopes(kept[n], x[n]);
    stmatrix(block, x);
    if (g % 4 == 1 && lane == 0 && (g > 4 || !where.first)) {  // the slot before has long been stored
        bulk_wait_read();
        mbar_arrive(shared + SLOT_EMPTY + 8 * (w * SLOTS + ring.before()));
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
    const __grid_constant__ TensorMap before_map,  // (rows, columns); boxes of 64 rows; of relu y
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
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 3 || threadIdx.x % 32 != 0) return;
        Ring<STAGES> stages;
        Ring<SLOTS> slots;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
            const int row = tiles.row(tile), column = tiles.column(tile);
#pragma unroll 1
            for (int k = 0; k < steps && warp == 2; ++k, stages.next()) {
                const u32 full = shared + STAGE_FULL + 8 * stages.at, to = shared + STAGE + stages.at * STAGE_BYTES;
                mbar_wait(shared + STAGE_EMPTY + 8 * stages.at, stages.parity ^ 1);
                mbar_expect(full, STAGE_BYTES);
                tma_load(to, dy_map, full, k * DEPTH, row, 0, 0);
#pragma unroll
                for (int c = 0; c < SLABS; ++c)
                    tma_load(to + DY_BYTES + c * SLAB, weight_map, full, column + 64 * c, k * DEPTH, 0, 0);
            }
#pragma unroll 1
            for (int c = 0; c < SLABS && warp < 2; ++c, slots.next()) {  // of warpgroup `warp`
                const int slot = warp * SLOTS + slots.at;
                const u32 full = shared + SLOT_FULL + 8 * slot;
                mbar_wait(shared + SLOT_EMPTY + 8 * slot, slots.parity ^ 1);
                mbar_expect(full, SLAB);
                tma_load(shared + SLOT + slot * SLAB, before_map, full, column + 64 * c, row + 64 * warp, 0, 0,
                         L2_EVICT_FIRST);
            }
        }
    } else {  // ---- consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
        const int w = warpgroup(), warp = threadIdx.x / 32 % 4;
        Ring<STAGES> stages;
        Ring<SLOTS> slots;
        u32 kept[GROUPS][4];
        Kept where{-1, 0, true};
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
            float sum[COLUMNS / 2];
#pragma unroll
            for (int k = 0; k < SPREAD; ++k) {
                multiply(sum, shared, w, stages, k > 0);
                if (k > 0) {
                    wgmma_wait<1>();
                    release(shared + STAGE_EMPTY + 8 * stages.before());
                }
                stages.next();
                if (where.row < 0) continue;
#pragma unroll
                for (int g = k * GROUPS / SPREAD; g < (k + 1) * GROUPS / SPREAD; ++g)
                    finish(shared, w, g, kept[g], where, slots, out_map);
            }
#pragma unroll 1
            for (int k = SPREAD; k < steps; ++k) {
                multiply(sum, shared, w, stages, true);
                wgmma_wait<1>();
                release(shared + STAGE_EMPTY + 8 * stages.before());
                stages.next();
            }
            wgmma_wait<0>(); hold(sum);
            release(shared + STAGE_EMPTY + 8 * stages.before());
            pack(kept, sum);
            where = {tiles.row(tile) + 64 * w + 16 * warp, tiles.column(tile), where.row < 0};
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) finish(shared, w, g, kept[g], where, slots, out_map);
        if (threadIdx.x % 32 == 0) bulk_wait_read();
    }
}
