#pragma once
// A slice of a row of logits, read once, 16 bytes at a time: its part of the log-softmax's normaliser and
// its k best. Log-softmax keeps the order of a row, so the best are chosen by logit.
#include "sampling/topk.cuh"

constexpr float LOWEST = -3.4028235e38f;

__device__ inline float exp_fast(float x) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x * 1.4426950408889634f));
    return x;
}

// Log-probability = x - peak - log(sum), once all slices of the row are joined.
struct Normaliser { float peak, sum; };

// Every lane gets the whole of the lanes' parts.
__device__ inline Normaliser warp_join(Normaliser mine) {
    const float peak = warp_reduce(mine.peak, Max{});
    return {peak, warp_reduce(mine.sum * exp_fast(mine.peak - peak), Sum{})};
}
// The same of the parts in a list.
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

// ---- copies of 16 bytes to shared memory, in groups
__device__ inline void copy_async(uint4* to, const uint4* from) {
    const unsigned int address = (unsigned int)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but so many groups of this thread are there.
template <int PENDING>
__device__ void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

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
// The greater, NaN if one is.
__device__ inline float nan_max(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ inline unsigned int nan_max(unsigned int a, unsigned int b, bf16) {
    unsigned int c;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ inline unsigned int nan_max(unsigned int a, unsigned int b, f16) {
    unsigned int c;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
template <typename T>
__device__ float greatest_of(uint4 v) {
    if constexpr (WIDTH<T> == 8) {
        v.x = nan_max(nan_max(v.x, v.y, T{}), nan_max(v.z, v.w, T{}), T{});
        return nan_max(element(v, 0, T{}), element(v, 1, T{}));
    } else {
        return nan_max(nan_max(element(v, 0, T{}), element(v, 1, T{})),
                       nan_max(element(v, 2, T{}), element(v, 3, T{})));
    }
}
template <typename T>
__device__ float greatest_but(uint4 v, unsigned int hidden) {  // bit e: element e does not count
    float greatest = NEG_INF;
#pragma unroll
    for (int e = 0; e < WIDTH<T>; ++e)
        if (!(hidden >> e & 1)) greatest = nan_max(greatest, element(v, e, T{}));
    return greatest;
}

// ---- slices
// Elements begin .. end - 1 of a row, copied to shared memory. Vector v holds WIDTH elements from begin +
// WIDTH * v on, -inf behind the end, whatever the row's alignment: it changes no bit of the results.
template <typename T>
struct Slice {
    const T* x;  // the row
    T* copy;     // shared, room for WIDTH * (size + 1) elements
    int vocab, begin, end, vectors;
    int shift;   // of the copy, where the slice does not begin at a multiple of 16 bytes

    // Slice number `part` of those of up to `size` vectors, at most 32 for each thread.
    __device__ Slice(const T* row, int vocab, int part, int size, uint4* shared)
        : x(row), copy((T*)shared), vocab(vocab) {
        begin = min(part * size * WIDTH<T>, vocab);
        end = min(begin + size * WIDTH<T>, vocab);
        vectors = (end - begin + WIDTH<T> - 1) / WIDTH<T>;
        shift = (size_t)(x + begin) % 16 / sizeof(T);
    }
    // Begin to copy the first or the second half, this thread's share: pieces of 16 bytes at multiples of 16.
    template <int BLOCK>
    __device__ void fetch_half(int second) const {
        const int pieces = vectors + (shift != 0), from = second * half<BLOCK>() + threadIdx.x;
        const int to = second ? pieces : min(half<BLOCK>(), pieces);
        const int first = begin - shift, whole = min(to, (vocab - first) / WIDTH<T>);
        int v = from;
        if (v == 0 && first < 0) {  // the row begins within a piece, as it may end
            fetch_singly(0);
            v = BLOCK;
        }
#pragma unroll 4
        for (; v < whole; v += BLOCK) copy_async((uint4*)copy + v, (const uint4*)(x + first) + v);
#pragma unroll 1
        for (; v < to; v += BLOCK) fetch_singly(v);
        copy_commit();
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

// Nothing is banned, nothing penalised.
struct Plain {
    __device__ void prepare() const {}
    __device__ unsigned int hidden(int) const { return 0; }
    __device__ float adjusted(float logit, int) const { return logit; }
};

// Returns the slice's normaliser to the last warp and calls write(place, key) for its k best, keys of
// (adjusted logit, mark + index), each by some thread; 0 where there are fewer. Its first half is fetched.
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
    if (slice.shift) {  // a thread's vectors lie in two pieces
        copy_wait<0>();
        __syncthreads();
    }

    // As the numbers come in: the normaliser, and the vector with the greatest of what may come.
    Normaliser mine{LOWEST, 0.f};            // by something near its peak
    float most = NEG_INF, second = NEG_INF;  // of the best vector and of the others
    float peak = LOWEST;                     // of all there is
    int best = me;
    unsigned int changed = 0;                // bit i: some logits of vector me + i * BLOCK are penalised
#pragma unroll 1
    for (int stage = 0; stage < 2; ++stage) {
        if (stage == 0) copy_wait<1>(); else copy_wait<0>();
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
            second = nan_max(second, better ? most : greatest);
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
    unsigned int first = 0;  // of those that equal the bound
#pragma unroll 1
    for (bool again = false;; again = true) {
        unsigned int visit = changed | (most < limit ? 0u : 1u) << best / BLOCK;  // vectors, like `changed`
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
        least |= retrieve<BLOCK>(first, k);  // too many equal the bound: the first of them will do
        if (me == 0) count = 0;
        __syncthreads();
    }
    if (found.complete()) {
        found.template re_rank<BLOCK>(k, write);
#pragma unroll 1
        for (int r = count + me; r < k; r += BLOCK) write(r, 0);
    } else {
        const auto at = [&](int j) { return key(slice.begin + j); };
        fetch_one_by_one<BLOCK>(at, slice.end - slice.begin, k, list, write);
    }
    return me < BLOCK - 32 ? Normaliser{} : warp_join(of_warp, BLOCK / 32);
}

// The first 32 bits of what lists hold, 0 for nothing.
__device__ inline unsigned int leading(Key key) { return (unsigned int)(key >> 32); }

constexpr int DIRECT = 64;  // up to so many elements are ranked as they are

// Calls write(place, element) for the k best of at(0) .. at(n - 1), which differ but for nothings; n holds
// at least k others. `list`: shared room for ROOM >= BLOCK elements.
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
        fetch_one_by_one<BLOCK>(at, n, k, list, write);
}

// Returns to all threads whether theirs is the last of `blocks` blocks to come here, which then sees what
// the others wrote before. The ticket is 0 at first, and again after the last.
__device__ inline bool last_of(unsigned int* ticket, unsigned int blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int before;
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(ticket), "r"(blocks - 1) : "memory");
        last = before == blocks - 1;
    }
    __syncthreads();
    return last;
}
