// The queries norm(x) W^T + bias of a decoding step's rows, and their attention over a memory of each sentence, which no step
// changes. A block has a head of some sentences: ROWS rows of x at most, a row being a beam of a sentence.
// Weights, keys and values do not change while texts are decoded, so all are loaded before the wait for the kernel before,
// the weights to registers: what wrote them was over before the kernel before this one, row_linear.cu, started.
// A warp has 64 inputs of the product; sums of warps are added up in shared memory. A norm is applied behind the product, see
// linear/row_linear.cu. Then a sentence has one, two or four warps, each with a part of the elements of its values. Logits
// are products of 16 keys (operand a) and 8 columns (operand b), a column being a row of the sentence; outputs are products of
// values (operand a) and weights.
// Constants: scalar = f16, bf16; HEAD_DIM = 32, 64; WARPS = 1, 2, 4, 6, 8, 12; ROWS = 8, 16
// Launch:    grid = (heads, ceil(sentences / PER_BLOCK)), block = (32 * WARPS,), shared = OWN + PER_BLOCK * 2 * TILE bytes
//            dependent: projected_attention
// Arch: sm_90a
#include "attention/cache/columns.cuh"
#include "common/cp_async.cuh"
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"
#include "common/mma_sync.cuh"
#include "common/tile.cuh"
#include "linear/row_parts.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TILES = HEAD_DIM / 16, COLUMNS = 8, GROUPS = ROWS / COLUMNS;  // products of 16 outputs and 8 rows
constexpr int PITCH = HEAD_DIM + 4;                 // sums of a row
constexpr int QUERY = HEAD_DIM * 2 + 16;            // bytes of a row's query
constexpr int KEY = 128;                            // bytes of a key: tiles of keys are swizzled
constexpr int KEYS = 32;                            // of a step of the softmax
constexpr int BLOCKS_AT_ONCE = WARPS == 8 ? 2 : 12 / WARPS;  // of a multiprocessor, by their registers

// Shared memory: sums of warps, queries, a norm's part of outputs and of rows, keys and values of each sentence.
constexpr int QUERIES = 4 * WARPS * ROWS * PITCH, FOLDED = QUERIES + ROWS * QUERY, KNOWN = FOLDED + 8 * HEAD_DIM;
constexpr int OWN = (KNOWN + 8 * ROWS + 127) / 128 * 128;

// The mean of a row and 1 / its standard deviation, from those of `parts` equal parts, by 16 lanes.
__device__ __forceinline__ float2 joined(const float2* parts_of_row, int parts, int width, float eps) {
    RowParts row = {parts_of_row[0].x};
    for (int i = threadIdx.x % 16; i < parts; i += 16) row.add(parts_of_row[i]);
#pragma unroll
    for (int by = 1; by < 16; by <<= 1) {
        row.apart += __shfl_xor_sync(~0u, row.apart, by), row.squares += __shfl_xor_sync(~0u, row.squares, by);
        row.within += __shfl_xor_sync(~0u, row.within, by);
    }
    return row.joined(parts, width, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) projected_attention(
    const scalar* x,           // (rows, 64 * WARPS)
    const scalar* weight,      // (heads * HEAD_DIM, 64 * WARPS)
    const scalar* bias,        // (heads * HEAD_DIM,) or null
    const float2* folded,      // (heads * HEAD_DIM,): bias and sum of a row of weights, of a norm of x; or null
    const float2* statistics,  // (rows, parts) of x, with `folded`
    const scalar* k,           // (sentences, room, heads, HEAD_DIM)
    const scalar* v,
    const int* key_lengths,    // (sentences,): 1 to room
    scalar* out,               // (rows, heads, HEAD_DIM)
    int sentences,
    int beam,                  // rows of a sentence, at most COLUMNS
    int per_block,             // sentences of a block: at most ROWS / beam
    int room,
    int parts,
    float eps,
    float scale) {
    const u32 shared = shared_tiles();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.x, heads = gridDim.x, first = blockIdx.y * per_block;
    const int count = min(per_block, sentences - first), rows = count * beam;
    const int tile = (room + 15) / 16 * 16 * KEY;  // bytes of the keys of a sentence
    const long long first_row = (long long)first * beam;
    constexpr int inputs = 64 * WARPS;
    x += first_row * inputs, statistics += first_row * parts;
    out += (first_row * heads + head) * HEAD_DIM;

    // ---- before the wait: weights, keys and values
    uint4 weights[TILES][2][2];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const int output = head * HEAD_DIM + 16 * m + 8 * half + g;
                weights[m][half][p] = load_16_bytes(weight + (long long)output * inputs + warp * 64 + 32 * p + 8 * t);
            }
    // warps of a sentence, a power of two
    int team = WARPS >= 4 * per_block ? 4 : WARPS >= 2 * per_block ? 2 : 1;
    if (team > TILES) team = TILES;
    const int member = warp % team;
    for (int own = warp / team; own < count; own += WARPS / team) {
        const int keys = min(max(key_lengths[first + own], 1), room);
        constexpr int CHUNKS = HEAD_DIM / 8;
        const u32 to = shared + OWN + own * 2 * tile;
        const long long from = (long long)(first + own) * room * heads * HEAD_DIM + head * HEAD_DIM;
#pragma unroll 4
        for (int i = member * 32 + lane; i < keys * CHUNKS; i += 32 * team) {
            const int key = i / CHUNKS, chunk = i % CHUNKS;
            const long long at = from + (long long)key * heads * HEAD_DIM + 8 * chunk;
            cp_async_16(chunk_address<0>(to, key, chunk), k + at);
            cp_async_16(chunk_address<0>(to + tile, key, chunk), v + at);
        }
        // keys that are not there have a weight of 0, which does not hide a value that is not finite
        for (int i = keys * 8 + member * 32 + lane; i < (keys + 15) / 16 * 16 * 8; i += 32 * team)
            store_shared(to + tile + 16 * i, 0.f, 0.f, 0.f, 0.f);
    }
    cp_async_commit();
    for (int i = threadIdx.x; i < HEAD_DIM; i += THREADS) {
        const int output = head * HEAD_DIM + i;
        store_shared(shared + FOLDED + 8 * i, folded ? folded[output] : float2{bias ? (float)bias[output] : 0.f, 0.f});
    }

    grid_dependency_wait();
    grid_launch_dependents();
    // ---- the product
    uint4 of_x[GROUPS][2];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const int row = min(8 * j + g, rows - 1);
            of_x[j][p] = load_16_bytes(x + (long long)row * inputs + warp * 64 + 32 * p + 8 * t);
        }
    if (folded)
        for (int row = threadIdx.x / 16; row < ROWS; row += THREADS / 16) {
            const float2 known = joined(statistics + (long long)min(row, rows - 1) * parts, parts, inputs, eps);
            if (threadIdx.x % 16 == 0) store_shared(shared + KNOWN + 8 * row, known);
        }
    float sums[GROUPS][TILES][4] = {};
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            const uint4 low = weights[m][0][p], high = weights[m][1][p];
            const u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                mma(scalar(), sums[j][m], a, of_x[j][p].x, of_x[j][p].y);
                mma(scalar(), sums[j][m], b, of_x[j][p].z, of_x[j][p].w);
            }
        }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 8 * j + 2 * t + i % 2;
                store_shared(shared + 4 * ((warp * ROWS + row) * PITCH + 16 * m + 8 * (i / 2) + g), __float_as_uint(sums[j][m][i]));
            }
    __syncthreads();
    for (int row = warp; row < rows; row += WARPS) {
        if (2 * lane >= HEAD_DIM) continue;
        float2 sum = {0.f, 0.f}, known = {0.f, 1.f};
        if (folded) known = load_shared_float2(shared + KNOWN + 8 * row);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 more = load_shared_float2(shared + 4 * ((w * ROWS + row) * PITCH + 2 * lane));
            sum.x += more.x, sum.y += more.y;
        }
        const float2 even = load_shared_float2(shared + FOLDED + 16 * lane), odd = load_shared_float2(shared + FOLDED + 16 * lane + 8);
        sum.x = fmaf(fmaf(-known.x, even.y, sum.x), known.y, even.x);
        sum.y = fmaf(fmaf(-known.x, odd.y, sum.y), known.y, odd.x);
        store_shared(shared + QUERIES + row * QUERY + 4 * lane, pack_pair(scalar(), sum.x, sum.y));
    }
    cp_async_wait<0>();
    __syncthreads();

    // ---- attention
    scale *= LOG2E;
    for (int own = warp / team; own < count; own += WARPS / team) {
        const u32 k_tile = shared + OWN + own * 2 * tile, v_tile = k_tile + tile;
        const int keys = min(max(key_lengths[first + own], 1), room);
        u32 query[TILES / 2][4];  // of 32 elements each
#pragma unroll
        for (int p = 0; p < TILES / 2; ++p)
            ldmatrix(query[p], shared + QUERIES + (own * beam + min(lane % 8, beam - 1)) * QUERY + 64 * p + lane / 8 * 16);
        float acc[TILES][4] = {}, top[2] = {NEG_INF, NEG_INF}, total[2] = {};
#pragma unroll 1
        for (int start = 0; start < keys; start += KEYS) {
            float logits[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (start + 16 * n >= keys) continue;
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    u32 a[4];
                    ldmatrix(a, chunk_address<0>(k_tile, start + 16 * n + lane % 16, 2 * m + lane / 16));
                    mma(scalar(), logits[n], a, query[m / 2][m % 2 * 2], query[m / 2][m % 2 * 2 + 1]);
                }
            }
            float most[2] = {top[0], top[1]};
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool there = start + 16 * n + 8 * (i / 2) + g < keys;
                    logits[n][i] = there ? logits[n][i] * scale : NEG_INF;
                    most[i % 2] = fmaxf(most[i % 2], logits[n][i]);
                }
            float base[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                most[c] = most_of_columns(most[c]);
                base[c] = most[c] == NEG_INF ? 0.f : most[c];
                const float correction = exp2_fast(top[c] - base[c]);
                top[c] = most[c], total[c] *= correction;
#pragma unroll
                for (int m = 0; m < TILES; ++m) acc[m][c] *= correction, acc[m][c + 2] *= correction;
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (start + 16 * n >= keys) continue;
                u32 of_keys[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float left = exp2_fast(logits[n][2 * half] - base[0]);
                    const float right = exp2_fast(logits[n][2 * half + 1] - base[1]);
                    total[0] += left, total[1] += right;
                    of_keys[half] = movmatrix(pack_pair(scalar(), left, right));
                }
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    if (m % team != member) continue;
                    u32 a[4];
                    const int key = start + 16 * n + lane % 8 + lane / 16 * 8;
                    ldmatrix_transposed(a, chunk_address<0>(v_tile, key, 2 * m + lane / 8 % 2));
                    mma(scalar(), acc[m], a, of_keys[0], of_keys[1]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) total[c] = 1.f / sum_of_columns(total[c]);
        scalar* to = out + (long long)(own * beam + g) * heads * HEAD_DIM + 2 * t;
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            if (m % team != member) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 pair = pack_pair(scalar(), acc[m][2 * half] * total[0], acc[m][2 * half + 1] * total[1]);
                const u32 of_row = movmatrix(pair);
                if (g < beam) *reinterpret_cast<u32*>(to + 16 * m + 8 * half) = of_row;
            }
        }
    }
}
