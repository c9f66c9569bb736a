// The update after beam_step: finished texts go to a pool of the K best, K beams continue, and a sentence may be done.
// Launch:    beam_update: grid = (sentences,), block = (BLOCK,), shared memory: 48 * beam bytes. One block per sentence.
//            beam_texts: grid = (ceil(sentences * nbest / BLOCK),). One thread per text.
//            dependent: beam_update, beam_texts
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/grid_dependency.cuh"

constexpr int BLOCK = 128, MAX_BEAM = 64;

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
    const float* candidate_scores,  // (sentences, 2 * beam), sorted
    const int* candidate_parents,
    const int* candidate_tokens,
    float* scores,                  // (sentences, beam): of the beams; -inf where done
    int* tokens,                    // (sentences, beam): the last token of each beam
    int* positions,                 // (sentences, beam), of these tokens
    int* key_counts,                // (sentences, beam), positions + 1
    int* steps,                     // (sentences,), updates so far
    const int* limits,              // (sentences,): maximal number of tokens of a text
    bool* done,                     // (sentences,)
    int* live,                      // (1,): number of sentences that are not done
    float* pool_normalised,         // (sentences, beam)
    float* pool_scores,
    int* pool_beams,
    int* pool_steps,
    int2* history,                  // (sentences, room, beam): token, parent
    short* slots,                   // (sentences, beam, room)
    const float* divisors,          // (room + 2,): divisor of a score by the length of its text
    int beam,
    int room,
    int eos,
    int nbest) {
    grid_dependency_wait();
    extern __shared__ Text texts[];  // 3 * beam
    __shared__ int continuing[MAX_BEAM], parents[MAX_BEAM];
    const int me = threadIdx.x, first = blockIdx.x * beam, step = steps[blockIdx.x], limit = limits[blockIdx.x];
    if (done[blockIdx.x]) return;
    const Pool pool{pool_normalised + first, pool_scores + first, pool_beams + first, pool_steps + first};
    candidate_scores += 2 * first, candidate_parents += 2 * first, candidate_tokens += 2 * first;
    const bool last = step + 1 == limit;

    for (int i = me; i < 2 * beam; i += BLOCK) {
        const bool ends = candidate_tokens[i] == eos;
        const float score = ends && i < beam ? candidate_scores[i] : NEG_INF;
        texts[beam + i] = {score / divisors[step + 1], score, candidate_parents[i], step};
        int rank = 0;  // texts that continue come first
        for (int j = 0; j < 2 * beam; ++j) {
            const bool other = candidate_tokens[j] == eos;
            rank += other < ends || (other == ends && j < i);
        }
        if (rank < beam) continuing[rank] = i;
    }
    pool.keep_best(texts, beam, 2 * beam);

    const float best = candidate_scores[continuing[0]], worst_kept = pool.normalised[nbest - 1];
    const float last_kept = pool.normalised[beam - 1];
    const bool full = last_kept != NEG_INF;
    // scores only decrease: compare the best one, divided as for the shortest and for the longest possible text
    const bool out_of_reach =
        best / divisors[min(step + 2, limit)] <= worst_kept && best / divisors[limit] <= worst_kept;
    const bool ending = full || out_of_reach;
    for (int i = me; i < beam; i += BLOCK) {
        const int chosen = continuing[i], token = candidate_tokens[chosen];
        const float score = candidate_scores[chosen];
        parents[i] = candidate_parents[chosen];
        history[((long long)blockIdx.x * room + step) * beam + i] = make_int2(token, parents[i]);
        scores[first + i] = ending || last ? NEG_INF : score;
        texts[beam + i] = {ending ? NEG_INF : score / divisors[limit], ending ? NEG_INF : score, i, limit};
        if (!ending && !last) {
            tokens[first + i] = token;
            positions[first + i] = step + 1;
            key_counts[first + i] = step + 2;
        }
    }
    __syncthreads();
    if (last) pool.keep_best(texts, beam, beam);
    if (ending || last) {
        if (me == 0) done[blockIdx.x] = true, atomicSub(live, 1);
    } else {
        if (me == 0) steps[blockIdx.x] = step + 1;
        reorder(slots + (long long)first * room, parents, beam, room, step + 1);
    }
}

// Writes the best texts of each sentence, from the history, last token first. One thread per text.
extern "C" __global__ void __launch_bounds__(BLOCK) beam_texts(
    const int* pool_beams,    // (sentences, beam)
    const int* pool_steps,
    const int2* history,      // (sentences, room, beam)
    int* texts,               // (sentences, nbest, room): the first pool_steps tokens of each are written
    int sentences,
    int beam,
    int room,
    int nbest) {
    grid_dependency_wait();
    const int text = blockIdx.x * BLOCK + threadIdx.x;
    if (text >= sentences * nbest) return;
    const int sentence = text / nbest, place = sentence * beam + text % nbest;
    int from = pool_beams[place];
    for (int step = pool_steps[place] - 1; step >= 0; --step) {
        const int2 link = history[((long long)sentence * room + step) * beam + from];
        texts[(long long)text * room + step] = link.x;
        from = link.y;
    }
}
