#pragma once
// What the kernels that sample tokens share: weights, filters, and the choice of a token by its cumulative weight.
#include "common/philox.cuh"
#include "sampling/logits.cuh"
#include "sampling/topk.cuh"

// Weights are integers, exp((x - peak) / T) * 2^40: their sums are exact and independent of the order.
using Mass = unsigned long long;
constexpr float ONE = 1099511627776.f;
constexpr int COARSE = 9;  // masses for top-p are in units of 2^-31: atomics on shared memory add 32 bits

struct Weights {
    float peak, inverse_temperature;

    __device__ Mass operator()(float logit) const {
        // converted by 32 bits: from 2^-8 on the last bit of a float is at least 2^-31, so nothing is lost
        const float x = expf((logit - peak) * inverse_temperature);
        const bool small = x < 0.00390625f;
        return (Mass)__float2uint_rn(x * (small ? ONE : ONE / 512.f)) << (small ? 0 : 9);
    }
};

// A filter: keep the keys (see `ordered`) above `key`, and of those equal to it the first `ties`.
struct Cut { unsigned int key; int ties; };

// The filter whose last key is `key`, which adds `left`, more than 0, in units of `each`.
__device__ inline Cut cut_at(unsigned int key, Mass left, Mass each) {
    return {key, (int)min((left + each - 1) / each, 0x7fffffffull)};
}

// The tokens that are kept, with their weights.
struct Kept {
    Weights weight;
    Cut cut;
    Mass min_p, each;  // of a token that equals the cut, if min_p keeps it

    __device__ Kept(Weights weight, Cut cut, Mass min_p) : weight(weight), cut(cut), min_p(min_p) {
        const Mass tie = cut.key ? weight(from_ordered(cut.key)) : 0;
        each = tie >= min_p ? tie : 0;
    }
    __device__ Mass operator()(float logit) const {  // of a token that does not equal the cut
        if (ordered(logit) <= cut.key) return 0;
        const Mass mass = weight(logit);
        return mass >= min_p ? mass : 0;
    }
    __device__ bool ties(float logit) const { return ordered(logit) == cut.key; }
};

// The sums over the lanes up to this one.
template <typename T>
__device__ T sums_up_to(T mine) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(~0u, mine, step);
        if (lane >= step) mine += other;
    }
    return mine;
}

// Finds the part of a row in which the cumulative weight passes a target, from larger to smaller parts. All lanes of a warp
// call it; each passes the weight of its part without ties, and the number of its ties.
struct Search {
    Mass target;
    int ties_before;  // in all parts before

    // Returns the lane whose part holds the target, or -1: it lies behind all 32 parts. With `random` the target becomes that
    // share / 2^32 of the weight of all parts.
    __device__ int operator()(Mass mass, int equal, const Kept& kept, const unsigned int* random = nullptr) {
        const int reached_ties = sums_up_to(equal) + ties_before, before = reached_ties - equal;
        const Mass mine = mass + kept.each * (min(reached_ties, kept.cut.ties) - min(before, kept.cut.ties));
        const Mass reached = sums_up_to(mine), all = __shfl_sync(~0u, reached, 31);
        if (random) target = __umul64hi(all, (Mass)*random << 32);
        const int chosen = __ffs(__ballot_sync(~0u, reached > target)) - 1;
        target -= chosen < 0 ? all : __shfl_sync(~0u, reached - mine, chosen);
        ties_before = chosen < 0 ? __shfl_sync(~0u, reached_ties, 31) : __shfl_sync(~0u, before, chosen);
        return chosen;
    }
};

// Returns the sum of `mine` over the threads before this one; *all becomes the sum over all threads.
template <int WARPS>
__device__ Mass sum_before(Mass mine, Mass* all) {
    __shared__ Mass of_warp[WARPS];
    const Mass sum = sums_up_to(mine);
    __syncthreads();  // `of_warp` may still be read by the previous call
    if (threadIdx.x % 32 == 31) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    Mass before = 0;
    *all = 0;
#pragma unroll 4
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp == threadIdx.x / 32) before = *all;
        *all += of_warp[warp];
    }
    return before + sum - mine;
}

// The random number of a row.
__device__ inline unsigned int row_word(
    int row, const int* numbers, const uint4* keys, unsigned int seed_low, unsigned int seed_high, unsigned int stream,
    unsigned int step, const unsigned int* device_step) {
    PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    if (keys) key = {keys[row].x, keys[row].y, keys[row].z, keys[row].w};
    return philox(key, numbers ? numbers[row] : row, 0).x;
}

constexpr int MOST_CHOSEN = 200;  // the largest k for which the candidates for the k largest are gathered
struct alignas(16) Winner { Mass mass; int token; float logit; };

// Samples a token from the n keys of `packed`, among which are the k largest of the row; k is at most BLOCK and MOST_CHOSEN.
// `winners`: shared memory for k.
template <int BLOCK>
__device__ void draw_from(
    const Key* packed, int n, Winner* winners, const Weights& weight, int k, unsigned int top_p, Mass min_p,
    unsigned int word, int* token, float* logprob, float log_total) {
    const int me = threadIdx.x;
#pragma unroll 1
    for (int c = me; c < n; c += BLOCK) {
        const Key mine = packed[c];
        int place = 0;
#pragma unroll 8
        for (int other = 0; other < n; ++other) place += packed[other] > mine;
        if (place < k) winners[place] = {weight(key_value(mine)), (int)key_index(mine), key_value(mine)};
    }
    __syncthreads();
    const bool there = me < k;
    Winner mine = there ? winners[me] : Winner{};
    Mass all;
    if (top_p) {
        const Mass before = sum_before<BLOCK / 32>(mine.mass >> COARSE, &all);
        if (before >= max(__umul64hi(all, (Mass)top_p << 32), 1ull)) mine.mass = 0;
    }
    if (mine.mass < min_p) mine.mass = 0;
    if (there) winners[me].mass = mine.mass;
    sum_before<BLOCK / 32>(mine.mass, &all);  // passes barriers
    const Mass target = __umul64hi(all, (Mass)word << 32);
    Mass before = 0;
#pragma unroll 4
    for (int other = 0; other < k; ++other)
        if (winners[other].token < mine.token) before += winners[other].mass;
    if (there && before <= target && target < before + mine.mass) {
        *token = mine.token;
        *logprob = mine.logit - log_total;
    }
}
