// The k largest logits of each row, in order, and their log-probabilities.
// Constants: scalar = float, f16, bf16; BLOCK = 256, 1024 (k up to BLOCK / 2)
// Launch:    grid = (rows,), block = (BLOCK,). A block per row, four passes over it.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/topk.cuh"

static_assert(BLOCK % 32 == 0, "topk_logprobs.cu: BLOCK must be a multiple of the warp size");

extern "C" __global__ void topk_logprobs_forward(
    const scalar* __restrict__ logits,  // (rows, >= vocab), rows `stride` apart
    float* __restrict__ logprobs,       // (rows, k)
    int* __restrict__ indices,          // (rows, k)
    long long stride,
    int vocab,
    int k) {
    __shared__ Key best[BLOCK / 2];
    const long long row = blockIdx.x;
    const scalar* x = logits + row * stride;
    const LogSum sum = block_log_sum<BLOCK>(x, vocab);
    block_topk<BLOCK>([x](int j) { return make_key((float)x[j], j); }, vocab, k, best);
    for (int r = threadIdx.x; r < k; r += BLOCK) {
        logprobs[row * k + r] = key_value(best[r]) - sum.peak - sum.log;
        indices[row * k + r] = key_index(best[r]);
    }
}
