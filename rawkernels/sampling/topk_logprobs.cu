// The k largest logits of each row, in order, and their log-probabilities. Logits are read once.
// Constants: scalar = float, f16, bf16; BLOCK = 256, 1024 (k up to BLOCK / 2)
// Launch:    grid = (parts, up to 65535, rows / 65535 rounded up), block = (BLOCK,), shared memory: 16 * (size + 1)
//            or 16 * BLOCK if that is more. One block per slice of a row; the last block of a row merges its lists.
//            dependent: topk_logprobs_forward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "sampling/logit_slice.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCK == 256 ? 5 : 1) topk_logprobs_forward(
    const scalar* logits,   // (rows, >= vocab), rows `stride` apart
    Key* lists,                          // (rows, k, parts); unused if parts is 1, like the next two
    Normaliser* normalisers,             // (rows, parts)
    unsigned int* __restrict__ tickets,  // (rows,), 0
    float* __restrict__ logprobs,        // (rows, k)
    int* __restrict__ indices,           // (rows, k)
    long long rows,
    long long stride,
    int vocab,
    int k,
    int size) {                          // the most vectors of a slice
    grid_dependency_wait();
    extern __shared__ uint4 vectors[];
    __shared__ Key best[BLOCK / 2];
    __shared__ Normaliser whole;
    const int me = threadIdx.x, part = blockIdx.x, parts = gridDim.x;
    const long long row = blockIdx.y + (long long)blockIdx.z * gridDim.y;
    if (row >= rows) return;
    const Slice<scalar> slice(logits + row * stride, vocab, part, size, vectors);
    slice.fetch_half<BLOCK>(0);
    Key* mine = parts > 1 ? lists + row * parts * k + part : best;
    Normaliser normaliser = slice_topk<BLOCK>(slice, k, [&](int place, Key key) { mine[place * parts] = key; });
    if (parts > 1) {
        if (me == BLOCK - 1) normalisers[row * parts + part] = normaliser;
        if (!last_of(tickets + row, parts)) return;
        if (me >= BLOCK - 32) normaliser = warp_join(normalisers + row * parts, parts);
        const Key* all = lists + row * parts * k;
        lists_topk<BLOCK, 2 * BLOCK>(
            [&](int j) { return all[j]; }, parts * k, k, (Key*)vectors, [&](int place, Key key) { best[place] = key; });
    }
    if (me == BLOCK - 1) whole = normaliser;
    __syncthreads();
    const float log = whole.sum == 0.f ? 0.f : logf(whole.sum);  // a sum of 0: all are -inf
#pragma unroll 1
    for (int r = me; r < k; r += BLOCK) {
        logprobs[row * k + r] = key_value(best[r]) - whole.peak - log;
        indices[row * k + r] = key_index(best[r]);
    }
}
