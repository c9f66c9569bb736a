// Samples a token from each long row of logits (see sample_tokens.cu), one cluster of blocks per row.
// Constants: scalar = float, f16, bf16; CLUSTER = 8; BLOCK = 256
// Launch:    grid = (rows * CLUSTER,), block = (BLOCK,), shared memory: EXCHANGE + 16 * size bytes. A block holds `size`
//            vectors of the row in shared memory. Blocks meet once for the maximum, once for each level of top-k and
//            top-p, once to sample.
//            dependent: sample_tokens_cluster
// Arch: sm_90 sm_100
#include "common/cluster.cuh"
#include "common/grid_dependency.cuh"
#include "sampling/sampling.cuh"

constexpr int WARPS = BLOCK / 32, W = WIDTH<scalar>;
constexpr int BINS = BLOCK;                           // of a level, one for each thread
constexpr int CHOSEN = 64;                            // candidates of a block
constexpr float REACH = 29.f;                         // exp(-REACH) * 2^40 is less than half
template <typename T> constexpr int UNUSED_OF = 0;     // low bits of a key that only its sign decides
template <> constexpr int UNUSED_OF<f16> = 13;
template <> constexpr int UNUSED_OF<bf16> = 16;
constexpr int UNUSED = UNUSED_OF<scalar>;
constexpr unsigned int UNUSED_BITS = (1u << UNUSED) - 1;

struct Part { float peak, sum; };
struct alignas(8) Share { Mass mass; int ties, unused; };

// What the blocks of a cluster read from each other, and send to each other.
struct Exchange {
    Mass bins[2][BINS];            // levels alternate
    Key chosen[CLUSTER * CHOSEN];  // in the first block
    Share shares[CLUSTER];
    Part parts[CLUSTER];
    Key keys[CLUSTER];
    u64 bars[4];                   // mbarriers, for what follows
    alignas(16) unsigned int maxima[BLOCK], counts[CLUSTER];
};
enum { PARTS, COUNTS, ALL_CHOSEN, SHARES };
static_assert(sizeof(Exchange) == 20 * BINS + (8 * CHOSEN + 36) * CLUSTER + 32);
static_assert(WINNERS * sizeof(Winner) <= CLUSTER * CHOSEN * sizeof(Key) && 2 * BINS >= CLUSTER * CHOSEN);
static_assert(WARPS == CLUSTER && BINS % CANDIDATES == 0);

__device__ u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }

__device__ void add_to_bin(Mass* bin, Mass x) {
    unsigned int* const words = (unsigned int*)bin;
    const unsigned int low = (unsigned int)x, before = atomicAdd(&words[0], low);
    if (const unsigned int high = (unsigned int)(x >> 32) + (before + low < low)) atomicAdd(&words[1], high);
}

// The greatest of the lanes' floats, none of which is NaN.
__device__ float warp_greatest(float x) {
    const unsigned int bits = __float_as_uint(x);  // not `ordered`, which takes -0 for +0
    return from_ordered(warp_max(bits >> 31 ? ~bits : bits | 0x80000000u));
}

// The parts of CLUSTER adjacent lanes joined, with the sums of warp_join over these parts and 32 - CLUSTER empty ones.
__device__ Normaliser join_of_cluster(Normaliser mine) {
    float peak = mine.peak;
#pragma unroll
    for (int other = CLUSTER / 2; other > 0; other /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, other));
    float sum = mine.sum * exp_fast(mine.peak - peak);
#pragma unroll
    for (int other = CLUSTER / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    return {peak, sum};
}

// Samples a token from the candidates that the first block has gathered, among which are the k largest.
__device__ void choose_of(
    Exchange& exchange, const Weights& weight, int k, unsigned int top_p, Mass min_p, unsigned int word, int* token,
    float* logprob, float log_total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Key* const packed = exchange.bins[0];  // all 0 until here
    int n = 0, begin = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
        const int count = exchange.counts[r];
        n += count;
        if (r < warp) begin += count;
    }
    const int count = exchange.counts[warp];
#pragma unroll
    for (int i = lane; i < CHOSEN; i += 32)
        if (i < count) packed[begin + i] = exchange.chosen[warp * CHOSEN + i];
    __syncthreads();
    draw_from<BLOCK>(packed, n, (Winner*)exchange.chosen, weight, k, top_p, min_p, word, token, logprob, log_total);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4) __cluster_dims__(CLUSTER, 1, 1) sample_tokens_cluster(
    const scalar* logits,          // the arguments are those of sample_tokens_forward, and size
    const bool* banned,
    const int* numbers,
    const uint4* keys,
    int* __restrict__ tokens,
    float* __restrict__ logprobs,
    const unsigned int* device_step,
    long long stride,
    int vocab,
    float inverse_temperature,
    int top_k,
    unsigned int top_p,
    unsigned long long min_p,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    int size) {
    grid_dependency_wait();
    extern __shared__ uint4 memory[];
    Exchange& exchange = *(Exchange*)memory;
    const auto bar = [&](int n) { return shared_address(&exchange.bars[n]); };
    // Of how many groups of threads of a block the maxima are sent: in all a fourth more than k.
    const bool gather = top_k && top_k <= MOST_CHOSEN;
    const int group_bits = top_k <= 50 ? 3 : top_k <= 100 ? 4 : 5, groups = gather ? 1 << group_bits : 0;
    if (threadIdx.x == 0) {
        const int bytes[] = {(int)sizeof exchange.parts + 4 * CLUSTER * groups, sizeof exchange.counts,
                             sizeof exchange.chosen, sizeof exchange.shares};
#pragma unroll
        for (int n = 0; n < 4; ++n) mbar_init(bar(n), 1), mbar_expect(bar(n), bytes[n]);
        mbar_init_done();
    }
    cluster_arrive_relaxed();
    __shared__ Normaliser of_warp[WARPS];
    const int me = threadIdx.x, warp = me / 32, lane = me % 32, rank = cluster_rank();
    const int number = blockIdx.x / CLUSTER;
    const LogitRow<scalar> row{logits + number * stride, vocab};
    // This thread's vectors: begin + lane, begin + lane + 32 ... below end. A warp's are adjacent, for the order of tokens.
    const int first = min(rank * size, row.vectors()), count = min(size, row.vectors() - first);
    const int stretch = (count + WARPS - 1) / WARPS, begin = min(warp * stretch, count), end = min(begin + stretch, count);
    uint4* const held = memory + sizeof(Exchange) / 16;

    // Read the block's part of the row.
    Normaliser whole{LOWEST, 0.f};
    const int whole_end = min(first + end, row.whole());
#pragma unroll 1
    for (int v = begin + lane; v - lane < end; v += 32 * STAGE) {
        uint4 x[STAGE], scratch[STAGE];
        if (row.shift() == 0) load_stage<32>(x, row, first + v, whole_end);
        else load_shifted_stage<32>(x, scratch, row, first + v, whole_end);
        add_last_vector<32>(x, row, first + v, first + end);
        if (banned)
#pragma unroll
            for (int i = 0; i < STAGE; ++i)
                if (v + 32 * i < end) x[i] = allowed<scalar>(x[i], (first + v + 32 * i) * W, vocab, banned);
        float peak = whole.peak, sum = 0.f;
#pragma unroll
        for (int i = 0; i < STAGE; ++i) {
            if (v + 32 * i < end) held[v + 32 * i] = x[i];
            peak = fmaxf(peak, greatest_of<scalar>(x[i]));
        }
#pragma unroll
        for (int i = 0; i < STAGE; ++i)
#pragma unroll
            for (int e = 0; e < W; ++e) sum += exp_fast(element(x[i], e, scalar{}) - peak);
        whole = {peak, whole.sum * exp_fast(whole.peak - peak) + sum};
    }
    __shared__ unsigned int maxima[BLOCK / 8];
    __shared__ int count_chosen;
    const float own = whole.peak;
    whole.peak = warp_greatest(own);
    if (gather) {
        const int lane_bits = 31 - __clz(BLOCK) - group_bits, lanes = 1 << lane_bits;
        const float peak = lanes == 32 ? whole.peak : own;
        unsigned int greatest = peak > LOWEST ? ordered(peak) : 0;
        if (lanes < 32)
#pragma unroll 1
            for (int other = 1; other < lanes; other *= 2) greatest = max(greatest, __shfl_xor_sync(~0u, greatest, other));
        // Made different from the others, at the cost of bits that only floats have: what is sent is at most the maximum.
        const int group = me >> lane_bits;
        if ((me & (lanes - 1)) == 0) maxima[group] = (greatest & ~(BLOCK - 1)) | (rank * groups + group);
        if (me == 0) count_chosen = 0;
    }
    exchange.bins[0][me] = exchange.bins[1][me] = 0;
    whole.sum = warp_reduce(whole.sum * exp_fast(own - whole.peak), Sum{});
    if (lane == 0) of_warp[warp] = whole;
    __syncthreads();
    cluster_wait();  // all blocks have started
    grid_launch_dependents();
    if (me < CLUSTER * groups) {
        const int group = me & (groups - 1);
        send(exchange.maxima[rank * groups + group], maxima[group], bar(PARTS), me >> group_bits);
    }
    if (warp == 0) {
        whole = join_of_cluster(of_warp[lane % WARPS]);
        if (me < CLUSTER) send(exchange.parts[rank], {whole.peak, whole.sum}, bar(PARTS), me);
    }
    mbar_wait(bar(PARTS), 0);
    const Part part = exchange.parts[lane % CLUSTER];
    whole = join_of_cluster({part.peak, part.sum});
    const Weights weight{whole.peak, inverse_temperature};

    if (!(whole.sum > 0.f)) {  // NaN, +inf or all -inf: take the first maximum
        __shared__ Key best[WARPS];
        Key mine = 0;
#pragma unroll 1
        for (int v = begin + lane; v < end; v += 32)
            for (int e = 0; e < W; ++e)
                if (const int j = (first + v) * W + e; j < vocab)
                    mine = max(mine, make_key((float)((const scalar*)(held + v))[e], j));
        for (int other = 16; other > 0; other /= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, other));
        if (lane == 0) best[warp] = mine;
        __syncthreads();
        for (int w = 0; w < WARPS; ++w) mine = max(mine, best[w]);
        if (me == 0) store_shared_at(shared_address(&exchange.keys[rank]), 0, mine);
        cluster_arrive();
        cluster_wait();
        if (rank == 0 && me == 0) {
            for (int r = 0; r < CLUSTER; ++r) mine = max(mine, exchange.keys[r]);
            tokens[number] = key_index(mine);
            logprobs[number] = whole.sum == 0.f ? NEG_INF : whole.sum;
        }
        return;
    }

    // Few are kept: the first block gathers them. None of the k largest is below the k-th largest of the groups' maxima.
    unsigned int bound = 0;
    if (gather) {
        __shared__ unsigned int least;
        constexpr int LANES = 4;  // which share the work of a group
#pragma unroll 1
        for (int c = me / LANES; c < CLUSTER * groups; c += BLOCK / LANES) {
            const unsigned int mine = exchange.maxima[c];
            int greater = 0, more = 0;  // two chains of additions
#pragma unroll 1
            for (int first = me % LANES; first < 2 * groups; first += 4 * LANES)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint4 other = ((const uint4*)exchange.maxima)[first + i * LANES];
                    greater += (other.x > mine) + (other.y > mine);
                    more += (other.z > mine) + (other.w > mine);
                }
            if (sum_of_lanes<LANES>(greater + more) == top_k - 1) least = mine & ~(BLOCK - 1);
        }
        __syncthreads();
        bound = least;
        const float reach = from_ordered(bound);
        __shared__ Key list[CHOSEN];
        const Candidates<Key, CHOSEN> found{list, &count_chosen};
#pragma unroll 1
        for (int v = begin + lane; v - lane < end; v += 32 * STAGE) {
            uint4 x[STAGE];
#pragma unroll
            for (int i = 0; i < STAGE; ++i) x[i] = held[min(v + 32 * i, end - 1)];
            unsigned int vectors = 0;  // of the stage, that have candidates
#pragma unroll
            for (int i = 0; i < STAGE; ++i)
                vectors |= (v + 32 * i < end && !(greatest_of<scalar>(x[i]) < reach) ? 1u : 0u) << i;
#pragma unroll 1
            for (; bound && vectors; vectors &= vectors - 1) {
                const int at = v + 32 * (__ffs(vectors) - 1);
                const uint4 with = held[at];
                unsigned int elements = 0;
#pragma unroll
                for (int e = 0; e < W; ++e) elements |= (element(with, e, scalar{}) < reach ? 0u : 1u) << e;
#pragma unroll 1
                for (; elements; elements &= elements - 1) {
                    const int e = __ffs(elements) - 1;
                    found.add(make_key((float)((const scalar*)(held + at))[e], (first + at) * W + e));
                }
            }
        }
        __syncthreads();
        const unsigned int chosen = bound ? count_chosen : CHOSEN + 1;  // some groups have no element
        if (me < CHOSEN) send(exchange.chosen[rank * CHOSEN + me], me < chosen ? list[me] : 0, bar(ALL_CHOSEN), 0);
        if (me < CLUSTER) send(exchange.counts[rank], chosen, bar(COUNTS), me);
        // Beside the wait: what the choice needs of global memory.
        unsigned int word = 0;
        if (rank == 0) word = row_word(number, numbers, keys, seed_low, seed_high, stream, step, device_step);
        const float log_total = whole.peak + logf(whole.sum);
        mbar_wait(bar(COUNTS), 0);
        const bool fit = __reduce_max_sync(~0u, exchange.counts[lane % CLUSTER]) <= CHOSEN;
        if (fit && rank) return;
        if (rank == 0) mbar_wait(bar(ALL_CHOSEN), 0);
        if (fit) {
            choose_of(exchange, weight, top_k, top_p, min_p, word, tokens + number, logprobs + number, log_total);
            return;
        }
    }

    // Top-k, then top-p: keep narrowing an interval of keys that holds the last one kept. First BINS intervals of equal
    // length of the logits, if that saves a level, then of the keys.
    Cut cut{0, 0};
    int level = 0;
#pragma unroll 1
    for (int filter = top_k ? 0 : 1; filter < (top_p ? 2 : 1); ++filter) {
        const auto amount = [&](float logit) { return filter == 0 ? 1 : weight(logit) >> COARSE; };
        unsigned int low = max(ordered(whole.peak - REACH / inverse_temperature), filter == 0 ? bound : cut.key);
        unsigned int high = ordered(whole.peak) | UNUSED_BITS;
        const float lowest = from_ordered(low), range = whole.peak - lowest;
        low &= ~UNUSED_BITS;
        bool linear = (high - low) >> UNUSED >= BINS && range > 1e-30f && range < 1e30f;
        const float scale = linear ? (BINS - 0.25f) / range : 0.f;
        int chosen = -1;  // interval of logits, if there are such
        Mass goal = filter == 0 ? top_k : 0;
#pragma unroll 1
        for (bool last = false; !last;) {
            const int shift = max(UNUSED, 24 - __clz(high - low));
            Mass* const bins = exchange.bins[level % 2];
            const auto add = [&](float logit, unsigned int key, Mass x) {
                if (key < low || key > high) return;
                int bin = (key - low) >> shift;
                if (linear || chosen >= 0) {
                    const int interval = BINS - 1 - min((int)((whole.peak - logit) * scale), BINS - 1);
                    if (!linear && interval != chosen) return;
                    if (linear) bin = interval;
                }
                add_to_bin(&bins[bin], x);
            };
#pragma unroll 1
            for (int v = begin + lane; v < end; v += 32) {
                const uint4 x = held[v];
                if (ordered(greatest_of<scalar>(x)) < low) continue;
#pragma unroll
                for (int e = 0; e < W; ++e) {
                    const float logit = element(x, e, scalar{});
                    if (const unsigned int key = ordered(logit); key > cut.key && key >= low) add(logit, key, amount(logit));
                }
            }
            if (cut.key && rank == 0 && me == 0)
                add(from_ordered(cut.key), cut.key, cut.ties * amount(from_ordered(cut.key)));
            cluster_arrive();
            cluster_wait();
            const int bin = BINS - 1 - me;  // from the greatest down
            Mass mine = 0, all;
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) mine += load_shared_at(shared_address(&bins[bin]), r);
            exchange.bins[++level % 2][me] = 0;  // which nobody has read since this level's meeting
            const Mass before = sum_before<WARPS>(mine, &all);
            if (goal == 0) goal = max(__umul64hi(all, (Mass)top_p << 32), 1ull);
            if (all < goal) break;  // fewer than k tokens have weights
            __shared__ int found;
            __shared__ Mass left;
            if (before < goal && goal <= before + mine) {
                found = bin;
                left = goal - before;
            }
            __syncthreads();
            goal = left;
            if (linear) {
                const float margin = (fabsf(whole.peak) + fabsf(lowest)) * 0x1p-20f;
                const float top = whole.peak - (BINS - 1 - found) / scale + margin;
                const float bottom = whole.peak - (BINS - found) / scale - margin;
                chosen = found;
                high = min(high, ordered(top) | UNUSED_BITS);
                low = max(low, ordered(bottom) & ~UNUSED_BITS);
                linear = false;
            } else {
                low += (unsigned int)found << shift;
                high = low + ((1u << shift) - 1);
                last = shift == UNUSED;
                if (last) {
                    const unsigned int key = low >> 31 ? low : low | UNUSED_BITS;
                    cut = cut_at(key, goal, max(amount(from_ordered(key)), 1ull));
                }
            }
        }
    }

    // Sample: find the block whose part holds the target, then its warp, vector and token.
    const Kept kept(weight, cut, min_p);
    Mass mass = 0;
    int equal = 0;
    const auto of_vector = [&](const uint4& x) {
        if (ordered(greatest_of<scalar>(x)) < cut.key) return;
#pragma unroll
        for (int e = 0; e < W; ++e) {
            const float logit = element(x, e, scalar{});
            mass += kept(logit);
            equal += kept.ties(logit);
        }
    };
#pragma unroll 1
    for (int v = begin + lane; v < end; v += 32) of_vector(held[v]);
    __shared__ Mass masses[WARPS];
    __shared__ int ties[WARPS];
    mass = sums_up_to(mass);
    equal = sums_up_to(equal);
    if (lane == 31) {
        masses[warp] = mass;
        ties[warp] = equal;
    }
    __syncthreads();
    if (me < CLUSTER) {
        mass = equal = 0;
        for (int w = 0; w < WARPS; ++w) {
            mass += masses[w];
            equal += ties[w];
        }
        send(exchange.shares[rank], {mass, equal, 0}, bar(SHARES), me);
    }
    const unsigned int word = row_word(number, numbers, keys, seed_low, seed_high, stream, step, device_step);
    mbar_wait(bar(SHARES), 0);
    Search search{0, 0};
    const Share share = lane < CLUSTER ? exchange.shares[lane] : Share{};
    if (search(share.mass, share.ties, kept, &word) != rank) return;
    if (search(lane < WARPS ? masses[lane] : 0, lane < WARPS ? ties[lane] : 0, kept) != warp) return;
    int chosen = -1, v = begin;
#pragma unroll 1
    for (; chosen < 0 && v < end; v += 32) {
        mass = equal = 0;
        if (v + lane < end) of_vector(held[v + lane]);
        chosen = search(mass, equal, kept);
    }
    v += chosen - 32;
    const float logit = lane < W ? (float)((const scalar*)(held + v))[lane] : NEG_INF;
    chosen = search(lane < W ? kept(logit) : 0, lane < W && kept.ties(logit), kept);
    if (lane == chosen) {
        tokens[number] = (first + v) * W + lane;
        logprobs[number] = logit - whole.peak - logf(whole.sum);
    }
}
