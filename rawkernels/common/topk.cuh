#pragma once
// The log-softmax's normaliser of a row, and its k best, exactly, by a block of threads.
#include "common/reduce.cuh"

// A number and its index as one integer: the greater number first (NaN before all), then the lower
// index. No key is 0: that stands for nothing.
using Key = unsigned long long;

__device__ inline Key make_key(float value, unsigned int index) {
    unsigned int bits = __float_as_uint(value + 0.f);  // -0 + 0 = +0
    bits = value != value ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (Key)bits << 32 | ~index;
}

__device__ inline float key_value(Key key) {
    unsigned int bits = (unsigned int)(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

__device__ inline unsigned int key_index(Key key) { return ~(unsigned int)key; }

struct LogSum { float peak, log; };  // log-probability = x - peak - log

template <int BLOCK, typename T>
__device__ LogSum block_log_sum(const T* x, int n) {
    float peak = NEG_INF;
    for (int j = threadIdx.x; j < n; j += BLOCK) peak = fmaxf(peak, (float)x[j]);
    peak = block_reduce<BLOCK>(peak, Max{}, NEG_INF);
    if (peak == NEG_INF) peak = 0.f;  // nothing but -inf: exp(-inf - 0) = 0, and NaN stays NaN
    float total = 0.f;
    for (int j = threadIdx.x; j < n; j += BLOCK) total += expf((float)x[j] - peak);
    total = block_reduce<BLOCK>(total, Sum{}, 0.f);
    return {peak, total == 0.f ? 0.f : logf(total)};
}

// best[0 .. k) = the greatest of key(0) .. key(n - 1), in order; k <= n and k <= BLOCK / 2. Keys
// differ, but for zeros, which come last and fill no place. `best` is written when this returns.
// Hierarchical auto-regressive search (Wang et al., "LightSeq", 2021), with a group per thread.
template <int BLOCK, typename KeyAt>
__device__ void block_topk(const KeyAt& key, int n, int k, Key* best) {
    constexpr int CAPACITY = 2 * BLOCK;
    __shared__ Key groups[BLOCK], candidates[CAPACITY], threshold;
    __shared__ int count;

    // Retrieve: the k-th greatest of the groups' maxima. k keys are at least that, so no winner is less.
    Key greatest = 0;
    for (int j = threadIdx.x; j < n; j += BLOCK) greatest = max(greatest, key(j));
    groups[threadIdx.x] = greatest;
    if (threadIdx.x == 0) {
        threshold = 0;
        count = 0;
    }
    __syncthreads();
    int rank = 0;
    for (int g = 0; g < BLOCK; ++g) rank += groups[g] > greatest;
    if (rank == k - 1) threshold = greatest;
    __syncthreads();

    // Filter. The order of arrival varies; the ranks do not depend on it.
    for (int j = threadIdx.x; j < n; j += BLOCK) {
        const Key candidate = key(j);
        if (candidate < threshold) continue;
        const int place = atomicAdd(&count, 1);
        if (place < CAPACITY) candidates[place] = candidate;
    }
    __syncthreads();

    // Re-rank: a winner's place is the number of greater candidates.
    if (count <= CAPACITY) {
        for (int c = threadIdx.x; c < count; c += BLOCK) {
            rank = 0;
            for (int other = 0; other < count; ++other) rank += candidates[other] > candidates[c];
            if (rank < k && candidates[c]) best[rank] = candidates[c];
        }
    } else {  // the greatest numbers crowd in a few groups: fetch the winners one by one
        Key last = ~0ull;
        for (int r = 0; r < k; ++r) {
            greatest = 0;
            for (int j = threadIdx.x; j < n; j += BLOCK) {
                const Key candidate = key(j);
                if (r == 0 || candidate < last) greatest = max(greatest, candidate);
            }
            groups[threadIdx.x] = greatest;
            __syncthreads();
            last = 0;
            for (int g = 0; g < BLOCK; ++g) last = max(last, groups[g]);
            if (threadIdx.x == 0) best[r] = last;
            __syncthreads();  // `groups` is read above
        }
    }
    __syncthreads();
}
