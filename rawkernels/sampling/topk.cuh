#pragma once
// The exact k largest of many numbers, by LightSeq's hierarchical search (Wang et al., 2021): retrieve a lower bound from the
// maxima of groups of threads, filter the elements that reach it, re-rank these few.
// Every warp of every block runs this code, so it is written for few instructions.
#include "common/global_memory.cuh"
#include "common/reduce.cuh"

// Floats as integers of the same order, with NaN greatest; the result is never 0.
__device__ inline unsigned int ordered(float value) {
    const unsigned int bits = __float_as_uint(value + 0.f);  // -0 + 0 = +0
    return value != value ? ~1u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_ordered(unsigned int bits) {
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// A number and its index as one integer: a greater number gives a greater key, then a lower index does. A key of 0 means
// no element.
using Key = unsigned long long;
__device__ inline Key make_key(float value, unsigned int index) { return (Key)ordered(value) << 32 | ~index; }
__device__ inline float key_value(Key key) { return from_ordered((unsigned int)(key >> 32)); }
__device__ inline unsigned int key_index(Key key) { return ~(unsigned int)key; }
// The upper 32 bits of a list's element, 0 for no element.
__device__ inline unsigned int leading(Key key) { return (unsigned int)(key >> 32); }

// Retrieve: the k-th largest of the groups' maxima, k <= BLOCK / 2. At least k elements reach it, so none of the k largest is
// below it. Small k use few groups, because ranking groups costs more than additional candidates.
// A barrier is needed between two calls.
template <int BLOCK>
__device__ unsigned int retrieve(unsigned int greatest, int k) {
    __shared__ unsigned int of_thread[BLOCK];
    __shared__ unsigned int group[BLOCK];
    __shared__ unsigned int bound;
    const int me = threadIdx.x, lane = me % 32;
    of_thread[me] = greatest;
    __syncthreads();
    if (k <= 16) {
        if (me < 32) {
            unsigned int mine = 0;
#pragma unroll
            for (int t = lane; t < BLOCK; t += 32) mine = max(mine, of_thread[t]);
            const unsigned int unique = (mine & ~31u) | lane;
            int rank = 0;
#pragma unroll 8
            for (int g = 0; g < 32; ++g) rank += __shfl_sync(~0u, unique, g) > unique;
            mine = warp_min(rank < k ? mine : ~0u);  // exact up to the five bits that `unique` replaces
            if (me == 0) bound = mine;
        }
        __syncthreads();
        return bound;
    }
    int groups = 64;
    while (groups < 2 * k) groups *= 2;
    unsigned int mine = 0;
    if (me < groups)
        for (int t = me; t < BLOCK; t += groups) mine = max(mine, of_thread[t]);
    group[me] = mine;
    __syncthreads();
    if (me < groups) {
        int rank = 0;
#pragma unroll 8
        for (int g = 0; g < groups; ++g) rank += group[g] + (g < me) > mine;
        if (rank == k - 1) bound = mine;
    }
    __syncthreads();
    return bound;
}

// The same for k <= 16 in a block of many warps, to which all of them contribute: no thread makes more than a few steps. The
// bound is lower by up to 31 units of `greatest`; where all are 0, it is 0.
template <int BLOCK>
__device__ unsigned int retrieve_few(unsigned int greatest, int k) {
    __shared__ unsigned int group[32];
    __shared__ unsigned int bound;
    const unsigned int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) group[lane] = 0;
    __syncthreads();
    atomicMax(group + lane, greatest);
    __syncthreads();
    const unsigned int unique = (group[lane] & ~31u) | lane;
#pragma unroll
    for (int first = 0; first < 32; first += BLOCK / 32) {
        const unsigned int mine = __shfl_sync(~0u, unique, first + warp);
        if (__popc(__ballot_sync(~0u, unique > mine)) == k - 1 && lane == 0) bound = mine & ~31u;
    }
    __syncthreads();
    return bound;
}

// Filtered elements in shared memory, in any order.
template <typename T, int ROOM>
struct Candidates {
    T* list;     // (ROOM,)
    int* count;  // number of elements added; those beyond ROOM are not in the list

    __device__ void add(T candidate) const {
        const int place = atomicAdd(count, 1);
        if (place < ROOM) list[place] = candidate;
    }
    __device__ bool complete() const { return *count <= ROOM; }

    // Re-rank: an element's place is the number of greater candidates; all candidates differ. A thread compares a candidate
    // with all, or in a block of many warps a warp does, which is sooner if they are few.
    template <int BLOCK, typename Write>
    __device__ void re_rank(int k, const Write& write) const {
        const int n = *count;
#pragma unroll 1
        for (int c = threadIdx.x; c < n; c += BLOCK) {
            const T mine = list[c];
            int rank = 0;
#pragma unroll 4
            for (int other = 0; other < n; ++other) rank += list[other] > mine;
            if (rank < k) write(rank, mine);
        }
    }
    template <int BLOCK, typename Write>
    __device__ void re_rank_by_warps(int k, const Write& write) const {
        const int n = *count, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int c = threadIdx.x / 32; c < n; c += BLOCK / 32) {
            const T mine = list[c];
            int rank = 0;
#pragma unroll 1
            for (int first = 0; first < n; first += 32)
                rank += __popc(__ballot_sync(~0u, first + lane < n && list[first + lane] > mine));
            if (lane == 0 && rank < k) write(rank, mine);
        }
    }
};

// The slow path, for when the largest elements are concentrated in a few groups: k passes over at(0) .. at(n - 1), each of
// which selects the next one. T{} means no element; `room` takes BLOCK elements.
template <int BLOCK, typename T, typename At, typename Write>
__device__ void select_one_by_one(const At& at, int n, int k, T* room, const Write& write) {
    T last{};
#pragma unroll 1
    for (int r = 0; r < k; ++r) {
        T greatest{};
#pragma unroll 1
        for (int j = threadIdx.x; j < n; j += BLOCK) {
            const T mine = at(j);
            if ((r == 0 || last > mine) && mine > greatest) greatest = mine;
        }
        room[threadIdx.x] = greatest;
#pragma unroll 1
        for (int half = BLOCK / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half && room[threadIdx.x + half] > room[threadIdx.x])
                room[threadIdx.x] = room[threadIdx.x + half];
        }
        __syncthreads();
        last = room[0];
        if (threadIdx.x == 0) write(r, last);
        __syncthreads();
    }
}

// Returns in all threads whether this is the last of `blocks` blocks to call; the last one sees what the others wrote before.
// The ticket is 0 before the first call and again after the last.
__device__ inline bool last_of(unsigned int* ticket, unsigned int blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = increment_acq_rel(ticket, blocks - 1) == blocks - 1;
    __syncthreads();
    return last;
}
