// One step of beam search: the 2K best continuations of the K beams of each sentence.
// Constants: scalar = float, f16, bf16; BLOCK = 256
// Launch:    rows:  grid = (sentences * beam,), block = (BLOCK,). A block per beam, four passes over
//                   its logits, writes the keys of its 2K best.
//            merge: grid = (sentences,), block = (BLOCK,). The 2K best of a sentence's K lists.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/topk.cuh"

static_assert(BLOCK % 32 == 0, "beam_step.cu: BLOCK must be a multiple of the warp size");
static_assert(BLOCK >= 128, "beam_step.cu: 2K, up to 64, may be half of BLOCK at most");

constexpr int MAX_BEST = 64;

extern "C" __global__ void beam_step_rows(
    const scalar* __restrict__ logits,  // (sentences * beam, >= vocab), rows `stride` apart
    const float* __restrict__ scores,   // (sentences, beam); -inf: a dead beam, whose logits are not read
    const bool* __restrict__ banned,    // (vocab,) or null
    Key* __restrict__ lists,            // (sentences * beam, 2 * beam); 0 where there are fewer tokens
    long long stride,
    int vocab,
    int beam) {
    __shared__ Key best[MAX_BEST];
    const long long row = blockIdx.x;
    const int wanted = 2 * beam, there = min(wanted, vocab);
    const unsigned int first = (unsigned int)(row % beam) * vocab;  // beam * V + token orders equal scores
    const float score = scores[row];
    if (score == NEG_INF) {
        for (int r = threadIdx.x; r < wanted; r += BLOCK)
            lists[row * wanted + r] = r < there ? make_key(NEG_INF, first + r) : 0;
        return;
    }
    const scalar* x = logits + row * stride;
    const LogSum sum = block_log_sum<BLOCK>(x, vocab);
    const auto key = [=](int j) {
        const bool out = banned && banned[j];
        return make_key(out ? NEG_INF : (float)x[j] - sum.peak - sum.log + score, first + j);
    };
    block_topk<BLOCK>(key, vocab, there, best);
    for (int r = threadIdx.x; r < wanted; r += BLOCK) lists[row * wanted + r] = r < there ? best[r] : 0;
}

extern "C" __global__ void beam_step_merge(
    const Key* __restrict__ lists,  // (sentences, beam * 2 * beam)
    float* __restrict__ scores,     // (sentences, 2 * beam)
    int* __restrict__ parents,      // (sentences, 2 * beam)
    int* __restrict__ tokens,       // (sentences, 2 * beam)
    int vocab,
    int beam) {
    __shared__ Key best[MAX_BEST];
    const int wanted = 2 * beam;
    const long long sentence = blockIdx.x;
    const Key* mine = lists + sentence * beam * wanted;
    block_topk<BLOCK>([mine](int j) { return mine[j]; }, beam * wanted, wanted, best);
    for (int r = threadIdx.x; r < wanted; r += BLOCK) {
        const unsigned int flat = key_index(best[r]);
        scores[sentence * wanted + r] = key_value(best[r]);
        parents[sentence * wanted + r] = flat / vocab;
        tokens[sentence * wanted + r] = flat % vocab;
    }
}
