// Samples a token from each row of logits, with temperature, top-k, top-p and min-p.
// Constants: scalar = float, f16, bf16; BLOCK = 128, 1024
// Launch:    grid = (rows,), block = (BLOCK,), shared memory: 32768 with top-k or top-p. One block per row.
//            The first pass reads it from memory, the others from caches: two (three for float) for top-k, as many
//            for top-p, one to sample.
//            dependent: sample_tokens_forward
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/grid_dependency.cuh"
#include "common/philox.cuh"
#include "sampling/logit_slice.cuh"

static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "sample_tokens.cu: BLOCK is a number of warps");

// Weights are integers, exp((x - peak) / T) * 2^40: their sums are exact and independent of the order.
using Mass = unsigned long long;
constexpr float ONE = 1099511627776.f;
constexpr int WARPS = BLOCK / 32, BINS = 4096, W = WIDTH<scalar>;

struct Row {
    const scalar* x;
    const bool* banned;
    int size, vectors;
    float peak, inverse_temperature;

    __device__ Mass weight(float logit) const {
        // converted by 32 bits: from 2^-8 on the last bit of a float is at least 2^-31, so nothing is lost
        const float x = expf((logit - peak) * inverse_temperature);
        const bool small = x < 0.00390625f;
        return (Mass)__float2uint_rn(x * (small ? ONE : ONE / 512.f)) << (small ? 0 : 9);
    }
    // Vector v, with -inf past the end and where banned.
    __device__ uint4 operator[](int v) const {
        union { uint4 vector; scalar elements[W]; } out;
        const int j = v * W;
        const bool whole = j + W <= size;
        if (whole && (size_t)(x + j) % 16 == 0) {
            out.vector = *(const uint4*)(x + j);
            if (!banned) return out.vector;
        } else {
#pragma unroll
            for (int e = 0; e < W; ++e) out.elements[e] = j + e < size ? x[j + e] : (scalar)NEG_INF;
        }
        if (banned)
#pragma unroll
            for (int e = 0; e < W; ++e)
                if (j + e < size && banned[j + e]) out.elements[e] = (scalar)NEG_INF;
        return out.vector;
    }
};

// A filter: keep the keys (see `ordered`) above `key`, and of those equal to it the first `ties`.
struct Cut { unsigned int key; int ties; };

// Returns the sum of `mine` over the threads before this one; *all becomes the sum over all threads.
__device__ Mass sum_before(Mass mine, Mass* all) {
    __shared__ Mass of_warp[WARPS];
    const int lane = threadIdx.x % 32;
    Mass sum = mine;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
        const Mass other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // `of_warp` may still be read by the previous call
    if (lane == 31) of_warp[threadIdx.x / 32] = sum;
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

// Radix selection: the tightest filter within `cut` whose elements, greatest first, reach a target. The target is `count`
// elements or, if count is 0, share / 2^32 of the mass that `cut` keeps.
__device__ __noinline__ Cut cut_off(const Row& row, Cut cut, int count, unsigned int share) {
    extern __shared__ unsigned int bins[];
    unsigned int *low = bins, *high = bins + BINS;
    __shared__ unsigned int found;
    __shared__ Mass left;
    // masses in units of 2^-31: atomics on shared memory add 32 bits
    const auto amount = [&](float logit) { return count ? 1u : (unsigned int)(row.weight(logit) >> 9); };
    const auto add = [&](unsigned int digit, unsigned int x) {
        if (atomicAdd(&low[digit], x) + x < x) atomicAdd(&high[digit], 1u);
    };
    const auto bin = [&](int digit) { return (Mass)high[digit] << 32 | low[digit]; };
    Mass goal = count;
    unsigned int prefix = 0, known = 0;  // the key's digits found so far, and their mask
    const int last = W == 8 ? 8 : 0;     // the keys of 16-bit numbers differ in the first two digits only
#pragma unroll 1
    for (int shift = 20; shift >= last; shift = shift == 20 ? 8 : shift - 8) {
        const unsigned int mask = shift == 0 ? 255 : BINS - 1;
        for (int b = threadIdx.x; b < 2 * BINS; b += BLOCK) bins[b] = 0;
        __syncthreads();
#pragma unroll 1
        for (int v = threadIdx.x; v < row.vectors; v += BLOCK) {
            const uint4 x = row[v];
#pragma unroll
            for (int e = 0; e < W; ++e) {
                const float logit = element(x, e, scalar{});
                const unsigned int key = ordered(logit);
                if (key > cut.key && (key & known) == prefix && v * W + e < row.size)
                    add(key >> shift & mask, amount(logit));
            }
        }
        if (cut.key && (cut.key & known) == prefix)
#pragma unroll 1
            for (int tie = threadIdx.x; tie < cut.ties; tie += BLOCK)
                add(cut.key >> shift & mask, amount(from_ordered(cut.key)));
        __syncthreads();
        // From the greatest digit down, EACH bins per thread.
        constexpr int EACH = BINS / BLOCK;
        const int top = BINS - 1 - EACH * threadIdx.x;
        Mass mine = 0, all;
#pragma unroll 1
        for (int b = 0; b < EACH; ++b) mine += bin(top - b);
        Mass before = sum_before(mine, &all);
        if (goal == 0) goal = max(__umul64hi(all, (Mass)share << 32), 1ull);
#pragma unroll 1
        for (int b = 0; b < EACH && before < goal; ++b) {
            if (before + bin(top - b) >= goal) {
                found = top - b;
                left = goal - before;
            }
            before += bin(top - b);
        }
        __syncthreads();
        prefix |= found << shift;
        known |= mask << shift;
        goal = left;
    }
    const unsigned int key = W == 8 && !(prefix >> 31) ? prefix | 0xffu : prefix;
    const Mass each = max(amount(from_ordered(key)), 1u);
    return {key, (int)min((goal + each - 1) / each, 0x7fffffffull)};
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1024 / BLOCK) sample_tokens_forward(
    const scalar* logits,          // (rows, >= vocab), rows `stride` apart
    const bool* banned,            // (vocab,) or null
    const int* numbers,            // (rows,) first Philox counter of each row, or null for the row itself
    const uint4* keys,             // (rows,) seed low, seed high, stream, step of each row, or null
    int* __restrict__ tokens,                   // (rows,)
    float* __restrict__ logprobs,               // (rows,), at temperature 1, over all tokens that are not banned
    const unsigned int* device_step,
    long long stride,
    int vocab,
    float inverse_temperature,
    int top_k,                                  // 0: all
    unsigned int top_p,                         // in units of 2^-32; 0: all
    unsigned long long min_p,                   // in units of 2^-40
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step) {
    grid_dependency_wait();
    const int me = threadIdx.x, warp = me / 32, lane = me % 32;
    Row row{logits + blockIdx.x * stride, banned, vocab, (vocab + W - 1) / W, NEG_INF, inverse_temperature};

    __shared__ Normaliser of_warp[WARPS];
    Normaliser whole{LOWEST, 0.f};
#pragma unroll 2
    for (int v = me; v < row.vectors; v += BLOCK) {
        const uint4 x = row[v];
        const float peak = fmaxf(whole.peak, greatest_of<scalar>(x));
        float part = 0.f;
#pragma unroll
        for (int e = 0; e < W; ++e) part += exp_fast(element(x, e, scalar{}) - peak);
        whole = {peak, whole.sum * exp_fast(whole.peak - peak) + part};
    }
    const unsigned int greatest = whole.peak > LOWEST ? ordered(whole.peak) : 0;  // of this thread's elements
    whole = warp_join(whole);
    if (lane == 0) of_warp[warp] = whole;
    __syncthreads();
    whole = warp_join(of_warp, WARPS);
    row.peak = whole.peak;
    if (!(whole.sum > 0.f)) {  // NaN, +inf or all -inf: take the first maximum
        __shared__ Key room[BLOCK];
        const auto at = [&](int j) { return make_key(banned && banned[j] ? NEG_INF : (float)row.x[j], j); };
        select_one_by_one<BLOCK>(at, vocab, 1, room, [&](int, Key key) {
            tokens[blockIdx.x] = key_index(key);
            logprobs[blockIdx.x] = whole.sum == 0.f ? NEG_INF : whole.sum;
        });
        return;
    }

    Cut cut{0, 0};
    if (top_k) {  // none of the k largest is below the k-th largest of the threads' maxima
        const unsigned int bound = top_k <= BLOCK / 2 ? retrieve<BLOCK>(greatest, top_k) : 0;
        cut = cut_off(row, {bound ? bound - 1 : 0, 0}, top_k, 0);
    }
    if (top_p) cut = cut_off(row, cut, 0, top_p);
    const Mass tie = cut.key ? row.weight(from_ordered(cut.key)) : 0, each = tie >= min_p ? tie : 0;
    const auto kept = [&](float logit) -> Mass {
        if (ordered(logit) <= cut.key) return 0;
        const Mass weight = row.weight(logit);
        return weight >= min_p ? weight : 0;
    };

    // Sample: find the warp whose stretch of the row holds the target, then narrow it down to one token.
    __shared__ Mass masses[WARPS];
    __shared__ int ties[WARPS];
    const unsigned int number = numbers ? numbers[blockIdx.x] : blockIdx.x;
    PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    if (keys) key = {keys[blockIdx.x].x, keys[blockIdx.x].y, keys[blockIdx.x].z, keys[blockIdx.x].w};
    const uint4 words = philox(key, number, 0);
    int begin = 0, end = row.vectors, ties_before = 0;
    Mass target = 0;
    // Returns the lane whose part holds the target; each lane passes the mass and the number of ties of its part.
    const auto choose = [&](Mass mass, int equal, bool first) {
        int before = equal;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
        before += ties_before - equal;
        const Mass mine = mass + each * (min(before + equal, cut.ties) - min(before, cut.ties));
        Mass reached = mine;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const Mass other = __shfl_up_sync(~0u, reached, step);
            if (lane >= step) reached += other;
        }
        if (first) target = __umul64hi(__shfl_sync(~0u, reached, 31), (Mass)words.x << 32);
        const int chosen = __ffs(__ballot_sync(~0u, reached > target)) - 1;
        target -= __shfl_sync(~0u, reached - mine, chosen);
        ties_before = __shfl_sync(~0u, before, chosen);
        return chosen;
    };
#pragma unroll 1
    for (bool first = true; first || end - begin > 1; first = false) {
        const int stretch = (end - begin + WARPS - 1) / WARPS;
        const int from = begin + warp * stretch, to = min(from + stretch, end);
        Mass mass = 0;
        int equal = 0;
#pragma unroll 1
        for (int v = from + lane; v < to; v += 32) {
            const uint4 x = row[v];
#pragma unroll
            for (int e = 0; e < W; ++e) {
                const float logit = element(x, e, scalar{});
                mass += kept(logit);
                equal += ordered(logit) == cut.key && v * W + e < vocab;
            }
        }
#pragma unroll 1
        for (int other = 16; other > 0; other /= 2) {
            mass += __shfl_xor_sync(~0u, mass, other);
            equal += __shfl_xor_sync(~0u, equal, other);
        }
        __syncthreads();  // `masses` may still be read
        if (lane == 0) {
            masses[warp] = mass;
            ties[warp] = equal;
        }
        __syncthreads();
        begin += choose(lane < WARPS ? masses[lane] : 0, lane < WARPS ? ties[lane] : 0, first) * stretch;
        end = min(begin + stretch, end);
    }
    int j = begin * W + lane;
    const bool there = lane < W && j < vocab;
    const float logit = there && !(banned && banned[j]) ? (float)row.x[j] : NEG_INF;
    j = begin * W + choose(there ? kept(logit) : 0, there && ordered(logit) == cut.key, false);
    if (me == 0) {
        tokens[blockIdx.x] = j;
        logprobs[blockIdx.x] = (float)row.x[j] - row.peak - logf(whole.sum);
    }
}
