// A step of beam search as in beam_step.cu, with the same results, by one block per sentence: for sentences with few logits to
// read, up to one for each multiprocessor. What is known between the phases is in shared memory, and no block waits for another.
// Constants: scalar = float, f16, bf16; BLOCK = 256, 512, 1024
// Launch:    grid = (sentences,), block = (BLOCK,), shared memory: 8 * (warps' parts of the normalisers of a sentence). A team of
//            TEAM threads reads a slice of a row.
//            dependent: beam_step_block
// Arch: sm_90 sm_100 sm_103
#include "common/compiler.cuh"
#include "common/grid_dependency.cuh"
#include "common/index.cuh"
#include "sampling/continuations.cuh"
#include "sampling/logit_groups.cuh"

constexpr int TEAM = 128, TEAMS = BLOCK / TEAM, W = WIDTH<scalar>;
constexpr int ROOM = BLOCK;  // candidates

// What a thread reads: vectors of a slice of a row, every TEAM-th.
struct Part { int me, slice, b, first, last; };

extern "C" __global__ void __launch_bounds__(BLOCK, 1024 / BLOCK) beam_step_block(
    const scalar* logits,        // (sentences * beam, >= vocab), rows `stride` apart
    const float* scores,         // (sentences, beam); -inf for a dead beam, whose logits are ignored
    const int* bans,             // (ban_count,), up to TEAM: tokens that are banned in all rows
    long long* __restrict__ flag,        // see common/index.cuh
    float* __restrict__ out_scores,      // (sentences, wanted)
    int* __restrict__ out_parents,       // (sentences, wanted)
    int* __restrict__ out_tokens,        // (sentences, wanted)
    long long stride,
    int vocab,
    int beam,
    int ban_count,
    int slices,                  // of a row; beam * slices teams read
    int stages,                  // of a slice
    int wanted) {
    grid_dependency_wait();
    extern __shared__ Normaliser normalisers[];  // (beam, stages of a row, warps of a team)
    __shared__ Ranked list[ROOM];
    __shared__ Row rows[TEAMS];
    __shared__ int count;
    static_assert(sizeof(list) >= SUMS * BLOCK * sizeof(float));
    const int lane = threadIdx.x % 32, sentence = blockIdx.x;
    const int size = stages * STAGE * TEAM, vectors = (vocab + W - 1) / W;  // of a slice, of a row
    const int row_parts = (vectors + STAGE * TEAM - 1) / (STAGE * TEAM) * (TEAM / 32);
    const Results results{out_scores, out_parents, out_tokens, (long long)sentence * wanted};
    const auto row_of = [&](int beam_row) {
        return LogitRow<scalar>{logits + ((long long)sentence * beam + beam_row) * stride, vocab};
    };
    const auto part_of = [&](int thread) {
        const int team = thread / TEAM, b = team / slices, slice = team - b * slices, first = slice * size;
        return Part{thread % TEAM, slice, b, first, b < beam ? min(first + size, vectors) : 0};
    };

    // The first loads start before it is known whether they are needed.
    const auto [me, slice, b, first, last] = part_of(threadIdx.x);
    const LogitRow<scalar> row = row_of(min(b, beam - 1));
    uint4 x[STAGE];
    load_stage<TEAM>(x, row, first + me, min(last, row.whole()));
    const uint4 sample = lane < row.whole() ? row[lane] : nothing(scalar{});
    const float own_score = scores[sentence * beam + min(b, beam - 1)];
    bool alive = false;
    for (int i = lane; i < beam; i += 32) alive |= scores[sentence * beam + i] != NEG_INF;
    BannedTokens<W> banned{bans, ban_count};
    banned.find<TEAM>(first, last, me);
    if (sentence == 0 && threadIdx.x < ban_count) out_of_range(bans[threadIdx.x], vocab, flag);
    if (__ballot_sync(~0u, alive) == 0) {  // a sentence that has ended: the first candidates, all at -inf
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
            b * row_parts + slice * stages * (TEAM / 32), (float4*)list + threadIdx.x / TEAM * (SUMS * TEAM / 4), me);
    }
    grid_launch_dependents();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int joining = threadIdx.x / 32;
    if (joining < beam) {
        const float score = scores[sentence * beam + joining];
        const Normaliser all = warp_join(normalisers + joining * row_parts, score == NEG_INF ? 0 : row_parts);
        if (lane == 0) rows[joining] = {all.peak, logf(all.sum), score};  // those of dead beams are not used
    }
    __syncthreads();

    // A bound that `wanted` threads reach; the threads that do look at their elements again.
    const auto [me_too, _, of, begin, end] = part_of(opaque((int)threadIdx.x));  // kept from above, they would be spilled
    const LogitRow<scalar> again = row_of(min(of, beam - 1));
    const Row own = rows[min(of, beam - 1)];
    const unsigned int most = best ? ordered(own.total(key_value(best))) : 0;
    const unsigned int bound = max(retrieve<BLOCK>(most, wanted), 1);
    const float limit = from_ordered(bound);  // NaN, which nothing is below, if fewer threads have elements
    const Candidates<Ranked, ROOM> found{list, &count};
    const auto ranked = [&](float logit, int beam_row, int j) {
        const Row& row = rows[beam_row];
        if (row.score == NEG_INF || banned.contain(j)) logit = NEG_INF;
        return continuation(row.total(logit), logit, beam_row, j);
    };
    if (most >= bound)
#pragma unroll 1
        for (int v = begin + me_too; v < end; v += STAGE * TEAM) {
            unsigned int reach = 0;  // bit W * i + e: element e of vector i
#pragma unroll
            for (int i = 0; i < STAGE; ++i) {
                const int u = v + i * TEAM;
                const uint4 x = u < end ? again[u] : nothing(scalar{});
#pragma unroll
                for (int e = 0; e < W; ++e) {
                    const float logit = own.score == NEG_INF ? NEG_INF : element(x, e, scalar{});
                    reach |= (own.total(logit) < limit ? 0u : 1u) << (W * i + e);
                }
            }
#pragma unroll 1
            for (; reach; reach &= reach - 1) {
                const int bit = __ffs(reach) - 1, j = (v + bit / W * TEAM) * W + bit % W;
                if (j >= min(end * W, vocab)) continue;
                const Ranked candidate = ranked((float)again.x[j], of, j);
                if (!(key_value(candidate.score) < limit)) found.add(candidate);
            }
        }
    __syncthreads();
    const auto put_ranked = [&](int place, const Ranked& x) { results.put(place, x); };
    if (found.complete()) {
        found.re_rank<BLOCK>(wanted, put_ranked);
    } else {
        const auto element_at = [&](int i) {
            const int beam_row = i / vocab, j = i - beam_row * vocab;
            return ranked((float)row_of(beam_row).x[j], beam_row, j);
        };
        select_one_by_one<BLOCK>(element_at, beam * vocab, wanted, list, put_ranked);
    }
}
