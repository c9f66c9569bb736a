// The update after sample_tokens: each text takes its token, and may be done.
// Constants: SETTLED = 0, 1
// Launch:    grid = (ceil(texts / BLOCK),), block = (BLOCK,). One thread per text.
//            text_start: the same.
//            dependent: text_update
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
//
// With SETTLED the launch before text_update writes none of the state, which is loaded beside it: whatever wrote that is over
// when a launch that has waited lets text_update start.
#include "common/grid_dependency.cuh"

constexpr int BLOCK = 128;

extern "C" __global__ void __launch_bounds__(BLOCK) text_update(
    const int* chosen,       // (texts,)
    const float* logprobs,   // (texts,)
    const int* eos,          // (marks,): the tokens that end a text
    float* scores,           // (texts,): sum of the log-probabilities
    int* tokens,             // (texts,): the last token
    int* positions,          // (texts,), of it
    int* key_counts,         // (texts,), positions + 1
    uint4* keys,             // (texts,): seed, stream and step of the next draw
    int* lengths,            // (texts,): number of new tokens, an end mark not counted
    const int* limits,       // (texts,): maximal number of new tokens
    bool* done,
    bool* ended,             // (texts,): whether an end mark came
    int* live,               // (1,): number of texts that are not done
    int* history,            // (texts, room): new tokens
    int texts,
    int room,
    int marks) {
    if (!SETTLED) grid_dependency_wait();
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    const bool going = i < texts && !done[i];
    int step = 0, limit = 0, position = 0, draw = 0;
    float score = 0;
    if (going) step = lengths[i], limit = limits[i], position = positions[i], draw = keys[i].w, score = scores[i];
    if (SETTLED) grid_dependency_wait();
    if (!going) return;
    const int token = chosen[i];
    const float logprob = logprobs[i];
    bool ends = false;
    for (int e = 0; e < marks; ++e) ends |= token == eos[e];
    const bool stays = !ends && logprob != NEG_INF;
    scores[i] = score + logprob;
    history[(long long)i * room + step] = token;
    lengths[i] = step + stays;
    ended[i] = ends;
    if (stays && step + 1 < limit) {
        tokens[i] = token;
        positions[i] = position + 1, key_counts[i] = position + 2, keys[i].w = draw + 1;
    } else {
        done[i] = true;
        atomicAdd(live, -1);
    }
}

// Begins the texts whose new limit is 0 or more; others go on. One thread per text.
extern "C" __global__ void __launch_bounds__(BLOCK) text_start(
    const int* new_tokens,     // (texts,)
    const int* new_positions,  // (texts,)
    const int* new_limits,     // (texts,): maximal number of new tokens; 0 is done at once, -1 goes on
    const uint4* new_keys,     // (texts,)
    float* scores,             // the state, as in text_update
    int* tokens,
    int* positions,
    int* key_counts,
    uint4* keys,
    int* lengths,
    int* limits,
    bool* done,
    bool* ended,
    int* live,
    int texts) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= texts || new_limits[i] < 0) return;
    const int limit = new_limits[i], position = new_positions[i];
    tokens[i] = new_tokens[i], positions[i] = position, key_counts[i] = position + 1, keys[i] = new_keys[i];
    scores[i] = 0.f, lengths[i] = 0, limits[i] = limit, ended[i] = false;
    if (done[i] != (limit == 0)) atomicAdd(live, limit == 0 ? -1 : 1);
    done[i] = limit == 0;
}
