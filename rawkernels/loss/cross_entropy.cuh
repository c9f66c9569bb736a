#pragma once
// Softmax cross entropy of a row, which is read once, kept in shared memory and overwritten by its gradient.
// Threads, warps, blocks and the blocks of a cluster each reduce a part of the row; parts are joined in a fixed order.
#include "common/cluster.cuh"
#include "common/cp_async.cuh"
#include "common/index.cuh"
#include "common/math.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"

constexpr int WIDTH = 16 / (int)sizeof(scalar);  // elements of a vector of 16 bytes

// The target distribution: q for the label, u for each other class; and the weight z of lse^2.
struct LossTerms { float q, u, z; };

constexpr int COUNTERS = 32;

// Results over all rows.
struct Summary {
    float loss;
    float scale;  // the factor of the gradient
    int right;    // rows whose first maximum is at the label
    float counts[COUNTERS];  // their sum is the number of rows that count; 0 where losses are summed, not averaged
};

// The divisor of the losses. Each lane loads one counter; get() sums them over the warp.
struct Divisor {
    float count;
    __device__ Divisor(const Summary* summary) : count(summary->counts[threadIdx.x % 32]) {}
    __device__ float get() const { return fmaxf(warp_reduce(count, Sum{}), 1.f); }
};

// The labels of all rows (rows,): int64 where `wide`, else int32, `ignored` for a row that does not count.
// Where FOUND, their targets instead, int32, which "prepare" has found.
template <bool FOUND> struct Labels {
    const void* from;
    bool wide;
    long long ignored;
    long long* flag;  // of a label out of range
    // Without a branch, so that others load meanwhile.
    __device__ auto operator[](long long row) const {
        if constexpr (FOUND) {
            return ((const int*)from)[row];
        } else {
            const int* words = (const int*)from + (row << wide);
            const int low = __ldg(words), high = __ldg(words + wide);
            return wide ? (long long)high << 32 | (u32)low : (long long)low;
        }
    }
    // The target of what operator[] returned: 0 for a label out of range, -1 for a row that does not count.
    template <class Label> __device__ int target(Label label, int vocab) const {
        if constexpr (FOUND) return label;
        const bool counts = label != ignored, wrong = counts && out_of_range(label, vocab, flag);
        return !counts ? -1 : wrong ? 0 : (int)label;
    }
};

// ---- parts of a row

struct Part {
    float peak;   // maximum of x
    float sum;    // sum of exp(x - peak)
    float total;  // sum of x - peak
    float count;  // number of x
    int where;    // first column of the first vector that holds the peak
};
__device__ __forceinline__ Part empty_part() { return {NEG_INF, 0.f, 0.f, 0.f, 0x7fffffff}; }
// The number to subtract before the exponential: the peak, or 0 where all x are -inf.
__device__ __forceinline__ float base_of(float peak) { return peak == NEG_INF ? 0.f : peak; }
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * LOG2E); }

template <int N> __device__ __forceinline__ void accumulate(Part& part, const float (&x)[N], int where) {
    float top = x[0];
    for (int i = 1; i < N; ++i) top = fmaxf(top, x[i]);
    if (top > part.peak) {
        if (part.peak > NEG_INF) {
            const float shift = part.peak - top;
            part.sum *= exp_fast(shift);
            part.total += part.count * shift;
        }
        part.peak = top;
        part.where = where;
    }
    const float base = base_of(part.peak);
    float sum = 0.f, total = 0.f;
    for (int i = 0; i < N; ++i) {
        const float shifted = x[i] - base;
        total += shifted;
        sum += exp_fast(shifted);
    }
    part.sum += sum;
    part.total += total;
    part.count += N;
}

// Joins the parts of a warp; every lane gets the result.
__device__ __forceinline__ Part join(Part part) {
    const float peak = warp_reduce(part.peak, Max{}), shift = base_of(part.peak) - base_of(peak);
    part.sum = warp_reduce(part.peak == NEG_INF ? part.sum : part.sum * exp_fast(shift), Sum{});
    part.total = warp_reduce(part.total + part.count * shift, Sum{});
    part.count = warp_reduce(part.count, Sum{});
    part.where = warp_min(part.peak == peak ? part.where : 0x7fffffff);
    part.peak = peak;
    return part;
}

// The label's logit, and whether no earlier column of its vector has the same logit.
struct Chosen { float logit; int leads; };
struct Message { Part part; Chosen chosen; };

// Joins the parts of all blocks of the cluster; every thread gets the result. Call it once, after cluster_arrive_relaxed();
// `bar` expects a message from each block. Afterwards the row may be overwritten: `chosen` was read before it was sent.
template <int BLOCK, int CLUSTER> __device__ __forceinline__ Part join_all(Part part, Chosen chosen, int rank, u32 bar) {
    __shared__ Part of_warps[BLOCK / 32];
    __shared__ Message of_blocks[CLUSTER];
    const int lane = threadIdx.x % 32;
    part = join(part);
    if (lane == 0) of_warps[threadIdx.x / 32] = part;
    __syncthreads();
    part = join(lane < BLOCK / 32 ? of_warps[lane] : empty_part());
    if constexpr (CLUSTER > 1) {
        cluster_wait();  // all blocks have started
        if (threadIdx.x < CLUSTER) send(of_blocks[rank], {part, chosen}, bar, threadIdx.x);
        mbar_wait(bar, 0);
        part = join(lane < CLUSTER ? of_blocks[lane].part : empty_part());
    }
    return part;
}

// ---- vectors

template <typename T = scalar> __device__ __forceinline__ void unpack(const uint4& bits, float (&x)[WIDTH]) {
    const u32 word[4] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            x[i] = __uint_as_float(word[i]);
        } else {
            const float2 pair = unpack_pair(T{}, word[i]);
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
    }
}
template <typename T = scalar> __device__ __forceinline__ uint4 pack(const float (&x)[WIDTH]) {
    u32 word[4];
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) word[i] = __float_as_uint(x[i]);
        else word[i] = pack_pair(T{}, x[2 * i], x[2 * i + 1]);
    }
    return {word[0], word[1], word[2], word[3]};
}
// Global memory, past L1: data that is read again is in shared memory.
__device__ __forceinline__ uint4 load_vector(const scalar* from) { return __ldcg((const uint4*)from); }
__device__ __forceinline__ void store_vector(scalar* to, const uint4& bits) { *(uint4*)to = bits; }

// Calls use(v, vector v of `row`) for v = begin, begin + BLOCK ... below end. Several are loaded before the first is used.
template <int BLOCK, typename Use>
__device__ __forceinline__ void load_at_once(const scalar* row, int begin, int end, const Use& use) {
    constexpr int COUNT = 4;
#pragma unroll 1
    for (int v = begin; v < end; v += COUNT * BLOCK) {
        uint4 bits[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) bits[i] = load_vector(row + WIDTH * min(v + i * BLOCK, end - 1));
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (v + i * BLOCK < end) use(v + i * BLOCK, bits[i]);
    }
}

// A row in memory: `head` columns up to the first multiple of 16 bytes, vectors, and up to WIDTH - 1 columns after them.
struct Layout {
    int head, vectors, edges;  // edges: the columns outside vectors

    __device__ Layout(const scalar* row, int vocab) {
        head = min(vocab, (int)(-(u64)row % 16 / sizeof(scalar)));
        vectors = (vocab - head) / WIDTH;
        edges = vocab - vectors * WIDTH;
    }
    __device__ int edge(int i) const { return i < head ? i : vectors * WIDTH + i; }
    __device__ int vector(int v) const { return head + v * WIDTH; }
    // The first column of the vector that holds `column`, or `column` itself where no vector does.
    __device__ int start(int column) const {
        const int v = (column - head) / WIDTH;
        return column < head || v >= vectors ? column : vector(v);
    }
};

// ---- the gradient

struct Gradient {
    float base, scale;    // gradient = scale * exp(x - base) - other, and at the label also - extra
    float other, extra;
    int label;

    __device__ Gradient(float peak, float sum, float weight, LossTerms terms, int label) : label(label) {
        base = base_of(peak);
        scale = weight * (1.f + 2.f * terms.z * (base + logf(sum))) / sum;
        other = weight * terms.u, extra = weight * (terms.q - terms.u);
    }
    template <int N> __device__ __forceinline__ void apply(float (&x)[N], int column) const {
        for (int i = 0; i < N; ++i) x[i] = exp_fast(x[i] - base);
        finish(x, column);
    }
    // The same from exponentials that are known.
    template <int N> __device__ __forceinline__ void finish(float (&x)[N], int column) const {
        for (int i = 0; i < N; ++i) x[i] = scale * x[i] - other;
        if (0 <= label - column && label - column < N)
            for (int i = 0; i < N; ++i) x[i] -= i == label - column ? extra : 0.f;
    }
};
__device__ __forceinline__ uint4 gradient_of(const uint4& bits, int column, const Gradient& gradient) {
    float x[WIDTH];
    unpack(bits, x);
    gradient.apply(x, column);
    return pack(x);
}
__device__ __forceinline__ scalar gradient_of(scalar logit, int column, const Gradient& gradient) {
    float x[1] = {(float)logit};
    gradient.apply(x, column);
    return (scalar)x[0];
}

// ---- a row on a cluster of blocks

// The loss of row blockIdx.x / CLUSTER and, with_gradient, its gradient in place. There is shared memory for `room` vectors.
template <int BLOCK, int CLUSTER> __device__ __forceinline__ void cross_entropy_row(
    scalar* logits, Labels<CHECKED> labels, float* losses, float* statistics, Summary* summary, long long stride,
    int vocab, int cols, int room, LossTerms terms, bool with_gradient) {
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, thread = threadIdx.x;
    const long long number = blockIdx.x / CLUSTER;
    scalar* row = logits + number * stride;
    const Layout layout(row, vocab);
    const int share = (layout.vectors + CLUSTER - 1) / CLUSTER, first = rank * share;
    const int mine = max(0, min(share, layout.vectors - first)), kept = min(mine, room);

    const Divisor divisor(summary);
    const float scale = summary->scale;
    const int target = labels.target(labels[number], vocab);
    if (with_gradient)
        for (int j = vocab + rank * BLOCK + thread; j < cols; j += CLUSTER * BLOCK) row[j] = (scalar)0.f;
    if (target < 0) {
        if (rank == 0 && thread == 0) losses[number] = 0.f;
        if (!with_gradient) return;
        for (int v = thread; v < mine; v += BLOCK) store_vector(row + layout.vector(first + v), {0, 0, 0, 0});
        if (rank == 0 && thread < layout.edges) row[layout.edge(thread)] = (scalar)0.f;
        return;
    }

    // A thread reads only what it copied itself. The copies are four groups, so that the first is read while others arrive.
    const u32 copy = shared_tiles();
    const int quarter = (kept + 4 * BLOCK - 1) / (4 * BLOCK) * BLOCK;
    for (int end = quarter, v = thread, i = 0; i < 4 && !BY_REGISTERS; ++i, end += quarter) {
        for (; v < min(end, kept); v += BLOCK) cp_async(copy + 16 * v, row + layout.vector(first + v));
        cp_async_commit();
    }
    u32 bar = 0;
    if constexpr (CLUSTER > 1) {
        __shared__ u64 barrier;
        bar = (u32)__cvta_generic_to_shared(&barrier);
        if (thread == 0) mbar_init(bar, 1), mbar_expect(bar, CLUSTER * sizeof(Message)), mbar_init_done();
        cluster_arrive_relaxed();
    }
    Chosen chosen{0.f, true};
    if (rank == 0 && thread < 32) {
        chosen.logit = row[target];
        for (int j = layout.start(target); j < target; ++j) chosen.leads &= (float)row[j] != chosen.logit;
    }

    Part part = empty_part();
    float x[WIDTH];
    const auto read_until = [&](int end, int& v) {
        for (; v < min(end, kept); v += BLOCK) {
            unpack(load_shared_uint4(copy + 16 * v), x);
            accumulate(part, x, layout.vector(first + v));
        }
    };
    if constexpr (BY_REGISTERS) {
        load_at_once<BLOCK>(row + layout.vector(first), thread, mine, [&](int v, const uint4& bits) {
            if (v < kept)
                store_shared(copy + 16 * v, __uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                             __uint_as_float(bits.w));
            unpack(bits, x);
            accumulate(part, x, layout.vector(first + v));
        });
    } else {
        int v = thread;
        cp_async_wait<3>(), read_until(quarter, v);
        cp_async_wait<2>(), read_until(2 * quarter, v);
        cp_async_wait<1>(), read_until(3 * quarter, v);
        cp_async_wait<0>(), read_until(4 * quarter, v);
        for (; v < mine; v += BLOCK) {
            unpack(load_vector(row + layout.vector(first + v)), x);
            accumulate(part, x, layout.vector(first + v));
        }
    }
    const bool has_edge = rank == 0 && thread < layout.edges;
    if (has_edge) {
        const float edge[1] = {(float)row[layout.edge(thread)]};
        accumulate(part, edge, layout.edge(thread));
        if (edge[0] == part.peak) part.where = min(part.where, layout.edge(thread));  // it may precede the vectors
    }
    part = join_all<BLOCK, CLUSTER>(part, chosen, rank, bar);

    if (rank == 0 && thread == 0) {
        const float base = base_of(part.peak), log_sum = logf(part.sum), lse = base + log_sum;
        float loss = log_sum - (terms.q - terms.u) * (chosen.logit - base) + terms.z * lse * lse;
        if (terms.u > 0.f) loss -= terms.u * part.total;  // avoids 0 * -inf = NaN
        losses[number] = loss;
        if (statistics) statistics[2 * number] = part.peak, statistics[2 * number + 1] = part.sum;
        const bool first = chosen.logit == part.peak && part.where == layout.start(target);
        if (chosen.leads && first && loss == loss) atomicAdd(&summary->right, 1);
    }
    if (!with_gradient) return;
    const float weight = scale / divisor.get();
    const Gradient gradient(part.peak, part.sum, weight, terms, target);
    const auto write = [&](int v, const uint4& bits) {
        const int column = layout.vector(first + v);
        store_vector(row + column, gradient_of(bits, column, gradient));
    };
    if constexpr (BY_REGISTERS) {
        int v = thread;
        for (; v < kept; v += BLOCK) write(v, load_shared_uint4(copy + 16 * v));
        load_at_once<BLOCK>(row + layout.vector(first), v, mine, write);
    } else for (int v = thread; v < mine; v += BLOCK) {
        const int column = layout.vector(first + v);
        const uint4 bits = v < kept ? load_shared_uint4(copy + 16 * v) : load_vector(row + column);
        store_vector(row + column, gradient_of(bits, column, gradient));
    }
    if (has_edge) {
        const int column = layout.edge(thread);
        row[column] = gradient_of(row[column], column, gradient);
    }
}
