#pragma once
// A slice of a row of logits, read once, 16 bytes at a time: its part of the log-softmax's normaliser and its k largest.
// Log-softmax preserves the order within a row, so elements are selected by logit.
#include "common/cp_async.cuh"
#include "common/global_memory.cuh"
#include "common/math.cuh"
#include "common/pair.cuh"
#include "sampling/topk.cuh"

constexpr float LOWEST = -3.4028235e38f;

__device__ inline float exp_fast(float x) { return exp2_fast(x * LOG2E); }

// log-probability = x - peak - log(sum), with the normalisers of all slices of the row joined.
struct Normaliser { float peak, sum; };

// Joins the lanes' parts; every lane gets the result.
__device__ inline Normaliser warp_join(Normaliser mine) {
    const float peak = warp_reduce(mine.peak, Max{});
    return {peak, warp_reduce(mine.sum * exp_fast(mine.peak - peak), Sum{})};
}
// Joins the parts in a list.
__device__ inline Normaliser warp_join(const Normaliser* part, int parts) {
    Normaliser mine{LOWEST, 0.f};
#pragma unroll 1
    for (int p = threadIdx.x % 32; p < parts; p += 32) {
        const Normaliser other = part[p];
        const float peak = fmaxf(mine.peak, other.peak);
        mine = {peak, mine.sum * exp_fast(mine.peak - peak) + other.sum * exp_fast(other.peak - peak)};
    }
    return warp_join(mine);
}

// ---- 16 bytes of logits
template <typename T> constexpr int WIDTH = 16 / sizeof(T);

__device__ inline unsigned int word(uint4 v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }
__device__ inline float element(uint4 v, int e, float) { return __uint_as_float(word(v, e)); }
__device__ inline float element(uint4 v, int e, bf16) {
    return __uint_as_float(e % 2 ? word(v, e / 2) & 0xffff0000u : word(v, e / 2) << 16);
}
__device__ inline float element(uint4 v, int e, f16) {
    f16 x;
    x.bits = (unsigned short)(word(v, e / 2) >> e % 2 * 16);
    return (float)x;
}
template <typename T>
__device__ float greatest_of(uint4 v) {
    if constexpr (WIDTH<T> == 8) {
        v.x = max_nan_pair(T{}, max_nan_pair(T{}, v.x, v.y), max_nan_pair(T{}, v.z, v.w));
        return max_nan(element(v, 0, T{}), element(v, 1, T{}));
    } else {
        return max_nan(max_nan(element(v, 0, T{}), element(v, 1, T{})),
                       max_nan(element(v, 2, T{}), element(v, 3, T{})));
    }
}
template <typename T>
__device__ float greatest_but(uint4 v, unsigned int hidden) {  // bit e: ignore element e
    float greatest = NEG_INF;
#pragma unroll
    for (int e = 0; e < WIDTH<T>; ++e)
        if (!(hidden >> e & 1)) greatest = max_nan(greatest, element(v, e, T{}));
    return greatest;
}

// ---- slices
// Elements begin .. end - 1 of a row, copied to shared memory. Vector v holds the WIDTH elements from begin + WIDTH * v on,
// and -inf past the end. The row's alignment does not change the results.
template <typename T>
struct Slice {
    const T* x;  // the row
    T* copy;     // shared memory for WIDTH * (size + 1) elements
    int vocab, begin, end, vectors;
    int shift;   // elements between the last multiple of 16 bytes and the slice's begin

    // Slice number `part` of a row cut into slices of up to `size` vectors, at most 32 per thread.
    __device__ Slice(const T* row, int vocab, int part, int size, uint4* shared)
        : x(row), copy((T*)shared), vocab(vocab) {
        begin = min(part * size * WIDTH<T>, vocab);
        end = min(begin + size * WIDTH<T>, vocab);
        vectors = (end - begin + WIDTH<T> - 1) / WIDTH<T>;
        shift = (size_t)(x + begin) % 16 / sizeof(T);
    }
    // Starts this thread's copies of the first or the second half, in pieces of 16 bytes at multiples of 16.
    template <int BLOCK>
    __device__ void fetch_half(int second) const {
        const int pieces = vectors + (shift != 0), from = second * half<BLOCK>() + threadIdx.x;
        const int to = second ? pieces : min(half<BLOCK>(), pieces);
        const int first = begin - shift, whole = min(to, (vocab - first) / WIDTH<T>);
        int v = from;
        if (v == 0 && first < 0) {  // the row begins inside a piece
            fetch_singly(0);
            v = BLOCK;
        }
#pragma unroll 4
        for (; v < whole; v += BLOCK)
            cp_async_16((u32)__cvta_generic_to_shared((uint4*)copy + v), (const uint4*)(x + first) + v);
#pragma unroll 1
        for (; v < to; v += BLOCK) fetch_singly(v);
        cp_async_commit();
    }
    __device__ void fetch_singly(int v) const {
#pragma unroll 1
        for (int e = 0; e < WIDTH<T>; ++e) {
            const int j = begin - shift + v * WIDTH<T> + e;
            copy[v * WIDTH<T> + e] = j >= 0 && j < vocab ? x[j] : (T)NEG_INF;
        }
    }
    template <int BLOCK>
    __device__ int half() const { return (vectors / 2 + BLOCK - 1) / BLOCK * BLOCK; }

    __device__ uint4 operator()(int v) const {
        if (shift == 0) return ((const uint4*)copy)[v];
        union { uint4 vector; T elements[WIDTH<T>]; } out;
#pragma unroll
        for (int e = 0; e < WIDTH<T>; ++e) out.elements[e] = copy[v * WIDTH<T> + shift + e];
        return out.vector;
    }
    __device__ float operator[](int j) const { return (float)copy[j - begin + shift]; }
};

// Hooks that ban and penalise nothing.
struct Plain {
    __device__ void prepare() const {}
    __device__ unsigned int hidden(int) const { return 0; }
    __device__ float adjusted(float logit, int) const { return logit; }
};

// Returns the slice's normaliser in the last warp, and calls write(place, key) for its k largest, with keys of
// (adjusted logit, mark + index), each in some thread; the key is 0 where there are fewer. The caller has started the copy
// of the first half.
template <int BLOCK, typename T, typename Hooks, typename Write>
__device__ Normaliser slice_topk(
    const Slice<T>& slice, const Hooks& hooks, int k, unsigned int mark, const Write& write) {
    constexpr int W = WIDTH<T>, ROOM = 2 * BLOCK;
    __shared__ Normaliser of_warp[BLOCK / 32];
    __shared__ Key list[ROOM];
    __shared__ int count;
    const Candidates<Key, ROOM> found{list, &count};
    const int me = threadIdx.x, half = slice.template half<BLOCK>();
    slice.template fetch_half<BLOCK>(1);
    hooks.prepare();
    if (me == 0) count = 0;
    if (slice.shift) {  // a vector lies in two pieces, which different threads copied
        cp_async_wait<0>();
        __syncthreads();
    }

    // While the copies arrive: the normaliser, and the vector with the greatest allowed logit.
    Normaliser mine{LOWEST, 0.f};            // relative to a value within 8 of its peak
    float most = NEG_INF, second = NEG_INF;  // maximum of the best vector, and of the others
    float peak = LOWEST;                     // maximum of all logits
    int best = me;
    unsigned int changed = 0;                // bit i: vector me + i * BLOCK has penalised logits
#pragma unroll 1
    for (int stage = 0; stage < 2; ++stage) {
        if (stage == 0) cp_async_wait<1>(); else cp_async_wait<0>();
#pragma unroll 1
        for (int v = stage * half + me; v < (stage ? slice.vectors : min(half, slice.vectors)); v += BLOCK) {
            const uint4 x = slice(v);
            const unsigned int hidden = hooks.hidden(slice.begin + v * W);
            float greatest = greatest_of<T>(x);
            if (greatest > mine.peak + 8.f) {
                mine.sum *= exp_fast(mine.peak - greatest);
                mine.peak = greatest;
            }
#pragma unroll
            for (int e = 0; e < W; e += 2)
                mine.sum += exp_fast(element(x, e, T{}) - mine.peak) + exp_fast(element(x, e + 1, T{}) - mine.peak);
            peak = fmaxf(peak, greatest);
            if (hidden) {
                greatest = greatest_but<T>(x, hidden);
                changed |= (hidden >> W ? 1u : 0u) << v / BLOCK;
            }
            const bool better = !(greatest <= most);
            second = max_nan(second, better ? most : greatest);
            if (better) {
                most = greatest;
                best = v;
            }
        }
    }
    mine = warp_join({peak, mine.sum * exp_fast(mine.peak - peak)});
    if (me % 32 == 0) of_warp[me / 32] = mine;

    const unsigned int bound = retrieve<BLOCK>(ordered(most), k);
    const float limit = from_ordered(bound);
    const auto key = [&](int j) { return make_key(hooks.adjusted(slice[j], j), mark + j); };
    Key least = (Key)bound << 32;
    unsigned int first = 0;  // the greatest index part of keys that equal the bound
#pragma unroll 1
    for (bool again = false;; again = true) {
        unsigned int visit = changed | (most < limit ? 0u : 1u) << best / BLOCK;  // a bit for each vector, like `changed`
        if (!(second < limit))
#pragma unroll 2
            for (int v = me; v < slice.vectors; v += BLOCK)
                visit |= (greatest_of<T>(slice(v)) < limit ? 0u : 1u) << v / BLOCK;
#pragma unroll 1
        for (; visit; visit &= visit - 1) {
            const int v = me + (__ffs(visit) - 1) * BLOCK;
            const uint4 x = slice(v);
            unsigned int reach = hooks.hidden(slice.begin + v * W) >> W;
#pragma unroll
            for (int e = 0; e < W; ++e) reach |= (element(x, e, T{}) < limit ? 0u : 1u) << e;
#pragma unroll 1
            for (; reach; reach &= reach - 1) {
                const int j = slice.begin + v * W + __ffs(reach) - 1;
                if (j >= slice.end) break;
                const Key candidate = key(j);
                if (candidate >> 32 == bound) first = max(first, (unsigned int)candidate);
                if (candidate >= least) found.add(candidate);
            }
        }
        __syncthreads();
        if (again || found.complete()) break;
        least |= retrieve<BLOCK>(first, k);  // too many equal the bound: take only the first of them
        if (me == 0) count = 0;
        __syncthreads();
    }
    if (found.complete()) {
        found.template re_rank<BLOCK>(k, write);
#pragma unroll 1
        for (int r = count + me; r < k; r += BLOCK) write(r, 0);
    } else {
        const auto at = [&](int j) { return key(slice.begin + j); };
        select_one_by_one<BLOCK>(at, slice.end - slice.begin, k, list, write);
    }
    return me < BLOCK - 32 ? Normaliser{} : warp_join(of_warp, BLOCK / 32);
}

// The upper 32 bits of a list's element, 0 for no element.
__device__ inline unsigned int leading(Key key) { return (unsigned int)(key >> 32); }

constexpr int DIRECT = 64;  // up to this many elements are ranked without a filter

// Calls write(place, element) for the k largest of at(0) .. at(n - 1). Among them are at least k elements other than T{}, all
// different. `list`: shared memory for ROOM >= BLOCK elements.
template <int BLOCK, int ROOM, typename T, typename At, typename Write>
__device__ void lists_topk(const At& at, int n, int k, T* list, const Write& write) {
    __shared__ int count;
    const Candidates<T, ROOM> found{list, &count};
    const int me = threadIdx.x;
    if (me == 0) count = 0;
    __syncthreads();
    const T mine = me < n ? at(me) : T{};
    unsigned int most = leading(mine);
#pragma unroll 1
    for (int j = me + BLOCK; j < n; j += BLOCK) most = max(most, leading(at(j)));
    const unsigned int bound = n > DIRECT ? max(retrieve<BLOCK>(most, k), 1) : 1;
    if (leading(mine) >= bound) found.add(mine);
#pragma unroll 1
    for (int j = me + BLOCK; j < n; j += BLOCK) {
        const T other = at(j);
        if (leading(other) >= bound) found.add(other);
    }
    __syncthreads();
    if (found.complete())
        found.template re_rank<BLOCK>(k, write);
    else
        select_one_by_one<BLOCK>(at, n, k, list, write);
}

// Returns in all threads whether this is the last of `blocks` blocks to call; the last one sees what the others wrote before.
// The ticket is 0 before the first call and again after the last.
__device__ inline bool last_of(unsigned int* ticket, unsigned int blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = increment_acq_rel(ticket, blocks - 1) == blocks - 1;
    }
    __syncthreads();
    return last;
}
