// One step of beam search: the 2K best continuations of the K beams of each sentence. Logits are read once.
// Constants: scalar = float, f16, bf16; HOOKS = false, true; BLOCK = 256
// Launch:    grid = (parts, beam, sentences), block = (BLOCK,), shared memory: 16 * (size + 1), with HOOKS
//            size + 4 more, at least 32 * BLOCK. One block per slice of a row; the last block of a sentence
//            merges its lists.
//            dependent: beam_step_forward
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/grid_dependency.cuh"
#include "common/index.cuh"
#include "sampling/logit_slice.cuh"

static_assert(BLOCK == 256, "beam_step.cu: 2K, up to 128, is at most half of BLOCK");

constexpr int MAX_BEAM = 64, TOKEN_BITS = 26;

// Banned tokens, the same for all rows, and penalties for the tokens that a row lists.
struct Hooks {
    const bool* banned;
    const int* tokens;
    const float* penalties;
    unsigned int* listed;  // shared memory: a bit for each element of the slice
    int count, vocab, begin, end;
    long long* flag;

    __device__ void prepare() const {
        if (count == 0) return;
        for (int w = threadIdx.x; w <= (end - begin) / 32; w += BLOCK) listed[w] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += BLOCK) {
            const int token = tokens[i];
            if (token == -1 || out_of_range(token, vocab, flag) || token < begin || token >= end) continue;
            atomicOr(&listed[(token - begin) / 32], 1u << (token - begin) % 32);
        }
        __syncthreads();
    }
    // Bits for the vector from element j on: bit e if element j + e is banned or listed, bit W + e if it is listed.
    __device__ unsigned int hidden(int j) const {
        constexpr int W = WIDTH<scalar>;
        unsigned int bits = 0;
        if (count) bits = listed[(j - begin) / 32] >> (j - begin) % 32 & ((1u << W) - 1);
        bits |= bits << W;
        if (banned) {
            if ((size_t)(banned + j) % W || j + W > vocab) {
                for (int e = 0; e < W && j + e < vocab; ++e) bits |= banned[j + e] << e;
            } else if constexpr (W == 8) {
                bits |= (unsigned int)(*(const unsigned long long*)(banned + j) * 0x0102040810204080ull >> 56);
            } else {
                bits |= *(const unsigned int*)(banned + j) * 0x10204080u >> 28;
            }
        }
        return bits;
    }
    __device__ float adjusted(float logit, int j) const {
        if (banned && banned[j]) return NEG_INF;
        if (count && listed[(j - begin) / 32] >> (j - begin) % 32 & 1)
            for (int i = 0; i < count; ++i)
                if (tokens[i] == j) logit -= penalties[i];
        return logit;
    }
};

// A continuation, ordered by score, then beam, then logit, then token.
struct Ranked {
    Key score, logit;
    __device__ bool operator>(const Ranked& other) const {
        return (score > other.score) | ((score == other.score) & (logit > other.logit));
    }
};
__device__ unsigned int leading(const Ranked& x) { return leading(x.score); }

extern "C" __global__ void __launch_bounds__(BLOCK, 5) beam_step_forward(
    const scalar* logits,     // (sentences * beam, >= vocab), rows `stride` apart
    const float* scores,      // (sentences, beam); -inf for a dead beam, whose logits are ignored
    const bool* banned,       // (vocab,) or null
    const int* tokens,        // (sentences * beam, listed), -1 for none
    const float* penalties,   // (sentences * beam, listed)
    long long* __restrict__ flag,          // see common/index.cuh
    Key* lists,                            // (sentences, 2 * beam, beam, parts); 0 for no element
    Normaliser* normalisers,               // (sentences, beam, parts)
    unsigned int* __restrict__ tickets,    // (sentences,)
    float* __restrict__ out_scores,        // (sentences, 2 * beam)
    int* __restrict__ out_parents,         // (sentences, 2 * beam)
    int* __restrict__ out_tokens,          // (sentences, 2 * beam)
    long long stride,
    int vocab,
    int size,                              // the most vectors of a slice
    int listed) {
    grid_dependency_wait();
    extern __shared__ uint4 vectors[];
    const int me = threadIdx.x, part = blockIdx.x, parts = gridDim.x, beam = gridDim.y, wanted = 2 * beam;
    const long long first_row = (long long)blockIdx.z * beam, row = first_row + blockIdx.y;
    const unsigned int mark = blockIdx.y << TOKEN_BITS;
    const int slices = beam * parts;
    Key* all = lists + blockIdx.z * (long long)slices * wanted;  // the first element of each slice, then the second ones ...
    Key* mine = all + blockIdx.y * parts + part;
    const auto write = [&](int place, Key key) { mine[place * slices] = key; };
    Normaliser normaliser{0.f, 1.f};
    const float score = scores[row];
    const Slice<scalar> slice(logits + row * stride, vocab, part, size, vectors);
    slice.fetch_half<BLOCK>(0);  // before the score is known
    if (score == NEG_INF) {  // all candidates are -inf: the first tokens are enough
#pragma unroll 1
        for (int r = me; r < wanted; r += BLOCK)
            write(r, part == 0 && r < vocab ? make_key(NEG_INF, mark + r) : 0);
        cp_async_wait<0>();
    } else if constexpr (HOOKS) {
        unsigned int* bits = (unsigned int*)(vectors + size + 1);
        const Hooks hooks{banned, tokens + row * listed, penalties + row * listed, bits, listed, vocab,
                          slice.begin, slice.end, flag};
        normaliser = slice_topk<BLOCK>(slice, hooks, wanted, mark, write);
    } else {
        normaliser = slice_topk<BLOCK>(slice, Plain{}, wanted, mark, write);
    }
    if (me == BLOCK - 1) normalisers[row * parts + part] = normaliser;
    if (!last_of(tickets + blockIdx.z, slices)) return;

    // Merge: join each row's normalisers, then search all lists of the sentence.
    struct Row { float peak, log, score; };
    __shared__ Row rows[MAX_BEAM];
    const int n = slices * wanted;
    const Key first = me < n ? all[me] : 0;
#pragma unroll 1
    for (int b = me / 32; b < beam; b += BLOCK / 32) {
        const float score = scores[first_row + b];
        normaliser = warp_join(normalisers + (first_row + b) * parts, parts);
        if (me % 32 == 0) rows[b] = {normaliser.peak, logf(normaliser.sum), score};
    }
    const auto ranked = [&](int i) {
        const Key key = i == me ? first : all[i];
        const unsigned int b = key_index(key) >> TOKEN_BITS;
        if (key == 0) return Ranked{};
        const float logit = key_value(key);
        const float score = logit == NEG_INF ? NEG_INF : logit - rows[b].peak - rows[b].log + rows[b].score;
        return Ranked{make_key(score, b), key};
    };
    lists_topk<BLOCK, 2 * BLOCK>(ranked, n, wanted, (Ranked*)vectors, [&](int place, const Ranked& x) {
        const long long at = (long long)blockIdx.z * wanted + place;
        out_scores[at] = key_value(x.score);
        out_parents[at] = key_index(x.score);
        out_tokens[at] = key_index(x.logit) & ((1u << TOKEN_BITS) - 1);
    });
}
