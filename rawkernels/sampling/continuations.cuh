#pragma once
// Continuations of the beams of a sentence: their scores and their order, for beam_step.cu and beam_step_block.cu.
#include "common/math.cuh"
#include "sampling/topk.cuh"

constexpr int TOKEN_BITS = 26;  // of a token; the bits above are its beam

// A continuation, ordered by score, then beam, then logit, then token.
struct alignas(16) Ranked {  // lists of them hold float4 at first
    Key score, logit;
    __device__ bool operator>(const Ranked& other) const {
        return (score > other.score) | ((score == other.score) & (logit > other.logit));
    }
    __device__ int beam() const { return key_index(score); }
    __device__ int token() const { return key_index(logit) & ((1u << TOKEN_BITS) - 1); }
};
__device__ inline unsigned int leading(const Ranked& x) { return leading(x.score); }

// What the scores of a beam's continuations are made of: its normaliser, and its own score.
struct alignas(16) Row {
    float peak, log, score;
    __device__ float total(float logit) const { return logit == NEG_INF ? NEG_INF : logit - peak - log + score; }
};

// The best continuations of a sentence, best first: `place` counts from `first` on.
struct Results {
    float* scores;
    int *parents, *tokens;
    long long first;

    __device__ void put(int place, float score, int parent, int token) const {
        scores[first + place] = score;
        parents[first + place] = parent;
        tokens[first + place] = token;
    }
    __device__ void put(int place, const Ranked& x) const { put(place, key_value(x.score), x.beam(), x.token()); }
    // Of a sentence that has ended: the first continuations, all at -inf.
    template <int BLOCK>
    __device__ void put_first(int wanted, int vocab) const {
#pragma unroll 1
        for (int r = threadIdx.x; r < wanted; r += BLOCK) put(r, NEG_INF, r / vocab, r % vocab);
    }
};
__device__ inline Ranked continuation(float total, float logit, int beam, int token) {
    return {make_key(total, beam), make_key(logit, ((unsigned int)beam << TOKEN_BITS) + token)};
}
