#pragma once
// Softmax cross entropy of a row: read once, kept in shared memory, and overwritten by its gradient.
// Threads, warps, blocks and the blocks of a cluster each know a part of the row; parts are joined in a fixed order.
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"

constexpr int WIDTH = 16 / (int)sizeof(scalar);  // of a vector, 16 bytes
constexpr float LOG2_E = 1.4426950408889634f;

// What the distribution over classes should be: q for the label, u for each other class; and the weight of lse^2.
struct Goal { float q, u, z; };

constexpr int COUNTERS = 32;

// Of all rows.
struct Summary {
    float loss;
    float scale;  // what the gradient is multiplied by
    int right;
    float counts[COUNTERS];  // together the rows that count; 0 where losses are only summed
};

// What a row's loss is divided by. A lane loads its counter, and when that is here, all lanes of the warp ask for the sum.
struct Divisor {
    float count;
    __device__ Divisor(const Summary* summary) : count(summary->counts[threadIdx.x % 32]) {}
    __device__ float get() const { return fmaxf(warp_reduce(count, Sum{}), 1.f); }
};

// ---- parts of a row

struct Part {
    float peak;   // the largest
    float sum;    // of exp(x - peak)
    float total;  // of x - peak
    float count;
    int where;    // the first column of the first vector with the peak
};
__device__ __forceinline__ Part nothing() { return {NEG_INF, 0.f, 0.f, 0.f, 0x7fffffff}; }
// What exponents are taken against; 0 as long as all are -inf.
__device__ __forceinline__ float base_of(float peak) { return peak == NEG_INF ? 0.f : peak; }
__device__ __forceinline__ float power(float x) { return exp2_fast(x * LOG2_E); }

template <int N> __device__ __forceinline__ void absorb(Part& part, const float (&x)[N], int where) {
    float top = x[0];
    for (int i = 1; i < N; ++i) top = fmaxf(top, x[i]);
    if (top > part.peak) {
        if (part.peak > NEG_INF) {
            const float shift = part.peak - top;
            part.sum *= power(shift);
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
        sum += power(shifted);
    }
    part.sum += sum;
    part.total += total;
    part.count += N;
}

// Every lane gets what all lanes of the warp know.
__device__ __forceinline__ Part join(Part part) {
    const float peak = warp_reduce(part.peak, Max{}), shift = base_of(part.peak) - base_of(peak);
    part.sum = warp_reduce(part.peak == NEG_INF ? part.sum : part.sum * power(shift), Sum{});
    part.total = warp_reduce(part.total + part.count * shift, Sum{});
    part.count = warp_reduce(part.count, Sum{});
    part.where = __reduce_min_sync(~0u, part.peak == peak ? part.where : 0x7fffffff);
    part.peak = peak;
    return part;
}

// The label's logit, and whether no column before it in its vector has as much.
struct Chosen { float logit; int leads; };
struct Message { Part part; Chosen chosen; };

// Every thread gets what all blocks of the cluster know. Between cluster_arrive_relaxed() and the exit, once; `bar` expects
// a message of each block. Whoever has all of them may overwrite the row: `chosen`, read from it, was sent along.
template <int BLOCK, int CLUSTER> __device__ __forceinline__ Part join_all(Part part, Chosen chosen, int rank, u32 bar) {
    __shared__ Part of_warps[BLOCK / 32];
    __shared__ Message of_blocks[CLUSTER];
    const int lane = threadIdx.x % 32;
    part = join(part);
    if (lane == 0) of_warps[threadIdx.x / 32] = part;
    __syncthreads();
    part = join(lane < BLOCK / 32 ? of_warps[lane] : nothing());
    if constexpr (CLUSTER > 1) {
        cluster_wait();  // all blocks run
        if (threadIdx.x < CLUSTER) send(of_blocks[rank], {part, chosen}, bar, threadIdx.x);
        mbar_wait(bar, 0);
        part = join(lane < CLUSTER ? of_blocks[lane].part : nothing());
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
// Global memory, past L1 (what is read again is in shared memory).
__device__ __forceinline__ uint4 load_vector(const scalar* from) { return __ldcg((const uint4*)from); }
__device__ __forceinline__ void store_vector(scalar* to, const uint4& bits) { *(uint4*)to = bits; }

// How a row lies in memory: `head` columns up to the first multiple of 16 bytes, vectors, and up to WIDTH - 1 more.
struct Layout {
    int head, vectors, edges;  // edges: the columns outside vectors

    __device__ Layout(const scalar* row, int vocab) {
        head = min(vocab, (int)(-(u64)row % 16 / sizeof(scalar)));
        vectors = (vocab - head) / WIDTH;
        edges = vocab - vectors * WIDTH;
    }
    __device__ int edge(int i) const { return i < head ? i : vectors * WIDTH + i; }
    __device__ int vector(int v) const { return head + v * WIDTH; }
    // The first column of the vector that holds a column, or that column where none does.
    __device__ int start(int column) const {
        const int v = (column - head) / WIDTH;
        return column < head || v >= vectors ? column : vector(v);
    }
};

// ---- the gradient

struct Slope {
    float base, scale;    // scale * exp(x - base), less
    float other, extra;   // what each class, and the label more, is away from it
    int label;

    __device__ Slope(float peak, float sum, float weight, Goal goal, int label) : label(label) {
        base = base_of(peak);
        scale = weight * (1.f + 2.f * goal.z * (base + logf(sum))) / sum;
        other = weight * goal.u, extra = weight * (goal.q - goal.u);
    }
    template <int N> __device__ __forceinline__ void apply(float (&x)[N], int column) const {
        for (int i = 0; i < N; ++i) x[i] = power(x[i] - base);
        finish(x, column);
    }
    // Of powers that are known.
    template <int N> __device__ __forceinline__ void finish(float (&x)[N], int column) const {
        for (int i = 0; i < N; ++i) x[i] = scale * x[i] - other;
        if (0 <= label - column && label - column < N)
            for (int i = 0; i < N; ++i) x[i] -= i == label - column ? extra : 0.f;
    }
};
__device__ __forceinline__ uint4 gradient_of(const uint4& bits, int column, const Slope& slope) {
    float x[WIDTH];
    unpack(bits, x);
    slope.apply(x, column);
    return pack(x);
}
__device__ __forceinline__ scalar gradient_of(scalar logit, int column, const Slope& slope) {
    float x[1] = {(float)logit};
    slope.apply(x, column);
    return (scalar)x[0];
}

// ---- a row on a cluster of blocks

// Loss of row blockIdx.x / CLUSTER and, where asked for, its gradient in place; `room` vectors of shared memory.
template <int BLOCK, int CLUSTER> __device__ __forceinline__ void cross_entropy_row(
    scalar* logits, const int* targets, float* losses, float* statistics, Summary* summary, long long stride, int vocab,
    int cols, int room, Goal goal, bool with_gradient) {
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, thread = threadIdx.x;
    const long long number = blockIdx.x / CLUSTER;
    scalar* row = logits + number * stride;
    const Layout layout(row, vocab);
    const int share = (layout.vectors + CLUSTER - 1) / CLUSTER, first = rank * share;
    const int mine = max(0, min(share, layout.vectors - first)), kept = min(mine, room);

    const Divisor divisor(summary);
    const float scale = summary->scale;
    const int target = targets[number];
    if (with_gradient)
        for (int j = vocab + rank * BLOCK + thread; j < cols; j += CLUSTER * BLOCK) row[j] = (scalar)0.f;
    if (target < 0) {
        if (rank == 0 && thread == 0) losses[number] = 0.f;
        if (!with_gradient) return;
        for (int v = thread; v < mine; v += BLOCK) store_vector(row + layout.vector(first + v), {0, 0, 0, 0});
        if (rank == 0 && thread < layout.edges) row[layout.edge(thread)] = (scalar)0.f;
        return;
    }

    // a thread reads no shared memory but its own; what has come is read while the rest comes
    const u32 copy = shared_tiles();
    const int quarter = (kept + 4 * BLOCK - 1) / (4 * BLOCK) * BLOCK;
    for (int end = quarter, v = thread, i = 0; i < 4; ++i, end += quarter) {
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

    Part part = nothing();
    float x[WIDTH];
    const auto read_until = [&](int end, int& v) {
        for (; v < min(end, kept); v += BLOCK) {
            unpack(load_shared_16(copy + 16 * v), x);
            absorb(part, x, layout.vector(first + v));
        }
    };
    int v = thread;
    cp_async_wait<3>(), read_until(quarter, v);
    cp_async_wait<2>(), read_until(2 * quarter, v);
    cp_async_wait<1>(), read_until(3 * quarter, v);
    cp_async_wait<0>(), read_until(4 * quarter, v);
    for (; v < mine; v += BLOCK) {
        unpack(load_vector(row + layout.vector(first + v)), x);
        absorb(part, x, layout.vector(first + v));
    }
    const bool has_edge = rank == 0 && thread < layout.edges;
    if (has_edge) {
        const float edge[1] = {(float)row[layout.edge(thread)]};
        absorb(part, edge, layout.edge(thread));
        if (edge[0] == part.peak) part.where = min(part.where, layout.edge(thread));  // it may lie before the vectors
    }
    part = join_all<BLOCK, CLUSTER>(part, chosen, rank, bar);

    if (rank == 0 && thread == 0) {
        const float base = base_of(part.peak), log_sum = logf(part.sum), lse = base + log_sum;
        float loss = log_sum - (goal.q - goal.u) * (chosen.logit - base) + goal.z * lse * lse;
        if (goal.u > 0.f) loss -= goal.u * part.total;  // 0 * -inf is not a number
        losses[number] = loss;
        if (statistics) statistics[2 * number] = part.peak, statistics[2 * number + 1] = part.sum;
        const bool first = chosen.logit == part.peak && part.where == layout.start(target);
        if (chosen.leads && first && loss == loss) atomicAdd(&summary->right, 1);
    }
    if (!with_gradient) return;
    const float weight = scale / divisor.get();
    const Slope slope(part.peak, part.sum, weight, goal, target);
    for (int v = thread; v < mine; v += BLOCK) {
        const int column = layout.vector(first + v);
        const uint4 bits = v < kept ? load_shared_16(copy + 16 * v) : load_vector(row + column);
        store_vector(row + column, gradient_of(bits, column, slope));
    }
    if (has_edge) {
        const int column = layout.edge(thread);
        row[column] = gradient_of(row[column], column, slope);
    }
}
