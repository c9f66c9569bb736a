// Samples a token from each row of logits, with temperature, top-k, top-p and min-p.
// Constants: scalar = float, f16, bf16; BLOCK = 128, 1024
// Launch:    grid = (rows,), block = (BLOCK,), shared memory: 32768 with top-k or top-p. One block per row.
//            The first pass reads it from memory, the others from caches: two (three for float) for top-k, as many
//            for top-p, one to sample; before sm_80 a single one for top-k up to MOST_CHOSEN, whatever else.
//            dependent: sample_tokens_forward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "sampling/sampling.cuh"

static_assert(BLOCK % 32 == 0 && BLOCK <= 1024, "sample_tokens.cu: BLOCK is a number of warps");
constexpr int WARPS = BLOCK / 32, BINS = 4096, W = WIDTH<scalar>;
// Whether several vectors are loaded at a time and, up to k = MOST_CHOSEN, the token is drawn from the elements that reach a
// bound, as in a cluster. Not measured on later GPUs, whose code is as it was.
constexpr bool BEFORE_AMPERE = __CUDA_ARCH__ < 800;
constexpr int ROOM = 2048;  // for these elements
static_assert(ROOM * sizeof(Key) + WINNERS * sizeof(Winner) <= 2 * BINS * sizeof(unsigned int) && ROOM % CANDIDATES == 0);

struct Row {
    LogitRow<scalar> logits;
    const bool* banned;
    Weights weight;

    // Vector v, with -inf past the end and where banned.
    __device__ uint4 operator[](int v) const {
        const int j = v * W;
        return banned || j + W > logits.vocab ? allowed<scalar>(logits[v], j, logits.vocab, banned) : logits[v];
    }
};

// Radix selection: the tightest filter within `cut` whose elements, greatest first, reach a target. The target is `count`
// elements or, if count is 0, share / 2^32 of the mass that `cut` keeps.
__device__ __noinline__ Cut cut_off(const Row& row, Cut cut, int count, unsigned int share) {
    extern __shared__ unsigned int bins[];
    unsigned int *low = bins, *high = bins + BINS;
    __shared__ unsigned int found;
    __shared__ Mass left;
    const auto amount = [&](float logit) { return count ? 1u : (unsigned int)(row.weight(logit) >> COARSE); };
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
        for (int v = threadIdx.x; v < row.logits.vectors(); v += BLOCK) {
            const uint4 x = row[v];
#pragma unroll
            for (int e = 0; e < W; ++e) {
                const float logit = element(x, e, scalar{});
                const unsigned int key = ordered(logit);
                if (key > cut.key && (key & known) == prefix && v * W + e < row.logits.vocab)
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
        Mass before = sum_before<WARPS>(mine, &all);
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
    return cut_at(key, goal, max(amount(from_ordered(key)), 1u));
}

// Calls use(v, vector v) for this thread's vectors, of which several are loaded before the first is used.
template <typename Use> __device__ __forceinline__ void each_vector(const Row& row, const Use& use) {
    const int loadable = row.banned || row.logits.shift() ? 0 : row.logits.whole();  // by one load instruction
    int v = threadIdx.x;
#pragma unroll 1
    while (v < loadable) {
        uint4 x[STAGE];
        load_stage<BLOCK>(x, row.logits, v, loadable);
#pragma unroll
        for (int i = 0; i < STAGE; ++i)
            if (v < loadable) use(v, x[i]), v += BLOCK;
    }
#pragma unroll 1
    for (; v < row.logits.vectors(); v += BLOCK) use(v, row[v]);
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
    Row row{{logits + blockIdx.x * stride, vocab}, banned, {NEG_INF, inverse_temperature}};
    const int vectors = row.logits.vectors();

    __shared__ Normaliser of_warp[WARPS];
    Normaliser whole{LOWEST, 0.f};
    const auto take = [&](int, const uint4& x) {
        const float peak = fmaxf(whole.peak, greatest_of<scalar>(x));
        float part = 0.f;
#pragma unroll
        for (int e = 0; e < W; ++e) part += exp_fast(element(x, e, scalar{}) - peak);
        whole = {peak, whole.sum * exp_fast(whole.peak - peak) + part};
    };
    if constexpr (BEFORE_AMPERE) {
        each_vector(row, take);
    } else {
#pragma unroll 2
        for (int v = me; v < vectors; v += BLOCK) take(v, row[v]);
    }
    const unsigned int greatest = whole.peak > LOWEST ? ordered(whole.peak) : 0;  // of this thread's elements
    whole = warp_join(whole);
    if (lane == 0) of_warp[warp] = whole;
    __syncthreads();
    whole = warp_join(of_warp, WARPS);
    row.weight.peak = whole.peak;
    if (!(whole.sum > 0.f)) {  // NaN, +inf or all -inf: take the first maximum
        __shared__ Key room[BLOCK];
        const auto at = [&](int j) { return make_key(banned && banned[j] ? NEG_INF : (float)row.logits.x[j], j); };
        select_one_by_one<BLOCK>(at, vocab, 1, room, [&](int, Key key) {
            tokens[blockIdx.x] = key_index(key);
            logprobs[blockIdx.x] = whole.sum == 0.f ? NEG_INF : whole.sum;
        });
        return;
    }

    Cut cut{0, 0};
    if (top_k) {  // none of the k largest is below the k-th largest of the threads' maxima
        const unsigned int bound = top_k <= BLOCK / 2 ? retrieve<BLOCK>(greatest, top_k) : 0;
        if (BEFORE_AMPERE && bound && top_k <= MOST_CHOSEN) {
            extern __shared__ uint4 dynamic[];
            Key* const list = (Key*)dynamic;
            __shared__ int count;
            const Candidates<Key, ROOM> found{list, &count};
            if (me == 0) count = 0;
            __syncthreads();
            each_vector(row, [&](int v, const uint4& x) {
                if (ordered(greatest_of<scalar>(x)) < bound) return;
#pragma unroll
                for (int e = 0; e < W; ++e)
                    if (const float logit = element(x, e, scalar{}); ordered(logit) >= bound)
                        found.add(make_key(logit, v * W + e));
            });
            __syncthreads();
            if (found.complete()) {
                if (me < (-count & (CANDIDATES - 1))) list[count + me] = 0;
                __syncthreads();
                draw_from<BLOCK>(
                    list, count, (Winner*)(list + ROOM), row.weight, top_k, top_p, min_p,
                    row_word(blockIdx.x, numbers, keys, seed_low, seed_high, stream, step, device_step),
                    tokens + blockIdx.x, logprobs + blockIdx.x, whole.peak + logf(whole.sum));
                return;
            }
        }
        cut = cut_off(row, {bound ? bound - 1 : 0, 0}, top_k, 0);
    }
    if (top_p) cut = cut_off(row, cut, 0, top_p);

    // Sample: find the warp whose stretch of the row holds the target, then narrow it down to one token.
    const Kept kept(row.weight, cut, min_p);
    __shared__ Mass masses[WARPS];
    __shared__ int ties[WARPS];
    const unsigned int word =
        row_word(blockIdx.x, numbers, keys, seed_low, seed_high, stream, step, device_step);
    Search search{0, 0};
    int begin = 0, end = vectors;
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
                equal += kept.ties(logit);
            }
        }
        mass = sums_up_to(mass);
        equal = sums_up_to(equal);
        __syncthreads();  // `masses` may still be read
        if (lane == 31) {
            masses[warp] = mass;
            ties[warp] = equal;
        }
        __syncthreads();
        const bool part = lane < WARPS;
        begin += search(part ? masses[lane] : 0, part ? ties[lane] : 0, kept, first ? &word : nullptr) * stretch;
        end = min(begin + stretch, end);
    }
    int j = begin * W + lane;
    const bool there = lane < W && j < vocab;
    const float logit = there && !(banned && banned[j]) ? (float)row.logits.x[j] : NEG_INF;
    j = begin * W + search(there ? kept(logit) : 0, there && kept.ties(logit), kept);
    if (me == 0) {
        tokens[blockIdx.x] = j;
        logprobs[blockIdx.x] = (float)row.logits.x[j] - whole.peak - logf(whole.sum);
    }
}
