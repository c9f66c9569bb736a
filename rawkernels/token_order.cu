// The tokens in the order of their ids; equal ids keep their order: order[place] is the index of a token.
// A token's place is a count: of the tokens before it whose id is not greater, and of those after it whose id is less.
// That is n^2 comparisons in one launch; for more tokens than ORDERED in gpuattn/ops/embedding.py a sort is faster.
// Constants: token = int, long long; BLOCK = 64; PARTS = 4
// Launch:    grid = (ceil(tokens / BLOCK),), block = (BLOCK * PARTS,). A block places BLOCK tokens; PARTS threads share
//            one, each counts in a part of every tile of TILE ids.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/pack.cuh"

constexpr int TILE = 1024, PART = TILE / PARTS, N = 16 / sizeof(token);
static_assert(TILE % BLOCK == 0, "token_order.cu: one tile alone holds ids both before and after a block's tokens");

// How many ids of a thread's part of a tile `accepts` returns true for; it gets an id and its index in the tile.
template <typename Accepts>
__device__ inline int counted(const token* tile, int first, Accepts accepts) {
    int count = 0;
#pragma unroll 8
    for (int at = first; at < first + PART; at += N) {
        const Pack<token, N> ids = load_pack<N>(tile + at);
#pragma unroll
        for (int i = 0; i < N; ++i) count += accepts(ids.x[i], at + i);
    }
    return count;
}

extern "C" __global__ void __launch_bounds__(BLOCK * PARTS) token_order(
    const token* __restrict__ ids,  // (tokens,)
    int* __restrict__ order,        // (tokens,)
    int tokens) {
    __shared__ __align__(16) token tile[TILE];
    __shared__ int counts[PARTS * BLOCK];
    const int mine = threadIdx.x % BLOCK, part = threadIdx.x / BLOCK;
    const int index = blockIdx.x * BLOCK + mine, first = part * PART;
    const token id = index < tokens ? ids[index] : token(0);
    int count = 0;
#pragma unroll 1
    for (int begin = 0; begin < tokens; begin += TILE) {
        __syncthreads();  // the previous tile has been read
        for (int at = threadIdx.x; at < TILE; at += BLOCK * PARTS)
            if (begin + at < tokens) tile[at] = ids[begin + at];
        __syncthreads();
        if (begin + TILE <= index - mine)
            count += counted(tile, first, [&](token other, int) { return other <= id; });
        else if (begin > index && begin + TILE <= tokens)
            count += counted(tile, first, [&](token other, int) { return other < id; });
        else
            count += counted(tile, first, [&](token other, int at) {
                return begin + at < tokens && (begin + at < index ? other <= id : other < id);
            });
    }
    counts[threadIdx.x] = count;
    __syncthreads();
    if (part || index >= tokens) return;
    for (int other = 1; other < PARTS; ++other) count += counts[other * BLOCK + mine];
    order[count] = index;
}
