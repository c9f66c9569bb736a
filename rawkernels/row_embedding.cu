// The states that a decoding step begins with: y[i] = scale * weight[tokens[i]] + position_weight[positions[i]], and what the
// norm in the next launch needs of them (linear/row_linear.cu). With BEAMS other blocks list the rows of the caches that the
// beams of a sentence see, for the attentions of the step.
// Constants: scalar = f16, bf16; PACKS = 1, 2, 3; POSITIONS = false, true; BEAMS = false
// Constants: scalar = f16, bf16; PACKS = 1, 2, 3; POSITIONS = true; BEAMS = true
// Launch:    grid = (ceil(rows / WARPS),), and with BEAMS a block for each sentence behind them; block = (32 * WARPS,). A warp
//            per row; a lane has PACKS packs of it, PACKS the least that suffices.
//            dependent: row_embedding
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
//
// The next launch may start at once: it loads its weights while this one runs. It starts when this one has waited, so all that
// came before is over then.
#include "attention/cache/seen_rows.cuh"
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"
#include "common/index.cuh"
#include "common/math.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 4, EACH = 8;  // rows of a block; elements of a pack

// Lists the rows that the beams of a sentence see, up to their newest keys, and writes how many they are.
__device__ void list_rows(const short* slots, int old_keys, u32* listed, int* listed_count, int beam, int room) {
    int filled = 0;
    for (int start = 0; start < old_keys; start += 32 * WARPS) {
        const int key = start + threadIdx.x;
        Holders holders;
        holders.load(slots, beam, room, key);
        const auto put = [&](int place, int of, u32 seeing) { listed[place] = (u32)(of * room + key) | seeing << 24; };
        filled = list_rows_of_keys<32 * WARPS>(holders, beam, key < old_keys, filled, start / (32 * WARPS), put);
    }
    if (threadIdx.x == 0) *listed_count = filled;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) row_embedding(
    const int* tokens,              // (rows,)
    const int* positions,           // (rows,)
    const scalar* weight,           // (vocabulary, width), `stride` apart
    const scalar* position_weight,  // (places, width), `position_stride` apart, of POSITIONS
    scalar* y,                      // (rows, width)
    float2* statistics,             // (rows,): mean of a row and sum of squared distances from it; or null
    const int* key_counts,          // (rows,), with BEAMS: keys of a text with the new one
    const short* slots,             // (sentences, beam, room): see attention/cache/step_attention.cu
    u32* listed,                    // (sentences, beam * room): the rows of old keys, see seen_rows.cuh
    int* listed_counts,             // (sentences,): how many they are
    int beam,
    int room,
    int rows,
    int width,                      // a multiple of EACH, up to 32 * EACH * PACKS
    int vocabulary,
    int places,
    long long stride,
    long long position_stride,
    float scale,
    long long* token_flag,
    long long* position_flag) {
    grid_dependency_wait();
    grid_launch_dependents();
    const int blocks = (rows + WARPS - 1) / WARPS;
    if (BEAMS && blockIdx.x >= blocks) {
        const int sentence = blockIdx.x - blocks;
        const long long first = (long long)sentence * beam;
        const int old_keys = min(key_counts[first], room) - 1;
        list_rows(slots + first * room, old_keys, listed + first * room, listed_counts + sentence, beam, room);
        return;
    }
    const int i = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= rows) return;
    const long long token = tokens[i], place = POSITIONS ? positions[i] : 0;
    const scalar* row = weight + (out_of_range(token, vocabulary, token_flag) ? 0 : token) * stride;
    const bool wrong = POSITIONS && out_of_range(place, places, position_flag);
    const scalar* added = position_weight + (wrong ? 0 : place) * position_stride;

    uint4 packs[PACKS], more[PACKS];  // loaded by one instruction each: all before the first is used
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const int column = (32 * p + lane) * EACH;
        packs[p] = more[p] = uint4{0, 0, 0, 0};
        load_16_bytes_if(column < width, packs[p], row + column);
        if (POSITIONS) load_16_bytes_if(column < width, more[p], added + column);
    }
    float value[PACKS][EACH], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const int column = (32 * p + lane) * EACH;
        u32 pairs[] = {packs[p].x, packs[p].y, packs[p].z, packs[p].w};
        const u32 others[] = {more[p].x, more[p].y, more[p].z, more[p].w};
#pragma unroll
        for (int k = 0; k < EACH; k += 2) {
            const float2 x = unpack_pair(scalar(), pairs[k / 2]), other = unpack_pair(scalar(), others[k / 2]);
            pairs[k / 2] = pack_pair(scalar(), scale * x.x + other.x, scale * x.y + other.y);
            const float2 rounded = unpack_pair(scalar(), pairs[k / 2]);  // what the norm is of
            value[p][k] = rounded.x, value[p][k + 1] = rounded.y;
            sum += rounded.x + rounded.y;  // 0 past the row's end
        }
        if (column < width) store_16_bytes(y + (long long)i * width + column, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (!statistics) return;
    const float mean = warp_reduce(sum, Sum()) * reciprocal((float)width);
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const float apart = (32 * p + lane) * EACH < width ? value[p][k] - mean : 0.f;
            squares = fmaf(apart, apart, squares);
        }
    squares = warp_reduce(squares, Sum());
    if (lane == 0) statistics[i] = {mean, squares};
}
