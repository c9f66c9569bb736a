// The update after beam_step: finished texts go to a pool of the K best, K beams continue, and a sentence may be done.
// Launch:    beam_update: grid = (sentences,), block = (BLOCK,), shared memory: 16 * (beam + count) bytes. One block per sentence.
//            beam_start: the same, without shared memory.
//            beam_texts: grid = (ceil(sentences * nbest / BLOCK),). One thread per text.
//            dependent: beam_update, beam_texts
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"

constexpr int BLOCK = 128, MAX_BEAM = 64, MAX_COUNT = 128;

enum Stopping { FAIRSEQ, ENOUGH, BEST, PRESENT, GREATEST };  // see gpuattn/ops/sampling/beam_update.py

// A candidate for the pool: a text of `steps` tokens that ends in beam `beam`.
struct Text { float normalised, score; int beam, steps; };

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

    // Keeps the best of the pool and of texts[beam], ..., texts[beam + count - 1]. Ends with a barrier.
    __device__ void keep_best(Text* texts, int beam, int count) const {
        for (int i = threadIdx.x; i < beam; i += BLOCK) texts[i] = {normalised[i], scores[i], beams[i], steps[i]};
        __syncthreads();
        for (int i = threadIdx.x; i < beam + count; i += BLOCK) {
            int rank = 0;
            for (int j = 0; j < beam + count; ++j) rank += before(texts[j], j, texts[i], i);
            if (rank >= beam) continue;
            normalised[rank] = texts[i].normalised, scores[rank] = texts[i].score;
            beams[rank] = texts[i].beam, steps[rank] = texts[i].steps;
        }
        __syncthreads();
    }
};

// In columns 0 ... used - 1 of slots, (beam, room) of a sentence, row i becomes the former row parents[i].
__device__ void reorder(short* slots, const int* parents, int beam, int room, int used) {
    __shared__ short columns[MAX_BEAM * BLOCK];
    for (int first = 0; first < used; first += BLOCK) {
        const int column = first + threadIdx.x;
        if (column >= used) continue;  // a thread only reads what it wrote itself: no barrier
        for (int i = 0; i < beam; ++i) columns[i * BLOCK + threadIdx.x] = slots[i * room + column];
        for (int i = 0; i < beam; ++i) slots[i * room + column] = columns[parents[i] * BLOCK + threadIdx.x];
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
    grid_dependency_wait();
    extern __shared__ Text texts[];  // beam + count
    __shared__ bool ends[MAX_COUNT];
    __shared__ int continuing[MAX_BEAM];
    __shared__ int parents[MAX_BEAM];
    const int me = threadIdx.x, first = blockIdx.x * beam, step = steps[blockIdx.x], limit = limits[blockIdx.x];
    if (done[blockIdx.x]) return;
    const Pool pool{pool_normalised + first, pool_scores + first, pool_beams + first, pool_steps + first};
    candidate_scores += blockIdx.x * count, candidate_parents += blockIdx.x * count;
    candidate_tokens += blockIdx.x * count;
    const bool last = step + 1 == limit, was_best = best_ended[blockIdx.x];
    for (int i = me; i < count; i += BLOCK) {
        bool is_end = false;
        for (int e = 0; e < marks; ++e) is_end |= candidate_tokens[i] == eos[e];
        ends[i] = is_end;
    }
    int ended = texts_ended[blockIdx.x];
    __syncthreads();

    for (int i = 0; i < beam; ++i) ended += ends[i] && candidate_scores[i] != NEG_INF;
    for (int i = me; i < count; i += BLOCK) {
        const float score = ends[i] && i < beam ? candidate_scores[i] : NEG_INF;
        texts[beam + i] = {score / divisors[step + end_counts], score, candidate_parents[i], step};
        int rank = 0;  // texts that continue come first
        for (int j = 0; j < count; ++j) rank += ends[j] < ends[i] || (ends[j] == ends[i] && j < i);
        if (rank < beam) continuing[rank] = i;
    }
    pool.keep_best(texts, beam, count);

    const float best = candidate_scores[continuing[0]], worst_kept = pool.normalised[nbest - 1];
    const float last_kept = pool.normalised[beam - 1];
    bool over = ended >= enough;
    if (stopping == FAIRSEQ) {
        // scores only decrease: compare the best one, divided as for the shortest and for the longest possible text
        const float shortest = divisors[min(step + 1 + end_counts, limit)], longest = divisors[limit];
        over |= best / shortest <= worst_kept && best / longest <= worst_kept;
    } else if (stopping == BEST) {
        over &= was_best || ends[0];
    } else if (stopping != ENOUGH) {
        over &= best / divisors[stopping == GREATEST ? limit : step + 1] <= last_kept;
    }
    const bool ending = over || best == NEG_INF;
    for (int i = me; i < beam; i += BLOCK) {
        const int chosen = continuing[i], token = candidate_tokens[chosen];
        const float score = candidate_scores[chosen];
        const bool competes = stopping == FAIRSEQ ? !over : chosen < beam;
        parents[i] = candidate_parents[chosen];
        history[((long long)blockIdx.x * room + step) * beam + i] = make_int2(token, parents[i]);
        scores[first + i] = ending || last ? NEG_INF : score;
        texts[beam + i] = {competes ? score / divisors[limit] : NEG_INF, competes ? score : NEG_INF, i, limit};
        if (!ending && !last) {
            tokens[first + i] = token;
            positions[first + i] = step + 1;
            key_counts[first + i] = step + 2;
        }
    }
    __syncthreads();
    if (last) pool.keep_best(texts, beam, beam);
    if (me == 0) texts_ended[blockIdx.x] = ended, best_ended[blockIdx.x] = was_best || ends[0];
    if (ending || last) {
        if (me == 0) done[blockIdx.x] = true, atomicAdd(live, -1);
    } else {
        if (me == 0) steps[blockIdx.x] = step + 1;
        reorder(slots + (long long)first * room, parents, beam, room, step + 1);
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

// Writes the best texts of each sentence, from the history, last token first, and their figures. One thread per text.
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
    int sentences,
    int beam,
    int room,
    int nbest) {
    grid_dependency_wait();
    const int text = blockIdx.x * BLOCK + threadIdx.x;
    if (text >= sentences * nbest) return;
    const int sentence = text / nbest, place = sentence * beam + text % nbest;
    lengths[text] = pool_steps[place], scores[text] = pool_scores[place], normalised[text] = pool_normalised[place];
    int from = pool_beams[place];
    for (int step = pool_steps[place] - 1; step >= 0; --step) {
        const int2 link = history[((long long)sentence * room + step) * beam + from];
        texts[(long long)text * room + step] = link.x;
        from = link.y;
    }
}
