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
constexpr int WINNERS = MOST_CHOSEN + 32;  // the room for them: behind them are some that weigh nothing
constexpr int CANDIDATES = 64;             // a list of candidates is filled up by keys of 0 to a multiple of this number

// The sum over LANES adjacent lanes.
template <int LANES, typename T>
__device__ __forceinline__ T sum_of_lanes(T mine) {
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) mine += __shfl_xor_sync(~0u, mine, other);
    return mine;
}

// Samples a token from the n keys of `packed`, among which are the k largest of the row; k is at most BLOCK and MOST_CHOSEN.
// `winners`: shared memory for WINNERS. All threads have passed a barrier since `packed` was written and `winners` read.
// Few warps wait here for each other and for shared memory: LANES adjacent lanes share the work of a candidate, and loops
// have no remainders, because what fills up the lists changes no result.
template <int BLOCK>
__device__ void draw_from(
    const Key* packed, int n, Winner* winners, const Weights& weight, int k, unsigned int top_p, Mass min_p,
    unsigned int word, int* token, float* logprob, float log_total) {
    constexpr int LANES = BLOCK >= 512 ? 8 : BLOCK / 64, EACH = 4;  // loads of a lane at a time
    static_assert(CANDIDATES % (2 * EACH * LANES) == 0 && CANDIDATES % (32 / LANES) == 0 && WINNERS - MOST_CHOSEN == 32);
    struct alignas(16) Pair { Key a, b; };
    const int me = threadIdx.x, part = me % LANES, in_warp = me % 32 / LANES;
    const Mass least = top_p ? 0 : min_p;  // that a winner keeps; with top-p the masses before it count
    if (me < 32) winners[k + me] = {};
#pragma unroll 1
    for (int c = me / LANES; c - in_warp < n; c += BLOCK / LANES) {  // the same in a warp
        const Key mine = packed[c];  // or 0, whose place is n
        int place = 0, more = 0;  // two chains of additions
#pragma unroll 1
        for (int first = part; 2 * (first - part) < n; first += EACH * LANES)
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const Pair other = ((const Pair*)packed)[first + i * LANES];
                place += other.a > mine;
                more += other.b > mine;
            }
        place = sum_of_lanes<LANES>(place + more);
        if (part == 0 && place < k) {
            const float logit = key_value(mine);
            const Mass mass = weight(logit);
            winners[place] = {mass >= least ? mass : 0, (int)key_index(mine), logit};
        }
    }
    __syncthreads();
    if (top_p) {  // in the order of keys
        Mass mine = me < k ? winners[me].mass : 0, all;
        const Mass before = sum_before<BLOCK / 32>(mine >> COARSE, &all);
        if (before >= max(__umul64hi(all, (Mass)top_p << 32), 1ull) || mine < min_p) mine = 0;
        if (me < k) winners[me].mass = mine;
        __syncthreads();
    }
#pragma unroll 1
    for (int c = me / LANES; c - in_warp < k; c += BLOCK / LANES) {
        const Winner mine = winners[c];
        Mass before = 0, all = 0;  // in the order of tokens
#pragma unroll 1
        for (int first = part; first - part < k; first += EACH * LANES)
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const Winner other = winners[first + i * LANES];
                all += other.mass;
                if (other.token < mine.token) before += other.mass;
            }
        before = sum_of_lanes<LANES>(before);
        all = sum_of_lanes<LANES>(all);
        const Mass target = __umul64hi(all, (Mass)word << 32);
        if (part == 0 && c < k && before <= target && target < before + mine.mass) {
            *token = mine.token;
            *logprob = mine.logit - log_total;
        }
    }
}
