#pragma once
// Slices of a row of logits, read once by registers: parts of the log-softmax's normaliser, and the best element of each group
// of a slice. The k largest elements of a row lie in the k groups with the best elements, whatever the groups: k elements, one
// of each of these groups, precede all elements of any other group.
#include "sampling/logits.cuh"
#include "sampling/topk.cuh"

// A slice consists of stages. In a stage each thread takes STAGE vectors: a stage's vector i * BLOCK + t is the i-th of thread t.
// The normaliser has a part for each warp of each stage, so that its bits do not depend on how many stages a slice has.

// Hooks that ban and penalise nothing.
struct Plain {
    static constexpr bool ANY = false;
    __device__ unsigned int hidden(int) const { return 0; }
    __device__ float adjusted(float logit, int) const { return logit; }
};

// Reads this thread's vectors from `first` to before `last`, the slice's bounds, of which load_stage(next, ...) loads the first
// stage, and writes its warp's part of each stage, from number `part` on. Returns
// the key of its best element: (logit, mark + index), with the last index of the vector that holds it, which orders groups as
// well; 0 if there is no element.
template <int BLOCK, typename T, typename Hooks>
__device__ Key read_slice(
    const LogitRow<T>& row, int first, int last, uint4 (&next)[STAGE], const Hooks& hooks, unsigned int mark,
    Normaliser* normalisers, int part) {
    constexpr int W = WIDTH<T>, STEP = STAGE * BLOCK;
    constexpr float LARGE = 1e38f;  // up to here x * LOG2E is finite
    const int me = threadIdx.x, whole = min(last, row.whole());
    Key best = 0;
    uint4 x[STAGE];
    unsigned int hidden[STAGE], next_hidden[STAGE];
    const auto look_up = [&](int v) {
        if constexpr (Hooks::ANY)
#pragma unroll
            for (int i = 0; i < STAGE; ++i) next_hidden[i] = v + i * BLOCK < last ? hooks.hidden((v + i * BLOCK) * W) : 0;
    };
    look_up(first + me);
#pragma unroll 1
    for (int v = first + me; v - me < last; v += STEP, part += BLOCK / 32) {
        if (row.shift() == 0) {
#pragma unroll
            for (int i = 0; i < STAGE; ++i) x[i] = next[i];
            load_stage<BLOCK>(next, row, v + STEP, whole);
        } else {
            load_shifted_stage<BLOCK>(x, next, row, v, whole);
        }
        add_last_vector<BLOCK>(x, row, v, min(v - me + STEP, last));
        if constexpr (Hooks::ANY) {
#pragma unroll
            for (int i = 0; i < STAGE; ++i) hidden[i] = next_hidden[i];
            look_up(v + STEP);
        }
        float greatest[STAGE], peak = NEG_INF;
#pragma unroll
        for (int i = 0; i < STAGE; ++i) {
            greatest[i] = greatest_of<T>(x[i]);
            peak = fmaxf(peak, greatest[i]);
        }
        peak = from_ordered(warp_max(ordered(peak)));
        const float scaled = fmaxf(peak, -LARGE) * LOG2E;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < STAGE; ++i)
#pragma unroll
            for (int e = 0; e < W; e += 2)
                sum += exp2_fast(fmaf(element(x[i], e, T{}), LOG2E, -scaled)) +
                       exp2_fast(fmaf(element(x[i], e + 1, T{}), LOG2E, -scaled));
        float most = NEG_INF;  // the greatest element that is not hidden
        int at = v;
        bool penalised = false;
#pragma unroll
        for (int i = 0; i < STAGE; ++i) {
            if constexpr (Hooks::ANY)
                if (hidden[i]) {
                    greatest[i] = greatest_but<T>(x[i], hidden[i]);
                    penalised |= hidden[i] >> W != 0;
                }
            if (greatest[i] > most) {
                most = greatest[i];
                at = v + i * BLOCK;
            }
        }
        if (v < last) best = max(best, make_key(most, mark + at * W + W - 1));
        // The sum is relative to 2^scaled, whose exponent was rounded.
        sum = warp_reduce(sum, Sum{});
        Normaliser mine{fmaxf(peak, LOWEST), peak == NEG_INF ? sum : sum * exp2_fast(fmaf(-peak, LOG2E, scaled))};
        // A warp with a NaN, or with exponents beyond those of float32, takes its elements again, one by one.
        const bool again = sum != sum || (peak != NEG_INF && !(fabsf(peak) < LARGE));
        if (again | penalised) {
            sum = 0.f;
#pragma unroll 1
            for (int u = v; u < min(v + STEP, last); u += BLOCK)
#pragma unroll 1
                for (int j = u * W; j < min(u * W + W, row.vocab); ++j) {
                    const float logit = (float)row.x[j];
                    best = max(best, make_key(hooks.adjusted(logit, j), mark + u * W + W - 1));
                    sum += exp_fast(logit - mine.peak);
                }
        }
        if (again) mine.sum = warp_reduce(sum, Sum{});
        if (me % 32 == 0) normalisers[part + me / 32] = mine;
    }
    return best;
}
