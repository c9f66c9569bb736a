// GELU after a linear layer, for Hopper, fused into the layer's product and into the product of its gradient.
// Forward: y = gelu(x weight^T + bias), and with SLOPES its slopes, one byte each. Gradient: dz = (dy weight) slopes, and with SUMS the
// first stage of its column sums, of dz as it is stored: each warp's rows of a tile. column_sum.cu adds them, in order.
// Constants: scalar = f16, bf16; GRADIENT = false; EXACT = false, true (GELU by tanh, by erf); BIAS = false, true;
//   SUMS = false; HELD = 0, 6; SLOPES = false, true
// Constants: scalar = f16, bf16; GRADIENT = true; EXACT = false; BIAS = false; SUMS = false, true; HELD = 0, 6; SLOPES = true
// Launch:    grid = (min(tiles, SMs),), if HELD a multiple of the tiles in a row; block = (384,), shared = SHARED bytes;
//            if HELD depth <= 64 * HELD
//            dependent: linear_gelu
// Arch: sm_90a
//
// A tile is 128 x 128 and belongs to one consumer warpgroup. Two of them alternate (ping-pong): while one runs its epilogue
// the other runs its main loop. The producer warpgroup loads operands in stages of K = 64. With HELD a block keeps its 128
// columns of the weight in shared memory for all its tiles, in HELD parts of K = 64. The codes of the slopes go directly
// between registers and global memory.
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gelu_slopes.cuh"
#include "linear/product_tiles.cuh"

constexpr int ROWS = 128, COLUMNS = 128;            // of a tile
constexpr int DEPTH = 64, STAGES = HELD ? 6 : 5;    // K of a stage; stages
constexpr int SLOTS = 2;                            // of results per warp
constexpr int PARTS = ROWS / 64;                    // of 64 rows of a tile
constexpr int CHUNKS = COLUMNS / 32;                // of 32 columns of a tile
constexpr int A_BYTES = ROWS * 128, B_BYTES = COLUMNS * 128, STAGE_BYTES = A_BYTES + (HELD ? 0 : B_BYTES);
constexpr int SLOT = 16 * 128;  // bytes of 16 x 64 results of a warp, to be stored by TMA
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // with 384 threads a launch gives 168 to each
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS == 3 * 168,
              "linear_gelu_hopper.cu: setmaxnreg would wait forever");
// Shared memory, in bytes from shared_base() on. Each stage has a full and an empty barrier, each held part of the weight a
// full one.
constexpr int STAGE_FULL = 0, STAGE_EMPTY = 64, HELD_FULL = 128;
constexpr int STAGE = 1024, WEIGHT = STAGE + STAGES * STAGE_BYTES, OUT = WEIGHT + HELD * B_BYTES;
[[maybe_unused]] constexpr int SHARED = 1024 + OUT + 8 * SLOTS * SLOT;

using Tiles = ProductTiles<ROWS, COLUMNS>;  // if HELD all tiles of a block are in one column

// Issues the products of a stage; add: to the sums so far.
__device__ __forceinline__ void multiply(float (&sum)[PARTS][COLUMNS / 2], u32 a, u32 b, bool add) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
        if constexpr (GRADIENT) product<K_MAJOR, MN_MAJOR, 64, DEPTH, DEPTH>(sum[j], a + j * 64 * 128, b, add);
        else product<K_MAJOR, K_MAJOR, 64, COLUMNS, DEPTH>(sum[j], a + j * 64 * 128, b, add);
    }
    wgmma_commit();
}

// Sets the sums of a tile to the bias of their columns; beyond the last column, to 0.
__device__ __forceinline__ void begin_with_bias(float (&sum)[PARTS][COLUMNS / 2], const u32* bias, int column, int columns) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
        const int first = column + 8 * n;
        const float2 pair = unpack_pair(scalar(), first < columns ? bias[first / 2 + threadIdx.x % 4] : 0u);
#pragma unroll
        for (int j = 0; j < PARTS; ++j) {
            sum[j][4 * n] = sum[j][4 * n + 2] = pair.x;
            sum[j][4 * n + 1] = sum[j][4 * n + 3] = pair.y;
        }
    }
}

// 16 x 16 sums of a warp, 8 per thread, to packed results and to words of their codes.
__device__ __forceinline__ void activate(u32 (&out)[4], u32 (&words)[2], const float* sum) {
    u32 codes[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const Curve low = curve<EXACT>(sum[2 * n]), high = curve<EXACT>(sum[2 * n + 1]);
        out[n] = pack_pair(scalar(), low.value, high.value);
        codes[n] = pack_pair(scalar(), low.code, high.code);
    }
    words[0] = code_word(codes[0], codes[1]), words[1] = code_word(codes[2], codes[3]);
}

// Column sums over a warp's rows. columns: of 16 groups of 8 columns, a thread's two. The result is in its first four: those
// of the two groups from 2 * (lane / 4) on. Lanes KEPT apart keep a half each.
template <int KEPT> __device__ __forceinline__ void add_rows(float (&columns)[COLUMNS / 4]) {
    const bool upper = threadIdx.x & KEPT;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const float low = columns[i], high = columns[i + KEPT];
        columns[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, KEPT);
    }
    if constexpr (KEPT > 4) add_rows<KEPT / 2>(columns);
}

extern "C" __global__ void __launch_bounds__(384, 1) linear_gelu(
    const __grid_constant__ TensorMap a_map,       // x or dy: (rows, depth); boxes of 128 rows
    const __grid_constant__ TensorMap weight_map,  // (columns, depth), boxes of 128 rows; gradient (depth, columns), of 64
    const __grid_constant__ TensorMap out_map,     // (rows, columns); boxes of 16 rows
    unsigned char* __restrict__ codes,             // of whole tiles of 128 x 128, block of codes by block; without SLOPES null
    const u32* bias,                               // (columns,) of BIAS, in pairs; else null
    const __grid_constant__ Problem problem,
    float* __restrict__ sums) {                    // (4 * ceil(rows / 128), columns) of SUMS; else null
    grid_dependency_wait();
    const u32 shared = __shfl_sync(~0u, shared_base(), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(shared + STAGE_FULL + 8 * i, 1);
            mbar_init(shared + STAGE_EMPTY + 8 * i, 4);
        }
        for (int i = 0; i < HELD; ++i) mbar_init(shared + HELD_FULL + 8 * i, 1);
        mbar_init_done();
    }
    __syncthreads();
    const Tiles tiles(problem);
    const int steps = (problem.depth + DEPTH - 1) / DEPTH, first = blockIdx.x, stride = gridDim.x;

    if (warpgroup() == 2) {  // ---- the producer
        decrease_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 != 0) return;
        int at = 0;  // number of the stage, counted over all tiles of the block
#pragma unroll 1
        for (int tile = first; tile < tiles.count; tile += stride) {
            const int row = tiles.row(tile), column = tiles.column(tile);
#pragma unroll 1
            for (int k = 0; k < steps; ++k, ++at) {
                const int i = at % STAGES;
                const u32 full = shared + STAGE_FULL + 8 * i, to = shared + STAGE + i * STAGE_BYTES;
                mbar_wait(shared + STAGE_EMPTY + 8 * i, at / STAGES & 1 ^ 1);
                mbar_expect(full, STAGE_BYTES);
                tma_load(to, a_map, full, k * DEPTH, row, 0, 0);
                if (HELD && tile != first) continue;
                const u32 b = HELD ? shared + WEIGHT + k * B_BYTES : to + A_BYTES;
                const u32 b_full = HELD ? shared + HELD_FULL + 8 * k : full;
                if (HELD) mbar_expect(b_full, B_BYTES);
                if constexpr (GRADIENT) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c += 64)
                        tma_load(b + c * 128, weight_map, b_full, column + c, k * DEPTH, 0, 0);
                } else {
                    tma_load(b, weight_map, b_full, k * DEPTH, column, 0, 0);
                }
            }
        }
        return;
    }

    // ---- consumers
    increase_registers<CONSUMER_REGISTERS>();
    const int w = warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const auto signal_other = [w] { bar_arrive(2 - w, 256); };
    const u32 slots = shared + OUT + (4 * w + warp) * SLOTS * SLOT;
    int at = w * steps, slot = 0;
    if (w == 1) signal_other();
#pragma unroll 1
    for (int tile = first + w * stride; tile < tiles.count; tile += 2 * stride) {
        const int row = tiles.row(tile), column = tiles.column(tile);
        const size_t below = (size_t)tiles.across * CHUNKS * CODE_BLOCK;  // 64 rows
        unsigned char* const own = codes + row / 64 * below + column / 32 * CODE_BLOCK + threadIdx.x % 128 * CODES;
        const auto codes_at = [&](int j, int c) { return own + (j ? below : 0) + c * CODE_BLOCK; };
        uint4 loaded[PARTS * CHUNKS];  // codes
        if constexpr (GRADIENT) {
#pragma unroll
            for (int p = 0; p < PARTS * CHUNKS; ++p) loaded[p] = load_streaming(codes_at(p / CHUNKS, p % CHUNKS));
        }
        float sum[PARTS][COLUMNS / 2];
        if constexpr (BIAS) begin_with_bias(sum, bias, column, problem.columns);
        bar_sync(1 + w, 256);
#pragma unroll
        for (int j = 0; j < PARTS; ++j) keep_live(sum[j]);
        u32 previous = 0;
#pragma unroll 1
        for (int k = 0; k < steps; ++k, ++at) {
            const int i = at % STAGES;
            const u32 a = shared + STAGE + i * STAGE_BYTES;
            if (HELD && tile < first + 2 * stride) mbar_wait(shared + HELD_FULL + 8 * k, 0);
            mbar_wait(shared + STAGE_FULL + 8 * i, at / STAGES & 1);
            multiply(sum, a, HELD ? shared + WEIGHT + k * B_BYTES : a + A_BYTES, BIAS || k > 0);
            wgmma_wait<1>();
            if (k > 0) release(previous);
            previous = shared + STAGE_EMPTY + 8 * i;
        }
        if (tile + stride < tiles.count) signal_other();
        at += steps;
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < PARTS; ++j) keep_live(sum[j]);
        release(previous);
        float columns[COLUMNS / 4];  // of SUMS: sums over this thread's rows
#pragma unroll
        for (int p = 0; p < PARTS * CHUNKS; ++p) {
            const int j = p / CHUNKS, c = p % CHUNKS;
            const u32 to = slots + slot * SLOT;
            if (c % 2 == 0) {
                if (lane == 0) bulk_wait_read<SLOTS - 1>();  // the slot is free: its last store has been read
                __syncwarp();
            }
            u32 words[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* own = sum[j] + 16 * c + 8 * i;
                u32 out[4];
                if constexpr (GRADIENT) {
                    const u32 word[2] = {i ? loaded[p].z : loaded[p].x, i ? loaded[p].w : loaded[p].y};
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        out[n] = times_slopes(pack_pair(scalar(), own[2 * n], own[2 * n + 1]), word[n / 2], n % 2);
                        if constexpr (SUMS) {
                            const float2 pair = unpack_pair(scalar(), out[n]);
                            float* const to = columns + 8 * c + 4 * i + n / 2 * 2;
                            const bool adds = j > 0 || n % 2 == 1;
                            to[0] = adds ? to[0] + pair.x : pair.x, to[1] = adds ? to[1] + pair.y : pair.y;
                        }
                    }
                } else {
                    activate(out, words[i], own);
                }
                stmatrix(chunk_address<64>(to, lane & 15, 4 * (c % 2) + 2 * i + (lane >> 4)), out);
            }
            if constexpr (!GRADIENT && SLOPES) store_streaming(codes_at(j, c), {words[0][0], words[0][1], words[1][0], words[1][1]});
            if (c % 2 == 1) {
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) {
                    tma_store(out_map, to, column + 32 * (c - 1), row + 64 * j + 16 * warp, 0, 0);
                    bulk_commit();
                }
                if (++slot == SLOTS) slot = 0;
            }
        }
        if constexpr (SUMS) {
            add_rows<COLUMNS / 8>(columns);
            const int at = column + lane / 4 * 16 + lane % 4 * 2;  // columns of the problem are a multiple of 8
            float* const to = sums + (size_t)(row / 32 + warp) * problem.columns + at;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (at + 8 * i < problem.columns) *reinterpret_cast<float2*>(to + 8 * i) = {columns[2 * i], columns[2 * i + 1]};
        }
    }
    if (lane == 0) bulk_wait_read();
}
