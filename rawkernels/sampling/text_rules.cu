// What the texts of a search allow next: tokens that a prefix forces, n-grams that may not be repeated, penalties of
// repeated tokens, no end mark before a least length.
// Constants: scalar = float, f16, bf16; ON_LOGITS = false, true
// Launch:    grid = (rows,), block = (BLOCK,), shared memory: 4 * room if a rule reads the texts. One block per row.
//            dependent: text_rules
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int BLOCK = 256;
constexpr float LOWEST = -3.4028235e38f;

// log-probability = x - peak - log
struct Normaliser { float peak, log; };

// Of a row; NaN if it has NaN or +inf. Every thread gets the result, and has read the whole row.
__device__ Normaliser normaliser_of(const scalar* x, int vocab) {
    float peak = LOWEST, sum = 0.f;
#pragma unroll 8
    for (int j = threadIdx.x; j < vocab; j += BLOCK) {
        const float value = x[j], greater = fmaxf(peak, value);
        sum = sum * exp2_fast((peak - greater) * LOG2E) + exp2_fast((value - greater) * LOG2E);
        peak = greater;
    }
    const float all = block_reduce<BLOCK>(peak, Max{}, LOWEST);
    sum = block_reduce<BLOCK>(sum * exp2_fast((peak - all) * LOG2E), Sum{}, 0.f);
    return {all, sum == 0.f ? 0.f : logf(sum)};
}

extern "C" __global__ void __launch_bounds__(BLOCK) text_rules(
    scalar* logits,        // (rows, >= vocab), rows `stride` apart
    float* scores,         // (rows,); -inf for a text that ended, to which no rule applies
    const int* lengths,    // (rows,): tokens of each text after the first
    const int* history,    // (sentences, room, beam, width): the tokens after the first are at 0 of `width`
    const short* slots,    // (sentences, beam, room): the beam of the token's entry in the history
    const int* first,      // (sentences,): the tokens that begin the texts
    const int* prefix,     // (sentences, prefix_room): the tokens that follow, -1 past the end
    const int* eos,        // (marks,): tokens that do not come before min_length
    const int* banned,     // (bans,): tokens that never come
    int* listed,           // (rows, count): see beam_step; null with ON_LOGITS or if count is 0
    float* amounts,        // (rows, count)
    long long stride,
    int vocab,
    int room,
    int beam,
    int width,
    int prefix_room,
    int marks,
    int bans,
    int min_length,
    int ngram,             // 0: no such rule
    float penalty) {       // 1: no such rule
    grid_dependency_wait();
    extern __shared__ int text[];
    const int me = threadIdx.x, row = blockIdx.x, sentence = row / beam, length = lengths[row];
    const bool by_text = ngram > 0 || penalty != 1.f, dead = scores[row] == NEG_INF;
    const int texts = by_text ? room : 0, count = texts + marks + bans;
    scalar* x = logits + row * stride;
    listed += (long long)row * count, amounts += (long long)row * count;
    const int forced = !dead && length < prefix_room ? prefix[sentence * prefix_room + length] : -1;
    if (forced >= 0) {
        const Normaliser normaliser = normaliser_of(x, vocab);
        const float logprob = (float)x[forced] - normaliser.peak - normaliser.log;
        __syncthreads();  // before x[forced] is overwritten
        for (int j = me; j < vocab; j += BLOCK) x[j] = (scalar)(j == forced ? 0.f : NEG_INF);
        if (me == 0) scores[row] += logprob;
    }
    if (dead || forced >= 0) {
        if constexpr (!ON_LOGITS)
            for (int i = me; i < count; i += BLOCK) listed[i] = -1;
        return;
    }

    if (by_text) {
        const int* own = history + (long long)sentence * room * beam * width;
        for (int j = me; j <= length; j += BLOCK) {
            const int token = j ? own[((j - 1) * beam + slots[(long long)row * room + j]) * width] : first[sentence];
            text[j] = min(max(token, 0), vocab - 1);  // embedding reports tokens that are out of range
        }
        __syncthreads();
    }
    const auto repeats = [&](int j) {  // whether text[j] came after what the text ends with
        bool same = ngram > 0 && j >= ngram - 1;
        for (int m = 1; same && m < ngram; ++m) same = text[j - m] == text[length + 1 - m];
        return same;
    };
    const auto is_first = [&](int j) {
        int i = 0;
        while (text[i] != text[j]) ++i;
        return i == j;
    };
    const auto penalised = [&](float value) { return value > 0.f ? value / penalty : value * penalty; };
    const bool early = length < min_length;
    if constexpr (ON_LOGITS) {
        if (penalty != 1.f) {
            for (int j = me; j <= length; j += BLOCK)
                if (is_first(j)) x[text[j]] = (scalar)penalised(x[text[j]]);
            __syncthreads();  // bans come last
        }
        for (int j = me; by_text && j <= length; j += BLOCK)
            if (repeats(j)) x[text[j]] = (scalar)NEG_INF;
        for (int i = me; early && i < marks; i += BLOCK) x[eos[i]] = (scalar)NEG_INF;
        for (int i = me; i < bans; i += BLOCK) x[banned[i]] = (scalar)NEG_INF;
    } else {
        Normaliser normaliser{};
        if (penalty != 1.f) normaliser = normaliser_of(x, vocab);
        for (int i = me; i < count; i += BLOCK) {
            int token = -1;
            float amount = -NEG_INF;
            if (i >= texts + marks) {
                token = banned[i - texts - marks];
            } else if (i >= texts) {
                token = early ? eos[i - texts] : -1;
            } else if (i <= length && repeats(i)) {
                token = text[i];
            } else if (i <= length && penalty != 1.f && is_first(i)) {
                token = text[i];
                const float logprob = (float)x[token] - normaliser.peak - normaliser.log;
                amount = logprob == NEG_INF ? 0.f : logprob - penalised(logprob);
            }
            listed[i] = token, amounts[i] = amount;
        }
    }
}
