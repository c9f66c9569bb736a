// The update after sample_tokens: each text takes its token, and may be done.
// Launch:    grid = (ceil(texts / BLOCK),), block = (BLOCK,). One thread per text.
//            dependent: text_update
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/grid_dependency.cuh"

constexpr int BLOCK = 128;

extern "C" __global__ void __launch_bounds__(BLOCK) text_update(
    const int* chosen,       // (texts,)
    const float* logprobs,   // (texts,)
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
    int eos) {
    grid_dependency_wait();
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= texts || done[i]) return;
    const int token = chosen[i], step = lengths[i];
    const bool ends = token == eos, stays = !ends && logprobs[i] != NEG_INF;
    scores[i] += logprobs[i];
    history[(long long)i * room + step] = token;
    lengths[i] = step + stays;
    ended[i] = ends;
    if (stays && step + 1 < limits[i]) {
        tokens[i] = token;
        ++positions[i], ++key_counts[i], ++keys[i].w;
    } else {
        done[i] = true;
        atomicSub(live, 1);
    }
}
