// One step of beam search: the `wanted` best continuations of the K beams of each sentence. Logits are read once.
// Constants: scalar = float, f16, bf16; HOOKS = false, true; BLOCK = 128, 256 (`wanted` up to BLOCK / 2)
// Launch:    grid = (slices, beam, sentences), block = (BLOCK,), shared memory: 4 * (groups of a sentence), with HOOKS at least
//            4 + a bit for each element of a slice, and 64 * BLOCK. One block per slice of a row; the last block of a sentence finds
//            its best groups and reads these again (logit_groups.cuh).
//            dependent: beam_step_forward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/compiler.cuh"
#include "common/grid_dependency.cuh"
#include "common/index.cuh"
#include "sampling/continuations.cuh"
#include "sampling/logit_groups.cuh"

constexpr int W = WIDTH<scalar>, WARPS = BLOCK / 32;
constexpr int ROOM = 4 * BLOCK;                         // candidates of a search
constexpr int EACH = 8;                                 // keys that a thread loads at a time
#if __CUDA_ARCH__ >= 900 || __CUDA_ARCH__ < 800
constexpr int THREADS = HOOKS ? 640 : 1024;             // of a multiprocessor; more of them would spill registers
#else
constexpr int THREADS = HOOKS ? 640 : 896;
#endif

// A mask of bans, the same for all rows, and penalties for the tokens that a row lists.
struct Penalties {
    const bool* mask;       // or null
    const int* tokens;      // those the row lists
    const float* amounts;
    int count;

    __device__ bool is_banned(int j) const { return mask && mask[j]; }
    // Bit e: the row lists element W * v + e.
    __device__ unsigned int listed(int v) const {
        unsigned int bits = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const unsigned int e = tokens[i] - v * W;
            bits |= e < W ? 1u << e : 0;
        }
        return bits;
    }
    __device__ float less(float logit, int j) const {
#pragma unroll 4
        for (int i = 0; i < count; ++i)
            if (tokens[i] == j) logit -= amounts[i];
        return logit;
    }
};

// For a slice of a row.
struct Hooks {
    static constexpr bool ANY = true;
    Penalties row;
    unsigned int* listed;   // shared memory: a bit for each element of the slice
    int begin, end, vocab;

    __device__ void prepare(long long* flag) const {
        if (row.count == 0) return;
        for (int w = threadIdx.x; w <= (end - begin) / 32; w += BLOCK) listed[w] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < row.count; i += BLOCK) {
            const int token = row.tokens[i];
            if (token == -1 || out_of_range(token, vocab, flag) || token < begin || token >= end) continue;
            atomicOr(&listed[(token - begin) / 32], 1u << (token - begin) % 32);
        }
        __syncthreads();
    }
    // Bits for the vector from element j on: bit e if element j + e is banned or listed, bit W + e if it is listed.
    __device__ unsigned int hidden(int j) const {
        unsigned int bits = 0;
        if (row.count) bits = listed[(j - begin) / 32] >> (j - begin) % 32 & ((1u << W) - 1);
        bits |= bits << W;
        if (const bool* mask = row.mask) {
            if ((size_t)(mask + j) % W || j + W > vocab) {
#pragma unroll 1
                for (int e = 0; e < W; ++e) bits |= mask[min(j + e, vocab - 1)] << e;  // elements past the end are -inf
            } else if constexpr (W == 8) {
                bits |= (unsigned int)(*(const unsigned long long*)(mask + j) * 0x0102040810204080ull >> 56);
            } else {
                bits |= *(const unsigned int*)(mask + j) * 0x10204080u >> 28;
            }
        }
        return bits;
    }
    __device__ float less(float logit, int j) const { return row.is_banned(j) ? NEG_INF : row.less(logit, j); }
};

struct alignas(16) Place { int beam, first, last; };  // a group of the beam: its first vector, and the end of its slice

extern "C" __global__ void __launch_bounds__(BLOCK, THREADS / BLOCK) beam_step_forward(
    const scalar* logits,     // (sentences * beam, >= vocab), rows `stride` apart
    const float* scores,      // (sentences, beam); -inf for a dead beam, whose logits are ignored
    const int* bans,          // (ban_count,), up to BLOCK: tokens that are banned in all rows
    const bool* mask,         // (vocab,) or null: with HOOKS, more of them
    const int* tokens,        // (sentences * beam, listed), -1 for none
    const float* penalties,   // (sentences * beam, listed)
    long long* __restrict__ flag,          // see common/index.cuh
    Key* groups,                           // (sentences, beam, slices, BLOCK >> fold)
    Normaliser* normalisers,               // (sentences, beam, stages of a row, BLOCK / 32)
    unsigned int* __restrict__ tickets,    // (sentences,)
    float* __restrict__ out_scores,        // (sentences, wanted)
    int* __restrict__ out_parents,         // (sentences, wanted)
    int* __restrict__ out_tokens,          // (sentences, wanted)
    long long stride,
    int vocab,
    int ban_count,
    int listed,
    int stages,                            // of a slice
    int fold,                              // 2^fold adjacent threads have one group
    int wanted) {
    grid_dependency_wait();
    extern __shared__ __align__(16) unsigned int shared_words[];
    __shared__ Ranked list[ROOM];
    __shared__ Ranked winners[BLOCK / 2];
    __shared__ Place places[BLOCK / 2];
    __shared__ Row rows[BLOCK / 4];
    constexpr int AT_ONCE = 32 / W > 4 ? 4 : 32 / W;  // vectors that a thread loads at a time
    static_assert(sizeof(list) >= SUMS * BLOCK * sizeof(float));
    const int me = threadIdx.x, lane = me % 32;
    const int slices = gridDim.x, beam = gridDim.y, sentence = blockIdx.z, first_row = sentence * beam;
    const int size = stages * STAGE * BLOCK, vectors = (vocab + W - 1) / W;  // of a slice, of a row
    const int row_parts = (vectors + STAGE * BLOCK - 1) / (STAGE * BLOCK) * WARPS;
    const Results results{out_scores, out_parents, out_tokens, (long long)sentence * wanted};
    const auto row_of = [&](int r) { return LogitRow<scalar>{logits + r * stride, vocab}; };
    const auto penalties_of = [&](int r) {
        return Penalties{mask, tokens + (long long)r * listed, penalties + (long long)r * listed, listed};
    };

    // The first loads start before it is known whether they are needed.
    const int row = first_row + blockIdx.y, block = row * slices + blockIdx.x;
    const int first = blockIdx.x * size, last = min(first + size, vectors);
    uint4 next[STAGE];
    load_stage<BLOCK>(next, row_of(row), first + me, row_of(row).whole());
    const uint4 sample = lane < row_of(row).whole() ? row_of(row)[lane] : nothing(scalar{});
    BannedTokens<W> banned{bans, ban_count};
    banned.find<BLOCK>(first, last, me);
    if (block == 0 && me < ban_count) out_of_range(bans[me], vocab, flag);
    bool alive = false;
#pragma unroll 1
    for (int b = lane; b < beam; b += 32) alive |= scores[first_row + b] != NEG_INF;
    const float score = scores[row];
    if (__ballot_sync(~0u, alive) == 0) {  // a sentence that has ended: the first candidates, all at -inf
        if (block == first_row * slices) results.put_first<BLOCK>(wanted, vocab);
        return;
    }

    const unsigned int mark = blockIdx.y << TOKEN_BITS;
    Key best = 0;
    if (score == NEG_INF) {  // the logits are ignored, all candidates are -inf
        if (first + me < last) best = make_key(NEG_INF, mark + (first + me) * W + W - 1);
    } else {
        const int part = row * row_parts + blockIdx.x * stages * WARPS;
        bool sure;
        const float reference = reference_of<scalar>(sample, &sure);
        if constexpr (HOOKS) {
            const Hooks hooks{penalties_of(row), shared_words, first * W, min(last * W, vocab), vocab};
            hooks.prepare(flag);
            best = read_slice<BLOCK>(
                row_of(row), first, last, next, hooks, banned, reference, sure, mark, normalisers, part, (float4*)list, me);
        } else {
            best = read_slice<BLOCK>(
                row_of(row), first, last, next, Plain{}, banned, reference, sure, mark, normalisers, part, (float4*)list, me);
        }
    }
#pragma unroll 1
    for (int other = 1; other < 1 << fold; other *= 2) best = max(best, __shfl_xor_sync(~0u, best, other));
    const int of_slice = BLOCK >> fold;
    if ((me & ((1 << fold) - 1)) == 0) groups[(long long)block * of_slice + (me >> fold)] = best;
    grid_launch_dependents();
    if (!last_of(tickets + sentence, beam * slices)) return;

    // The best groups of the sentence.
    const int n = opaque(beam) * slices * of_slice;
    const Key* keys = groups + (long long)opaque(first_row) * slices * of_slice;
    Key held[EACH];
    const auto hold = [&](int i) {  // keys i, i + BLOCK ...
#pragma unroll
        for (int e = 0; e < EACH; ++e) held[e] = i + e * BLOCK < n ? keys[i + e * BLOCK] : 0;
    };
    hold(me);
#pragma unroll 1
    for (int b = me / 32; b < beam; b += WARPS) {
        const float score = scores[first_row + b];
        const Normaliser all = warp_join(normalisers + (first_row + b) * row_parts, row_parts);
        if (lane == 0) rows[b] = {all.peak, logf(all.sum), score};  // those of dead beams are not used
    }
#pragma unroll 1
    for (int r = me; r < wanted; r += BLOCK) winners[r] = {};
    __shared__ int count;
    if (me == 0) count = 0;
    __syncthreads();
    const auto total = [&](float logit, int b) { return rows[b].total(logit); };
    const auto of_group = [&](Key key) {
        if (key == 0) return Ranked{};
        const int b = key_index(key) >> TOKEN_BITS;
        return Ranked{make_key(total(key_value(key), b), b), key};
    };
    unsigned int most = 0;
#pragma unroll 1
    for (int i = me;;) {
        float totals[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e)  // without branches, so also where there is no key
            totals[e] = opaque(total(key_value(held[e]), key_index(held[e]) >> TOKEN_BITS & (BLOCK / 4 - 1)));
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const unsigned int score = held[e] ? ordered(totals[e]) : 0;
            if (i + e * BLOCK < n) shared_words[i + e * BLOCK] = score;
            most = max(most, score);
        }
        i += EACH * BLOCK;
        if (i - me >= n) break;
        hold(i);
    }
    const Candidates<Ranked, ROOM> found{list, &count};
    const auto group_at = [&](int i) { return of_group(keys[i]); };
    const unsigned int least = max(retrieve<BLOCK>(most, wanted), 1);
    if (most >= least)
#pragma unroll 1
        for (int i = me; i < n; i += BLOCK)
            if (shared_words[i] >= least) found.add(group_at(i));
    __syncthreads();
    const auto keep = [&](int place, const Ranked& x) { winners[place] = x; };
    if (found.complete()) found.re_rank<BLOCK>(wanted, keep);
    else select_one_by_one<BLOCK>(group_at, n, wanted, list, keep);
    __syncthreads();

    // Their elements that reach the last of these groups.
    const Ranked bound = winners[wanted - 1];
    const float limit = key_value(bound.score);  // NaN, which nothing is below, if there are fewer groups
    if (me < wanted) {
        const Ranked winner = winners[me];
        const int vector = winner.token() / W, begin = vector / size * size, group = (vector - begin) % BLOCK >> fold << fold;
        places[me] = {winner.beam(), begin + group, winner.score ? min(begin + size, vectors) : 0};
    }
    if (me == 0) count = 0;
    __syncthreads();
    const int per_group = stages * STAGE << fold, bits = __ffs(per_group) - 1;
    const auto vector_of = [&](const Place& place, int i) {  // vector i of a group
        return place.first + (i & ((1 << fold) - 1)) + (i >> fold) * BLOCK;
    };
    const auto adjusted = [&](float logit, int b, int j, bool listed) {
        if (rows[b].score == NEG_INF || banned.contain(j)) return NEG_INF;
        if constexpr (HOOKS) {
            const Penalties own = penalties_of(first_row + b);
            if (own.is_banned(j)) return NEG_INF;
            if (listed) return own.less(logit, j);
        }
        return logit;
    };
    const auto ranked = [&](float logit, int b, int token) {
        return continuation(total(logit, b), logit, b, token);
    };
#pragma unroll 1
    for (int start = me; start < wanted << bits; start += AT_ONCE * BLOCK) {
        uint4 x[AT_ONCE];
        unsigned int reach = 0, with_penalty = 0;  // bit W * i + e: element e of vector i
        const auto find = [&](int i, int* b) {     // returns vector i, or -1; *b becomes its beam
            const int item = start + i * BLOCK;
            const Place place = item < wanted << bits ? places[item >> bits] : Place{};
            const int v = vector_of(place, item & (per_group - 1));
            *b = place.beam;
            return v < place.last ? v : -1;
        };
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int b;
            const int v = find(i, &b);
            x[i] = v < 0 ? nothing(scalar{}) : row_of(first_row + b)[v];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int b;
            const int v = find(i, &b);
            if (v < 0) continue;
            ((uint4*)shared_words)[i * BLOCK + me] = x[i];
            const bool dead = rows[b].score == NEG_INF;
#pragma unroll
            for (int e = 0; e < W; ++e)
                reach |= (total(dead ? NEG_INF : element(x[i], e, scalar{}), b) < limit ? 0u : 1u) << (W * i + e);
            if constexpr (HOOKS)
                if (listed) with_penalty |= penalties_of(first_row + b).listed(v) << W * i;
        }
#pragma unroll 1
        for (reach |= with_penalty; reach; reach &= reach - 1) {
            const int bit = __ffs(reach) - 1;
            int b;
            const int j = find(bit / W, &b) * W + bit % W;
            if (j >= vocab) continue;
            const float own = (float)((const scalar*)((const uint4*)shared_words + bit / W * BLOCK + me))[bit % W];
            const float logit = adjusted(own, b, j, with_penalty >> bit & 1);
            const Ranked candidate = ranked(logit, b, j);
            if (!(bound > candidate)) found.add(candidate);
        }
    }
    __syncthreads();
    const auto put_ranked = [&](int place, const Ranked& x) { results.put(place, x); };
    if (found.complete()) {
        found.re_rank<BLOCK>(wanted, put_ranked);
    } else {
        const auto element_at = [&](int i) {
            const Place place = places[i / W >> bits];
            const int v = vector_of(place, i / W & (per_group - 1)), j = v * W + i % W, b = place.beam;
            if (v >= place.last || j >= vocab) return Ranked{};
            return ranked(adjusted((float)row_of(first_row + b).x[j], b, j, HOOKS), b, j);
        };
        select_one_by_one<BLOCK>(element_at, (wanted << bits) * W, wanted, list, put_ranked);
    }
}
