// A step of beam search as in beam_step.cu, with the same results, by one block per sentence: for sentences with few logits to
// read, up to one for each multiprocessor. What is known between the phases is in shared memory, and no block waits for another.
// Constants: scalar = float, f16, bf16; SETTLED = 0, 1; BLOCK = 256, 512, 1024
// Launch:    grid = (sentences,), block = (BLOCK,), shared memory: 8 * (warps' parts of the normalisers of a sentence). A team of
//            TEAM threads reads a slice of a row.
//            dependent: beam_step_block
// Arch: sm_90 sm_100 sm_103
//
// With SETTLED the launch before writes neither `scores` nor `bans`, which are loaded beside it: whatever wrote them is over,
// as that launch, or one before it (see linear/row_linear.cu), has itself waited when it lets the next one start.
//
// A block has a multiprocessor for itself, so its time is that of one chain of phases. An instruction of all 32 warps takes
// eight cycles, so what few threads need is computed by these, and loads start together.
#include "common/compiler.cuh"
#include "common/grid_dependency.cuh"
#include "common/index.cuh"
#include "sampling/continuations.cuh"
#include "sampling/logit_groups.cuh"

constexpr int TEAM = 128, TEAMS = BLOCK / TEAM, W = WIDTH<scalar>;
constexpr int ROOM = BLOCK;  // candidates
constexpr int AT_ONCE = 4;   // threads whose elements a warp looks at together

// What a team reads: vectors of a slice of a row, of which a thread takes every TEAM-th.
struct Part { int slice, b, first, last; };

extern "C" __global__ void __launch_bounds__(BLOCK, 1024 / BLOCK) beam_step_block(
    const scalar* logits,        // (sentences * beam, >= vocab), rows `stride` apart
    const float* scores,         // (sentences, beam); -inf for a dead beam, whose logits are ignored
    const int* bans,             // (ban_count,), up to 32: tokens that are banned in all rows
    long long* __restrict__ flag,        // see common/index.cuh
    float* __restrict__ out_scores,      // (sentences, wanted)
    int* __restrict__ out_parents,       // (sentences, wanted)
    int* __restrict__ out_tokens,        // (sentences, wanted)
    long long stride,
    int vocab,
    int beam,
    int ban_count,
    int slices,                  // of a row; beam * slices teams read
    int inverse,                 // 256 / slices, rounded up
    int stages,                  // of a slice
    int wanted) {
    if (!SETTLED) grid_dependency_wait();
    extern __shared__ Normaliser normalisers[];  // (beam, stages of a row, warps of a team)
    __shared__ Ranked list[ROOM];
    __shared__ Row rows[TEAMS];
    __shared__ int listed[32];
    __shared__ int count;
    static_assert(sizeof(list) >= SUMS * BLOCK * sizeof(float));
    const int me = threadIdx.x % TEAM, lane = me % 32, sentence = blockIdx.x;
    const int size = stages * STAGE * TEAM, vectors = (vocab + W - 1) / W;  // of a slice, of a row
    const int row_parts = (vectors + STAGE * TEAM - 1) / (STAGE * TEAM) * (TEAM / 32);
    const Results results{out_scores, out_parents, out_tokens, (long long)sentence * wanted};
    const auto row_of = [&](int beam_row) {
        return LogitRow<scalar>{logits + ((long long)sentence * beam + beam_row) * stride, vocab};
    };
    const auto beam_of = [&](unsigned int thread) { return (int)(thread / TEAM) * inverse >> 8; };
    const auto part_of = [&](unsigned int thread) {
        const int b = beam_of(thread), slice = (int)(thread / TEAM) - b * slices, first = slice * size;
        return Part{slice, b, first, b < beam ? min(first + size, vectors) : 0};
    };

    // All loads start before it is known whether they are needed, those of scores and bans by each warp.
    const float score = lane < beam ? scores[sentence * beam + lane] : NEG_INF;
    BannedOfLanes<W> banned{{bans, ban_count}, lane < ban_count ? bans[lane] : -1};
    const Part part = part_of(threadIdx.x);
    const int b = opaque(part.b), first = opaque(part.first), last = opaque(part.last);
    const LogitRow<scalar> row{opaque(row_of(min(b, beam - 1)).x), vocab};
    if (SETTLED) grid_dependency_wait();
    uint4 x[STAGE];
    load_stage<TEAM>(x, row, first + me, min(last, row.whole()));
    uint4 sample = nothing(scalar{});
    load_16_bytes_if(lane < row.whole(), sample, row.piece(lane));  // without a branch, above which others would be used
    if (row.shift() && lane < row.whole()) sample = row[lane];
    const float own_score = __shfl_sync(~0u, score, min(b, beam - 1));
    banned.find<TEAM>(first, last, me);
    if (threadIdx.x < 32) {
        listed[lane] = banned.token;
        if (lane < beam) rows[lane].score = score;
        if (lane == 0) count = 0;
        if (sentence == 0 && lane < ban_count) out_of_range(banned.token, vocab, flag);
    }
    if (__ballot_sync(~0u, score != NEG_INF) == 0) {  // a sentence that has ended: the first candidates, all at -inf
        results.put_first<BLOCK>(wanted, vocab);
        return;
    }

    const bool dead = own_score == NEG_INF;
    Key best = 0;
    if (dead) {  // the logits are ignored, all candidates are -inf
        if (first + me < last) best = make_key(NEG_INF, (first + me) * W);
    } else if (first < last) {
        bool sure;
        const float reference = reference_of<scalar>(sample, &sure);
        best = read_slice<TEAM>(
            row, first, last, x, Plain{}, banned, reference, sure, 0, normalisers,
            b * row_parts + part.slice * stages * (TEAM / 32), (float4*)list + threadIdx.x / TEAM * (SUMS * TEAM / 4), me);
    }
    grid_launch_dependents();
    __syncthreads();
    const int joining = threadIdx.x / 32;
    if (joining < beam) {
        const bool alive = rows[joining].score != NEG_INF;  // what is not is not used
        const Normaliser all = warp_join(normalisers + joining * row_parts, alive ? row_parts : 0);
        if (lane == 0) rows[joining].peak = all.peak, rows[joining].log = logf(all.sum);
    }
    __syncthreads();

    // A bound that `wanted` threads reach.
    const unsigned int thread = opaque((unsigned int)threadIdx.x);  // numbers kept from above would be spilled
    const unsigned int most = best ? ordered(rows[min(beam_of(thread), beam - 1)].total(key_value(best))) : 0;
    const unsigned int bound = max(wanted <= 16 ? retrieve_few<BLOCK>(most, wanted) : retrieve<BLOCK>(most, wanted), 1);
    const float limit = from_ordered(bound);  // NaN, which nothing is below, if fewer threads have elements
    const Candidates<Ranked, ROOM> found{list, &count};
    banned.tokens = listed;
    const auto ranked = [&](float logit, int beam_row, int j) {
        const Row& row = rows[beam_row];
        if (row.score == NEG_INF || banned.contain(j)) logit = NEG_INF;
        return continuation(row.total(logit), logit, beam_row, j);
    };
    // The elements of the threads that do, by their warps, of AT_ONCE threads at a time: their loads take the time of one.
#pragma unroll 1
    for (unsigned int reaching = __ballot_sync(~0u, most >= bound); reaching;) {
#pragma unroll 1
        for (int at = thread % 32 / W * TEAM; at < size; at += 32 / W * TEAM) {
            int places[AT_ONCE];  // of an element of each: its token, above it its beam; or -1
            float logits[AT_ONCE];
            unsigned int left = reaching;
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e, left &= left - 1) {
                const unsigned int of = thread / 32 * 32 + __ffs(left) - 1;
                const Part part = part_of(of);
                const int v = part.first + of % TEAM + at, j = v * W + thread % W;
                places[e] = left && v < part.last && j < vocab ? part.b << TOKEN_BITS | j : -1;
                if (places[e] >= 0) logits[e] = (float)row_of(part.b).x[j];
            }
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e) {
                if (places[e] < 0) continue;
                const Ranked candidate = ranked(logits[e], places[e] >> TOKEN_BITS, places[e] & ((1 << TOKEN_BITS) - 1));
                if (!(key_value(candidate.score) < limit)) found.add(candidate);
            }
        }
        for (int e = 0; e < AT_ONCE; ++e) reaching &= reaching - 1;
    }
    __syncthreads();
    const auto put_ranked = [&](int place, const Ranked& x) { results.put(place, x); };
    if (found.complete()) {
        found.re_rank_by_warps<BLOCK>(wanted, put_ranked);
    } else {
        const auto element_at = [&](int i) {
            const int beam_row = i / vocab, j = i - beam_row * vocab;
            return ranked((float)row_of(beam_row).x[j], beam_row, j);
        };
        select_one_by_one<BLOCK>(element_at, beam * vocab, wanted, list, put_ranked);
    }
}
