// The gradient of a bias from the gradient of all logits, after flash_attention_backward_hopper.cu: the sum over batches and
// heads that share the bias, transposed. If rows or columns share the bias, also over those of each tile.
// Constants: scalar = f16, bf16
// Launch:    grid = (ceil(queries / 64) * ceil(keys / 64) * heads * batches,), block = (256,)
// Arch: sm_90a
#include "attention/common/attention.cuh"
#include "common/tile.cuh"

constexpr int SIDE = 64, PITCH = SIDE + 1;  // of a tile
enum { NEITHER, ROWS, COLUMNS };            // what shares the bias

// Whether query i of a sequence sees key j.
__device__ __forceinline__ bool sees(const Attention& a, const Sequence& s, int i, int j) {
    const int at = i + s.offset;
    return i < s.queries && j < s.keys && j <= at + a.right && j >= at - a.left;
}

extern "C" __global__ void __launch_bounds__(256) flash_attention_backward_bias(
    const Attention a,
    const scalar* __restrict__ ds,     // (B, H, S, pitch), T of a row; undefined where masked
    void* __restrict__ dbias,          // scalar (batches, heads, T, S); if shared float, with ceil(T / 64) rows or
                                       // ceil(S / 64) columns
    int batches,                       // B, or 1 if all share the bias
    int heads,                         // H, or 1
    int shared,                        // NEITHER, ROWS or COLUMNS
    int pitch) {                       // a multiple of 8
    __shared__ __align__(16) float sums[SIDE * PITCH];
    const int across = (a.keys + SIDE - 1) / SIDE, tiles = (a.queries + SIDE - 1) / SIDE * across;
    const int tile = blockIdx.x % tiles, sheet = blockIdx.x / tiles;
    const int first_query = tile / across * SIDE, first_key = tile % across * SIDE;
    const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;  // of the transposed tile: keys row and row + 32
    const int queries = min(8, a.queries - first_query - column);

    float sum[2][8] = {};
    for (int b = batches > 1 ? sheet / heads : 0, end = batches > 1 ? b + 1 : a.sequences; b < end; ++b) {
        const Sequence s = sequence_at(a, b);
        const int low = first_query + s.offset - a.left, high = first_query + SIDE - 1 + s.offset + a.right;
        if (first_key > high || first_key + SIDE <= low) continue;
        // a window excludes one of these corners first
        const bool all = sees(a, s, first_query, first_key + SIDE - 1) && sees(a, s, first_query + SIDE - 1, first_key);
        const int head = heads > 1 ? sheet % heads : 0, count = heads > 1 ? 1 : a.heads;
        const long long line = (long long)(b * a.heads + head) * a.keys + first_key + row;
        const scalar* from = ds + line * pitch + first_query + column;
#pragma unroll 4
        for (int n = 0; n < count; ++n, from += (long long)a.keys * pitch)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (queries <= 0 || first_key + row + 32 * half >= a.keys) continue;
                const uint4 x = *(const uint4*)(from + 32 * half * pitch);
                const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float2 pair = unpack_pair(scalar(), pairs[i / 2]);
                    const bool seen = all || sees(a, s, first_query + column + i, first_key + row + 32 * half);
                    if (seen) sum[half][i] += i % 2 ? pair.y : pair.x;
                }
            }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[(row + i / 8 * 32) * PITCH + column + i % 8] = sum[i / 8][i % 8];
    __syncthreads();

    if (shared != NEITHER) {
        const bool rows = shared == ROWS;
        const int n = threadIdx.x, at = (rows ? first_key : first_query) + n;
        if (n >= SIDE || at >= (rows ? a.keys : a.queries)) return;
        float total = 0.f;
        for (int i = 0; i < SIDE; ++i) total += rows ? sums[n * PITCH + i] : sums[i * PITCH + n];
        const long long line = rows ? blockIdx.x / across : sheet * (long long)a.queries + at;
        ((float*)dbias)[rows ? line * a.keys + at : line * across + tile % across] = total;
        return;
    }
    const int query = threadIdx.x / 4, key = threadIdx.x % 4 * 16, keys = a.keys - first_key - key;
    if (first_query + query >= a.queries) return;
    scalar* to = (scalar*)dbias + ((long long)sheet * a.queries + first_query + query) * a.keys + first_key + key;
    u32 pairs[8];
#pragma unroll
    for (int i = 0; i < 16; i += 2)
        pairs[i / 2] = pack_pair(scalar(), sums[(key + i) * PITCH + query], sums[(key + i + 1) * PITCH + query]);
    if (a.keys % 8 == 0 && keys >= 16) {
        *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        *(uint4*)(to + 8) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < keys) to[i].bits = (unsigned short)(pairs[i / 2] >> 16 * (i % 2));
    }
}
