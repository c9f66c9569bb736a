#pragma once
// A slice of a row of logits, read once, 16 bytes at a time: its part of the log-softmax's normaliser and its k largest.
// Log-softmax preserves the order within a row, so elements are selected by logit.
#include "common/cp_async.cuh"
#include "sampling/logits.cuh"
#include "sampling/topk.cuh"

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
        if (BY_REGISTERS && !second) return;
        const int pieces = vectors + (shift != 0), from = second * half<BLOCK>() + threadIdx.x;
        const int to = second ? pieces : min(half<BLOCK>(), pieces);
        const int first = begin - shift, whole = min(to, (vocab - first) / WIDTH<T>);
        int v = from;
        if (v == 0 && first < 0) {  // the row begins inside a piece
            fetch_singly(0);
            v = BLOCK;
        }
#if __CUDA_ARCH__ >= 800
#pragma unroll 4
        for (; v < whole; v += BLOCK)
            cp_async_16((u32)__cvta_generic_to_shared((uint4*)copy + v), (const uint4*)(x + first) + v);
#else
        constexpr int AT_ONCE = 8;  // loads of a thread before it stores the first
#pragma unroll 1
        for (; v < whole; v += AT_ONCE * BLOCK) {
            const uint4* source = (const uint4*)(x + first) + v;
            uint4 pieces[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) load_16_bytes_if(v + i * BLOCK < whole, pieces[i], source + i * BLOCK);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (v + i * BLOCK < whole) ((uint4*)copy)[v + i * BLOCK] = pieces[i];
        }
        v = from + max(whole - from + BLOCK - 1, 0) / BLOCK * BLOCK;
#endif
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
    // Vectors of the first half. Before sm_80, where a copy waits for its loads, there is none: all are loaded at once.
    template <int BLOCK>
    __device__ int half() const { return BY_REGISTERS ? 0 : (vectors / 2 + BLOCK - 1) / BLOCK * BLOCK; }

    __device__ uint4 operator()(int v) const {
        if (shift == 0) return ((const uint4*)copy)[v];
        union { uint4 vector; T elements[WIDTH<T>]; } out;
#pragma unroll
        for (int e = 0; e < WIDTH<T>; ++e) out.elements[e] = copy[v * WIDTH<T> + shift + e];
        return out.vector;
    }
    __device__ float operator[](int j) const { return (float)copy[j - begin + shift]; }
};

// Returns the slice's normaliser in the last warp, and calls write(place, key) for its k largest, with keys of (logit, index),
// each in some thread; the key is 0 where there are fewer. The caller has started the copy of the first half.
template <int BLOCK, typename T, typename Write>
__device__ Normaliser slice_topk(const Slice<T>& slice, int k, const Write& write) {
    constexpr int W = WIDTH<T>, ROOM = 2 * BLOCK;
    __shared__ Normaliser of_warp[BLOCK / 32];
    __shared__ Key list[ROOM];
    __shared__ int count;
    const Candidates<Key, ROOM> found{list, &count};
    const int me = threadIdx.x, half = slice.template half<BLOCK>();
    slice.template fetch_half<BLOCK>(1);
    if (me == 0) count = 0;
    if (slice.shift) {  // a vector lies in two pieces, which different threads copied
        cp_async_wait<0>();
        __syncthreads();
    }

    // While the copies arrive: the normaliser, and the vector with the greatest logit.
    Normaliser mine{LOWEST, 0.f};            // relative to a value within 8 of its peak
    float most = NEG_INF, second = NEG_INF;  // maximum of the best vector, and of the others
    float peak = LOWEST;                     // maximum of all logits
    int best = me;
#pragma unroll 1
    for (int stage = 0; stage < 2; ++stage) {
        if (stage == 0) cp_async_wait<1>(); else cp_async_wait<0>();
#pragma unroll 1
        for (int v = stage * half + me; v < (stage ? slice.vectors : min(half, slice.vectors)); v += BLOCK) {
            const uint4 x = slice(v);
            const float greatest = greatest_of<T>(x);
            if (greatest > mine.peak + 8.f) {
                mine.sum *= exp_fast(mine.peak - greatest);
                mine.peak = greatest;
            }
#pragma unroll
            for (int e = 0; e < W; e += 2)
                mine.sum += exp_fast(element(x, e, T{}) - mine.peak) + exp_fast(element(x, e + 1, T{}) - mine.peak);
            peak = fmaxf(peak, greatest);
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
    const auto key = [&](int j) { return make_key(slice[j], j); };
    Key least = (Key)bound << 32;
    unsigned int first = 0;  // the greatest index part of keys that equal the bound
#pragma unroll 1
    for (bool again = false;; again = true) {
        unsigned int visit = (most < limit ? 0u : 1u) << best / BLOCK;  // bit i: vector me + i * BLOCK
        if (!(second < limit))
#pragma unroll 2
            for (int v = me; v < slice.vectors; v += BLOCK)
                visit |= (greatest_of<T>(slice(v)) < limit ? 0u : 1u) << v / BLOCK;
#pragma unroll 1
        for (; visit; visit &= visit - 1) {
            const int v = me + (__ffs(visit) - 1) * BLOCK;
            const uint4 x = slice(v);
            unsigned int reach = 0;
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
