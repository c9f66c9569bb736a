#pragma once
// A row of the states that a decoding step begins with: scale * weight[token] + position_weight[place], and what the norm in the
// next launch needs of it (linear/row_linear.cu). By a warp.
#include "common/global_memory.cuh"
#include "common/index.cuh"
#include "common/math.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"

constexpr int PACK = 8;  // elements of a pack

// As EMBEDDING in gpuattn/ops/row_embedding.py.
struct Embedding {
    const void* weight;              // (vocabulary, width), `stride` apart
    const void* position_weight;     // (places, width), `position_stride` apart; of POSITIONS
    void* y;                         // (rows, width)
    float2* statistics;              // (rows,): mean of a row and sum of squared distances from it; or null
    long long* token_flag;           // see common/index.cuh
    long long* position_flag;
    long long stride, position_stride;
    int width;                       // a multiple of PACK, up to 32 * PACK * PACKS
    int vocabulary, places;
    float scale;
};

// Whether an update makes states, of type T.
template <typename T> constexpr bool EMBEDDED = true;
template <> constexpr bool EMBEDDED<void> = false;

// Makes row i; a lane has PACKS packs of it.
template <typename T, int PACKS, bool POSITIONS>
__device__ void embed_row(const Embedding& e, int i, long long token, long long place, int lane) {
    const T* row = (const T*)e.weight + (out_of_range(token, e.vocabulary, e.token_flag) ? 0 : token) * e.stride;
    const bool wrong = POSITIONS && out_of_range(place, e.places, e.position_flag);
    const T* added = (const T*)e.position_weight + (wrong || !POSITIONS ? 0 : place) * e.position_stride;

    uint4 packs[PACKS], more[PACKS];  // loaded by one instruction each: all before the first is used
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const int column = (32 * p + lane) * PACK;
        packs[p] = more[p] = uint4{0, 0, 0, 0};
        load_16_bytes_if(column < e.width, packs[p], row + column);
        if (POSITIONS) load_16_bytes_if(column < e.width, more[p], added + column);
    }
    float value[PACKS][PACK], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const int column = (32 * p + lane) * PACK;
        u32 pairs[] = {packs[p].x, packs[p].y, packs[p].z, packs[p].w};
        const u32 others[] = {more[p].x, more[p].y, more[p].z, more[p].w};
#pragma unroll
        for (int k = 0; k < PACK; k += 2) {
            const float2 x = unpack_pair(T(), pairs[k / 2]), other = unpack_pair(T(), others[k / 2]);
            pairs[k / 2] = pack_pair(T(), e.scale * x.x + other.x, e.scale * x.y + other.y);
            const float2 rounded = unpack_pair(T(), pairs[k / 2]);  // what the norm is of
            value[p][k] = rounded.x, value[p][k + 1] = rounded.y;
            sum += rounded.x + rounded.y;  // 0 past the row's end
        }
        if (column < e.width) store_16_bytes((T*)e.y + (long long)i * e.width + column, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (!e.statistics) return;
    const float mean = warp_reduce(sum, Sum()) * reciprocal((float)e.width);
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            const float apart = (32 * p + lane) * PACK < e.width ? value[p][k] - mean : 0.f;
            squares = fmaf(apart, apart, squares);
        }
    squares = warp_reduce(squares, Sum());
    if (lane == 0) e.statistics[i] = {mean, squares};
}
