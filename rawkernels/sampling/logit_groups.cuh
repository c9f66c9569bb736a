#pragma once
// Slices of a row of logits, read once by registers: parts of the log-softmax's normaliser, and the best element of each group
// of a slice. The k largest elements of a row lie in the k groups with the best elements, whatever the groups: k elements, one
// of each of these groups, precede all elements of any other group.
#include "common/compiler.cuh"
#include "sampling/logits.cuh"
#include "sampling/topk.cuh"

// A slice consists of stages. In a stage each thread takes STAGE vectors: a stage's vector i * BLOCK + t is the i-th of thread t.
// The normaliser has a part for each warp of each stage, so that its bits do not depend on how many stages a slice has. Each
// part is relative to a number that is the same in the whole row, so the loop needs no maximum of a warp; the sums of several
// stages are added up over the lanes together.

constexpr int SUMS = 4;  // stages whose sums are added up together

// A few tokens that are banned in every row, as a thread sees them: for its own vectors of a slice.
template <int W>
struct BannedTokens {
    const int* tokens;
    int count;
    unsigned int mine;  // bit b: one of its vectors number b, b + 32 ... of the slice holds one of them

    template <int BLOCK>
    __device__ void find(int first, int last, int me) {
        mine = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const unsigned int v = (unsigned int)tokens[i] / W - first;
            if (v < last - first && v % BLOCK == me) mine |= 1u << v / BLOCK % 32;
        }
    }
    // Bit e: element W * v + e is one.
    __device__ unsigned int in_vector(int v) const {
        unsigned int bits = 0;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const unsigned int e = tokens[i] - v * W;
            bits |= e < W ? 1u << e : 0;
        }
        return bits;
    }
    __device__ bool contain(int j) const {
        bool found = false;
#pragma unroll 1
        for (int i = 0; i < count; ++i) found |= tokens[i] == j;
        return found;
    }
    // The key, as of read_slice, of the best element of the vectors that may hold them.
    template <int BLOCK, typename T, typename Hooks>
    __device__ Key best(const LogitRow<T>& row, int first, int last, const Hooks& hooks, unsigned int mark, int me) const {
        Key best = 0;
#pragma unroll 1
        for (unsigned int left = mine; left; left &= left - 1)
#pragma unroll 1
            for (int u = first + me + (__ffs(left) - 1) * BLOCK; u < last; u += 32 * BLOCK) {
                const unsigned int hidden = hooks.hidden(u * W) | in_vector(u);
                const float greatest = greatest_but<T>(allowed<T>(row[u], u * W, row.vocab, nullptr), hidden);
                best = max(best, make_key(greatest, mark + u * W + W - 1));
            }
        return best;
    }
};

// The same for up to 32 tokens, each of which a lane has loaded, with fewer instructions but more registers. By whole warps.
template <int W>
struct BannedOfLanes : BannedTokens<W> {
    int token;             // number `lane`, or -1
    unsigned int of_warp;  // bit i: token i is in a vector of the warp

    template <int BLOCK>
    __device__ void find(int first, int last, int me) {
        const unsigned int v = (unsigned int)token / W - first;
        of_warp = __ballot_sync(~0u, v < last - first && v % BLOCK / 32 == me / 32);
        this->mine = 0;
#pragma unroll 1
        for (unsigned int left = of_warp; left; left &= left - 1) {
            const unsigned int u = __shfl_sync(~0u, v, __ffs(left) - 1);
            if (u % 32 == me % 32) this->mine |= 1u << u / BLOCK % 32;
        }
    }
    // Whether one of those in the warp's vectors is j, which may differ between lanes.
    __device__ bool warp_contains(int j) const {
        bool found = false;
#pragma unroll 1
        for (unsigned int left = of_warp; left; left &= left - 1) found |= __shfl_sync(~0u, token, __ffs(left) - 1) == j;
        return found;
    }
    // A lane looks at one element.
    template <int BLOCK, typename T, typename Hooks>
    __device__ Key best(const LogitRow<T>& row, int first, int last, const Hooks& hooks, unsigned int mark, int me) const {
        const int lane = me % 32;
        Key best = 0;
#pragma unroll 1
        for (unsigned int left = of_warp; left; left &= left - 1) {
            const unsigned int v = (unsigned int)__shfl_sync(~0u, token, __ffs(left) - 1) / W - first;
#pragma unroll 1
            for (int u = first + (int)(v % (32 * BLOCK)); u < last; u += 32 * BLOCK) {
                const int j = u * W + lane;
                float logit = lane < W && j < row.vocab ? (float)row.x[j] : NEG_INF;
                if (hooks.hidden(u * W) >> lane & 1 || warp_contains(j)) logit = NEG_INF;
                const unsigned int greatest = warp_max(ordered(logit));
                if ((u - first) % 32 == lane) best = max(best, (Key)greatest << 32 | ~(mark + u * W + W - 1));
            }
        }
        return best;
    }
};

// Hooks that ban and penalise nothing.
struct Plain {
    static constexpr bool ANY = false;
    __device__ unsigned int hidden(int) const { return 0; }
    __device__ float less(float logit, int) const { return logit; }
};

// What the normaliser's parts of a row are relative to, the same in all its slices: the greatest finite number of its first 32
// vectors. Then the row's sum is 1 or more, so terms that underflow do not count. 0 and *sure = false if there is none.
template <typename T>
__device__ float reference_of(uint4 first, bool* sure) {
    constexpr float LARGE = 1e38f;  // up to here x * LOG2E is finite
    float greatest = NEG_INF;
#pragma unroll
    for (int e = 0; e < WIDTH<T>; ++e) {
        const float x = element(first, e, T{});
        if (fabsf(x) < LARGE) greatest = fmaxf(greatest, x);
    }
    greatest = from_ordered(warp_max(ordered(greatest)));
    *sure = greatest != NEG_INF;
    return *sure ? greatest : 0.f;
}

// Takes this thread's vectors v, v + BLOCK ... before `end` again, those of a stage whose sum is not a number, overflows or
// vanishes: returns their part of the normaliser, relative to the warp's greatest element. `best` learns of NaN.
template <int BLOCK, typename T, typename Hooks>
__device__ Normaliser read_again(
    const LogitRow<T>& row, int v, int end, const Hooks& hooks, const BannedTokens<WIDTH<T>>& bans, unsigned int mark, Key& best) {
    constexpr int W = WIDTH<T>;
    float peak = LOWEST, sum = 0.f;
    const auto vector = [&](int u) { return allowed<T>(row[u], u * W, row.vocab, nullptr); };
#pragma unroll 1
    for (int u = v; u < end; u += BLOCK) {
        const uint4 x = vector(u);
        peak = fmaxf(peak, greatest_of<T>(x));
        const float most = greatest_but<T>(x, hooks.hidden(u * W) | bans.in_vector(u));
        if (most != most) best = max(best, make_key(most, mark + u * W + W - 1));
    }
    peak = warp_reduce(peak, Max{});
#pragma unroll 1
    for (int u = v; u < end; u += BLOCK) {
        const uint4 x = vector(u);
#pragma unroll
        for (int e = 0; e < W; ++e) sum += exp_fast(element(x, e, T{}) - peak);
    }
    return {peak, warp_reduce(sum, Sum{})};
}

// Reads the vectors of thread `me` of BLOCK from `first` to before `last`, the slice's bounds, of which load_stage(x, ...) loads
// the first stage, and writes its warp's part of each stage, from number `part` on. `reference`, `sure`: of reference_of.
// `sums`: shared memory for SUMS * BLOCK floats, those of the threads, stage after stage. Returns the key of its best element:
// (logit, mark + index), with the last index of the vector that holds it, which orders groups as well; 0 if there is no element.
template <int BLOCK, typename T, typename Hooks, typename Banned>
__device__ Key read_slice(
    const LogitRow<T>& row, int first, int last, uint4 (&x)[STAGE], const Hooks& hooks,
    const Banned& bans, float reference, bool sure, unsigned int mark, Normaliser* normalisers, int part,
    float4* sums, int me) {
    constexpr int W = WIDTH<T>, STEP = STAGE * BLOCK;
    const int lane = me % 32, whole = min(last, row.whole());
    const int loadable = opaque(row.shift() ? 0 : whole);  // vectors that one load instruction takes
    const float scaled = reference * LOG2E;
    const uint4* next = row.piece(first + me) + STEP;
    // The loop leaves out the vectors that may hold banned tokens.
    Key best = bans.template best<BLOCK>(row, first, last, hooks, mark, me);
    float most = NEG_INF;  // the greatest of the others that is neither banned nor listed
    int at = first + me;
    // Writes the parts of the stages before vector `end` whose sums are in shared memory, from vector `begin` on.
    const auto add_up = [&](int begin, int end) {
        const int stages = (end - begin) / STEP, stage = lane / 8;
        __syncwarp();
        float sum = 0.f;
        if (stage < stages) {
            const float4 four = sums[stage * (BLOCK / 4) + me / 32 * 8 + lane % 8];
            sum = four.x + four.y + (four.z + four.w);
        }
#pragma unroll
        for (int other = 4; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        // The sum is relative to 2^scaled, whose exponent was rounded.
        if (lane % 8 == 0 && stage < stages)
            normalisers[part + stage * (BLOCK / 32) + me / 32] = {reference, sum * exp2_fast(fmaf(-reference, LOG2E, scaled))};
        const bool bad = !(sum <= 1e38f) || (!sure && sum < 1e-30f);
        unsigned int again = __ballot_sync(~0u, stage < stages && bad);
#pragma unroll 1
        for (int s = 0; again; ++s, again >>= 8) {
            if (!(again & 1)) continue;
            const int v = begin + s * STEP + me;
            const Normaliser mine = read_again<BLOCK>(row, v, min(v + STEP, last), hooks, bans, mark, best);
            if (lane == 0) normalisers[part + s * (BLOCK / 32) + me / 32] = mine;
        }
        __syncwarp();
        part += stages * (BLOCK / 32);
    };
    int begin = first;
#pragma unroll 1
    for (int v = first + me, n = 0; v - me < last; v += STEP, n += STAGE, next += STEP) {
        const int behind = v - me + STEP;
        if (behind > loadable) {
            uint4 second[STAGE];
            if (row.shift()) load_shifted_stage<BLOCK>(x, second, row, v, whole);
#pragma unroll
            for (int i = 0; i < STAGE; ++i)
                if (v + i * BLOCK >= whole) x[i] = nothing(T{});
            add_last_vector<BLOCK>(x, row, v, min(behind, last));
        }
        const unsigned int left_out = bans.mine >> n % 32;
        bool penalised = false;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < STAGE; ++i) {
            const int u = v + i * BLOCK;
            float greatest = greatest_of<T>(x[i]);
#pragma unroll
            for (int e = 0; e < W; e += 2)
                sum += exp2_fast(fmaf(element(x[i], e, T{}), LOG2E, -scaled)) +
                       exp2_fast(fmaf(element(x[i], e + 1, T{}), LOG2E, -scaled));
            if constexpr (Hooks::ANY) {
                const unsigned int hidden = u < last ? hooks.hidden(u * W) : 0;
                if (hidden) greatest = greatest_but<T>(x[i], hidden);
                penalised |= hidden >> W != 0;
            }
            if (left_out >> i & 1) greatest = NEG_INF;
            if (greatest > most) {
                most = greatest;
                at = u;
            }
            load_16_bytes_if(u + STEP < loadable, x[i], next + i * BLOCK);
        }
        ((float*)sums)[n / STAGE % SUMS * BLOCK + me] = sum;
        if constexpr (Hooks::ANY)
            if (penalised)
#pragma unroll 1
                for (int u = v; u < min(v + STEP, last); u += BLOCK)
#pragma unroll 1
                    for (unsigned int listed = hooks.hidden(u * W) >> W; listed; listed &= listed - 1) {
                        const int j = u * W + __ffs(listed) - 1;
                        if (j >= row.vocab || bans.contain(j)) continue;
                        best = max(best, make_key(hooks.less((float)row.x[j], j), mark + u * W + W - 1));
                    }
        if (n / STAGE % SUMS == SUMS - 1 || behind >= last) {
            add_up(begin, behind);
            begin = behind;
        }
    }
    return first + me < last ? max(best, make_key(most, mark + at * W + W - 1)) : 0;
}
