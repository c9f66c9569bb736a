// The update after beam_step: finished texts go to a pool of the K best, K beams continue, and a sentence may be done.
// Constants: SETTLED = 0, 1
// Launch:    beam_update: grid = (sentences,), block = (BLOCK,), shared memory: 16 * (beam + count) bytes. One block per sentence.
//            beam_start, beam_texts: the same, without shared memory.
//            dependent: beam_update, beam_texts
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
//
// With SETTLED the launch before beam_update writes none of the state, which is loaded beside it: whatever wrote that is over
// when a launch that has waited lets beam_update start.
#include "common/grid_dependency.cuh"

constexpr int BLOCK = 128, MAX_BEAM = 64, MAX_COUNT = 128;
constexpr int EACH = 8;             // loads that a thread has under way
constexpr int LINKS = 1024;         // of texts, in shared memory at a time
constexpr int TABLE = 2 * BLOCK;    // divisors that are loaded before it is known which are needed
static_assert(MAX_COUNT <= BLOCK && MAX_BEAM <= BLOCK);

enum Stopping { FAIRSEQ, ENOUGH, BEST, PRESENT, GREATEST };  // see gpuattn/ops/sampling/beam_update.py

// A candidate for the pool: a text of `steps` tokens that ends in beam `beam`.
struct alignas(16) Text { float normalised, score; int beam, steps; };
struct alignas(16) Candidate { float score; int parent, token, ends; };

// Whether `a` precedes `b`: NaN first, then the greater normalised score, then the lower index.
__device__ bool before(const Text& a, int i, const Text& b, int j) {
    const bool a_nan = isnan(a.normalised), b_nan = isnan(b.normalised);
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.normalised != b.normalised) return a.normalised > b.normalised;
    return i < j;
}

// The pool of a sentence, best first; empty entries have a score of -inf.
struct Pool {
    float* normalised;
    float* scores;
    int* beams;
    int* steps;

    // Keeps the best of texts[0] ... texts[texts_count - 1], whose first `beam` are the pool; they become best[0] ... as well.
    // Begins and ends with a barrier.
    __device__ void keep_best(const Text* texts, int beam, int texts_count, Text* best) const {
        __syncthreads();
        for (int i = threadIdx.x; i < texts_count; i += BLOCK) {
            const Text mine = texts[i];
            int rank = 0;
#pragma unroll 4
            for (int j = 0; j < texts_count; ++j) rank += before(texts[j], j, mine, i);
            if (rank >= beam) continue;
            best[rank] = mine;
            normalised[rank] = mine.normalised, scores[rank] = mine.score;
            beams[rank] = mine.beam, steps[rank] = mine.steps;
        }
        __syncthreads();
    }
};

// Loads up to EACH rows of a column of slots, (beam, room) of a sentence, from row `first` on.
__device__ void load_column(short (&held)[EACH], const short* slots, int first, int beam, int room, int column) {
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e < beam && column < room) held[e] = slots[(first + e) * room + column];
}
// In columns 0 ... used - 1 of slots row i becomes the former row parents[i]. `held`: this thread's first column.
__device__ void reorder(short (&held)[EACH], short* slots, const int* parents, int beam, int room, int used) {
    __shared__ short columns[MAX_BEAM * BLOCK];
    short* mine = columns + threadIdx.x;  // a thread only reads what it wrote itself: no barrier
#pragma unroll 1
    for (int column = threadIdx.x; column < used; column += BLOCK) {
#pragma unroll 1
        for (int first = 0; first < beam; first += EACH) {
            if (first > 0 || column >= BLOCK) load_column(held, slots, first, beam, room, column);
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (first + e < beam) mine[(first + e) * BLOCK] = held[e];
        }
#pragma unroll 4
        for (int i = 0; i < beam; ++i) slots[i * room + column] = mine[parents[i] * BLOCK];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) beam_update(
    const float* candidate_scores,  // (sentences, count), sorted; count >= 2 * beam
    const int* candidate_parents,
    const int* candidate_tokens,
    const int* eos,                 // (marks,): the tokens that end a text
    float* scores,                  // (sentences, beam): of the beams; -inf where done
    int* tokens,                    // (sentences, beam): the last token of each beam
    int* positions,                 // (sentences, beam), of these tokens
    int* key_counts,                // (sentences, beam), positions + 1
    int* steps,                     // (sentences,), updates so far
    const int* limits,              // (sentences,): maximal number of tokens of a text
    bool* done,                     // (sentences,)
    int* live,                      // (1,): number of sentences that are not done
    int* texts_ended,               // (sentences,): texts with an end mark so far
    bool* best_ended,               // (sentences,): whether one was ever the best candidate
    float* pool_normalised,         // (sentences, beam)
    float* pool_scores,
    int* pool_beams,
    int* pool_steps,
    int2* history,                  // (sentences, room, beam): token, parent
    short* slots,                   // (sentences, beam, room)
    const float* divisors,          // (room + 2,): divisor of a score by the length of its text
    int beam,
    int room,
    int count,
    int marks,
    int nbest,
    int stopping,                   // a Stopping
    int enough,                     // ended texts
    int end_counts) {               // 1 if the end mark counts in a text's length, else 0
    if (!SETTLED) grid_dependency_wait();
    extern __shared__ Text texts[];  // beam + count; the first `beam` are the pool
    __shared__ Candidate candidates[MAX_COUNT];
    __shared__ Text best_texts[MAX_BEAM];
    __shared__ int continuing[MAX_BEAM];
    __shared__ int parents[MAX_BEAM];
    __shared__ float table[TABLE];
    const int me = threadIdx.x, sentence = blockIdx.x, first = sentence * beam, place = sentence * count + me;

    // All is loaded before anything is known, so that the loads take the time of one.
    const int step = steps[sentence], limit = limits[sentence], ended_before = texts_ended[sentence];
    const bool was_done = done[sentence], was_best = best_ended[sentence];
    Text kept{};
    if (me < beam)
        kept = {pool_normalised[first + me], pool_scores[first + me], pool_beams[first + me], pool_steps[first + me]};
    slots += (long long)first * room;
    short held[EACH];
    load_column(held, slots, 0, beam, room, me);
    float divisor[TABLE / BLOCK];
#pragma unroll
    for (int i = 0; i < TABLE / BLOCK; ++i) divisor[i] = me + i * BLOCK < room + 2 ? divisors[me + i * BLOCK] : 0.f;
    if (SETTLED) grid_dependency_wait();
    Candidate mine{NEG_INF, 0, 0, 0};
    if (me < count) mine = {candidate_scores[place], candidate_parents[place], candidate_tokens[place], 0};
#pragma unroll 4
    for (int e = 0; e < marks; ++e) mine.ends |= mine.token == eos[e];
    if (was_done) return;
    if (me < count) candidates[me] = mine;
    if (me < beam) texts[me] = best_texts[me] = kept;
#pragma unroll
    for (int i = 0; i < TABLE / BLOCK; ++i) table[me + i * BLOCK] = divisor[i];
    __syncthreads();
    grid_launch_dependents();
    const auto divisor_of = [&](int length) { return length < TABLE ? table[length] : divisors[length]; };

    const bool last = step + 1 == limit, best_ends = candidates[0].ends;
    int ended_now = 0;
#pragma unroll 4
    for (int i = 0; i < beam; ++i) ended_now += candidates[i].ends && candidates[i].score != NEG_INF;
    if (me < count) {
        int rank = 0;  // texts that continue come first
#pragma unroll 4
        for (int j = 0; j < count; ++j) {
            const int ends = candidates[j].ends;
            rank += ends < mine.ends || (ends == mine.ends && j < me);
        }
        if (rank < beam) continuing[rank] = me;
        const float score = mine.ends && me < beam ? mine.score : NEG_INF;
        if (ended_now) texts[beam + me] = {score / divisor_of(step + end_counts), score, mine.parent, step};
    }
    const Pool pool{pool_normalised + first, pool_scores + first, pool_beams + first, pool_steps + first};
    if (ended_now) pool.keep_best(texts, beam, beam + count, best_texts);
    else __syncthreads();

    const float best = candidates[continuing[0]].score, worst_kept = best_texts[nbest - 1].normalised;
    const int ended = ended_before + ended_now;
    bool over = ended >= enough;
    if (stopping == FAIRSEQ) {
        // scores only decrease: compare the best one, divided as for the shortest and for the longest possible text
        const float shortest = divisor_of(min(step + 1 + end_counts, limit)), longest = divisor_of(limit);
        over |= best / shortest <= worst_kept && best / longest <= worst_kept;
    } else if (stopping == BEST) {
        over &= was_best || best_ends;
    } else if (stopping != ENOUGH) {
        over &= best / divisor_of(stopping == GREATEST ? limit : step + 1) <= best_texts[beam - 1].normalised;
    }
    const bool ending = over || best == NEG_INF;
    if (me < beam) {
        const int i = first + me, chosen = continuing[me];
        const Candidate next = candidates[chosen];
        const bool competes = stopping == FAIRSEQ ? !over : chosen < beam;
        parents[me] = next.parent;
        history[((long long)sentence * room + step) * beam + me] = make_int2(next.token, next.parent);
        scores[i] = ending || last ? NEG_INF : next.score;
        if (last) {
            texts[me] = best_texts[me];
            texts[beam + me] = {competes ? next.score / divisor_of(limit) : NEG_INF, competes ? next.score : NEG_INF, me, limit};
        }
        if (!ending && !last) tokens[i] = next.token, positions[i] = step + 1, key_counts[i] = step + 2;
    }
    if (last) pool.keep_best(texts, beam, 2 * beam, best_texts);
    if (me == 0) texts_ended[sentence] = ended, best_ended[sentence] = was_best || best_ends;
    if (ending || last) {
        if (me == 0) done[sentence] = true, atomicAdd(live, -1);
    } else {
        if (me == 0) steps[sentence] = step + 1;
        __syncthreads();
        reorder(held, slots, parents, beam, room, step + 1);
    }
}

// Begins the searches of the sentences whose new limit is 0 or more; others go on. One block per sentence.
extern "C" __global__ void __launch_bounds__(BLOCK) beam_start(
    const int* new_limits,    // (sentences,): maximal number of tokens; 0 is done at once, -1 goes on
    const int* first_tokens,  // (sentences,), or null: `bos`
    float* scores,            // the state, as in beam_update
    int* tokens,
    int* positions,
    int* key_counts,
    int* steps,
    int* limits,
    bool* done,
    int* live,
    int* texts_ended,
    bool* best_ended,
    float* pool_normalised,
    float* pool_scores,
    int* pool_beams,
    int* pool_steps,
    short* slots,
    int bos,
    int beam,
    int room) {
    const int me = threadIdx.x, sentence = blockIdx.x, first = sentence * beam, limit = new_limits[sentence];
    if (limit < 0) return;
    const int token = first_tokens ? first_tokens[sentence] : bos;
    for (int i = me; i < beam; i += BLOCK) {
        scores[first + i] = i == 0 && limit > 0 ? 0.f : NEG_INF;  // all beams begin alike: one of them is enough
        tokens[first + i] = token;
        positions[first + i] = 0, key_counts[first + i] = 1;
        pool_normalised[first + i] = pool_scores[first + i] = NEG_INF;
        pool_beams[first + i] = pool_steps[first + i] = 0;
    }
    for (int i = me; i < beam * room; i += BLOCK) slots[(long long)first * room + i] = i / room;
    if (me == 0) {
        if (done[sentence] != (limit == 0)) atomicAdd(live, limit == 0 ? -1 : 1);
        done[sentence] = limit == 0, best_ended[sentence] = false;
        limits[sentence] = limit, steps[sentence] = texts_ended[sentence] = 0;
    }
}

// Writes the best texts of each sentence, from the history, last token first, and their figures. One block per sentence, a
// thread per text: its links hang on each other, so they are followed in shared memory.
extern "C" __global__ void __launch_bounds__(BLOCK) beam_texts(
    const float* pool_normalised,  // (sentences, beam)
    const float* pool_scores,
    const int* pool_beams,
    const int* pool_steps,
    const int2* history,           // (sentences, room, beam)
    int* texts,                    // (sentences, nbest, room): the first `lengths` tokens of each are written
    int* lengths,                  // (sentences, nbest)
    float* scores,                 // (sentences, nbest)
    float* normalised,             // (sentences, nbest)
    int beam,
    int room,
    int nbest) {
    grid_dependency_wait();
    __shared__ int2 links[LINKS];
    __shared__ int steps[MAX_BEAM];
    const int me = threadIdx.x, sentence = blockIdx.x, place = sentence * beam + me, text = sentence * nbest + me;
    int left = 0, from = 0, longest = 0;
    if (me < nbest) {
        left = steps[me] = pool_steps[place], from = pool_beams[place];
        lengths[text] = left, scores[text] = pool_scores[place], normalised[text] = pool_normalised[place];
    }
    __syncthreads();
    for (int i = 0; i < nbest; ++i) longest = max(longest, steps[i]);
    history += (long long)sentence * room * beam, texts += (long long)text * room;
    const int each = LINKS / beam;  // steps
    for (int end = longest; end > 0; end -= each) {
        const int begin = max(end - each, 0);
        for (int i = me; i < (end - begin) * beam; i += BLOCK) links[i] = history[begin * beam + i];
        __syncthreads();
        for (; left > begin; --left) {
            const int2 link = links[(left - 1 - begin) * beam + from];
            texts[left - 1] = link.x, from = link.y;
        }
        __syncthreads();
    }
}
