#pragma once
// Softmax of rows and its gradient. The including file has the constants
//    MASK     0, 1, 2: none, keep where true, add
//    DROPOUT  whether there is dropout
//    EDGES    whether vectors of 16 bytes may be partly outside of a row, or masked; else vectors fill rows exactly
//    LANES    threads of a block that share a row, a power of 2; a block has at least 128 threads
//    VECTORS  vectors that each of them holds at a time
//    LONG     whether a row may take several times as many
//    BLOCKS   blocks that share a row, a cluster if more than one
//    STAGED   whether a block's share of a LONG row is loaded to shared memory by TMA and so read once; else it is read twice
#include "common/cluster.cuh"
#include "common/math.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/tma.cuh"

static_assert((LANES & (LANES - 1)) == 0, "softmax: LANES is a power of 2");
static_assert(BLOCKS == 1 || LANES >= 128, "softmax: the blocks of a cluster share one row");
static_assert(LONG || !STAGED, "softmax: only long rows are STAGED");
static_assert(0 <= MASK && MASK <= 2, "softmax: MASK is 0 (none), 1 (keep) or 2 (add)");

constexpr int BLOCK = LANES > 128 ? LANES : 128;
constexpr int ROWS = BLOCK / LANES;             // rows of a block
constexpr int WIDTH = 16 / sizeof(scalar);      // elements of a vector
constexpr int GROUP = LANES < 32 ? LANES : 32;  // threads of a warp that share a row
constexpr int GROUPS = LANES / GROUP;           // groups of a block that share a row
constexpr int PARTS = BLOCKS * GROUPS;          // parts of a row, one per group
constexpr int STEP = LANES * WIDTH;             // columns from a thread's vector to its next
constexpr float LOWEST = -3.402823466e38f;      // initial maximum; avoids -inf - (-inf) = NaN in rows that are fully masked

struct Softmax {  // by value; SOFTMAX of gpuattn/ops/softmax.py
    const scalar* x;                  // (rows, cols): the logits; backward: the result before dropout
    const scalar* dy;                 // (rows, cols), backward
    scalar* out;                      // (rows, cols): the result, may be x; backward: dx
    scalar* undropped;                // (rows, cols): the result before dropout, may be x; or null
    const void* mask;                 // bool or scalar, broadcast by strides to (i0, mask_sizes, cols); or null
    const int* lengths;               // (rows / length_rows,): columns from there on are masked; or null
    const unsigned int* device_step;  // of dropout, or null
    long long rows, x_stride, dy_stride, out_stride, undropped_stride;  // elements from row to row
    long long length_rows, mask_sizes[2], mask_strides[4];              // elements
    long long ahead;                  // forward: prefetch the row this many rows later to L2; 0: do not
    int cols;
    int vectors;                      // vectors that cover a row of `out` at any alignment
    int queries;                      // causal: the rows of a matrix; 0: not causal
    float scale;
    float factor;                     // 1 / (1 - p)
    unsigned int threshold;           // dropout keeps 16-bit numbers below it
    unsigned int seed_low, seed_high, stream, step;
};

template <typename T> struct alignas(WIDTH * sizeof(T)) Pack { T at[WIDTH]; };
using Vector = Pack<scalar>;

__device__ float exponential(float x) { return exp2_fast(x * LOG2E); }

// Reduces over LENGTH adjacent threads, which all get the result.
template <int LENGTH, typename Op>
__device__ float reduce(float value, Op op) {
#pragma unroll
    for (int lane = LENGTH / 2; lane > 0; lane >>= 1) value = op(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

// ---- the share of a thread ----------------------------------------------------------------------------------------------

// The columns of this block, up to `end`, and the first one of this thread. Vectors are aligned to 16 bytes in the output:
// with EDGES the first vector may begin before the row.
struct Share {
    long long row;  // past the end, the last row again
    int size, block_begin, begin, end, steps;  // of VECTORS vectors, STEP apart
    bool there;

    __device__ Share(const Softmax& a) {
        row = (long long)(blockIdx.x / BLOCKS) * ROWS + threadIdx.x / LANES;
        there = row < a.rows;
        if (ROWS > 1) row = min(row, a.rows - 1);
        size = (a.vectors + BLOCKS - 1) / BLOCKS * WIDTH;
        const int before = EDGES ? (size_t)(a.out + row * a.out_stride) % 16 / sizeof(scalar) : 0;
        block_begin = blockIdx.x % BLOCKS * size - before;
        begin = block_begin + threadIdx.x % LANES * WIDTH;
        end = min(block_begin + size, a.cols);
        steps = LONG ? (size + STEP * VECTORS - 1) / (STEP * VECTORS) : 1;
    }
};

// Whether all of j .. j + WIDTH - 1 are columns before `end`.
__device__ bool whole(int j, int end) { return !EDGES || (j >= 0 && j + WIDTH <= end); }

// A bit for each of j .. j + WIDTH - 1: whether it is a column before `end`.
__device__ unsigned int inside(int j, int end) {
    constexpr unsigned int ALL = (1u << WIDTH) - 1;
    const int last = min(max(end - j, 0), WIDTH);
    return ((1u << last) - 1) & ALL << max(-j, 0);
}

// Reads this thread's vectors of a line that begin before `end`; elements outside of the line are undefined. ANYWHERE: the
// elements may be `stride` apart, or not aligned to 16 bytes.
template <bool ANYWHERE, typename T>
__device__ void read(Pack<T> (&v)[VECTORS], const T* line, int begin, int end, long long stride = 1) {
    if (!ANYWHERE || (stride == 1 && (size_t)(line + begin) % sizeof(Pack<T>) == 0)) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (!EDGES || begin + i * STEP < end) v[i] = *(const Pack<T>*)(line + begin + i * STEP);
    } else {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const unsigned int there = inside(begin + i * STEP, end);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k)
                if (there >> k & 1) v[i].at[k] = line[(begin + i * STEP + k) * stride];
        }
    }
}

__device__ void write(scalar* line, int j, int end, const Vector& v) {
    uint4 bits = *(const uint4*)&v;
    if (!EDGES || (whole(j, end) && (size_t)(line + j) % 16 == 0)) {
        *(uint4*)(line + j) = bits;
    } else if (j < end) {
        const unsigned int there = inside(j, end);
        constexpr int SIZE = 8 * sizeof(scalar);
#pragma unroll 1
        for (int k = 0; k < WIDTH; ++k) {  // few threads run this: short code matters more than speed
            if (there >> k & 1) line[j + k] = *(const scalar*)&bits.x;
            bits.x = __funnelshift_rc(bits.x, bits.y, SIZE);
            bits.y = __funnelshift_rc(bits.y, bits.z, SIZE);
            bits.z = __funnelshift_rc(bits.z, bits.w, SIZE);
            bits.w = __funnelshift_rc(bits.w, 0, SIZE);
        }
    }
}

// Loads this block's columns before `end` of all lines to shared memory by TMA, extended to multiples of 16 bytes, and sets
// the pointers to the copies. Shared memory has a barrier, then for each line a share and two vectors.
template <int LINES>
__device__ void stage_rows(const scalar* (&lines)[LINES], const Share& share, int end) {
    extern __shared__ uint4 memory[];
    const u32 bar = (u32)__cvta_generic_to_shared(memory);
    const bool leads = threadIdx.x == 0;
    const int begin = max(share.block_begin, 0);
    if (leads) {
        mbar_init(bar, LINES);
        mbar_init_done();
    }
#pragma unroll
    for (int n = 0; n < LINES; ++n) {
        const size_t from = (size_t)(lines[n] + begin) & ~15ull, to = ((size_t)(lines[n] + end) + 15) & ~15ull;
        scalar* copy = (scalar*)(memory + 1) + n * (share.size + 2 * WIDTH);
        if (leads) {
            mbar_expect(bar, begin < end ? to - from : 0);
            if (begin < end) bulk_load((u32)__cvta_generic_to_shared(copy), (const void*)from, to - from, bar);
        }
        lines[n] = copy + (lines[n] - (const scalar*)from);
    }
    __syncthreads();
    mbar_wait(bar, 0);
}

__device__ PhiloxKey key_of(const Softmax& a) {
    return philox_key(a.seed_low, a.seed_high, a.stream, a.step, DROPOUT ? a.device_step : nullptr);
}

// A bit for each of the elements index .. index + WIDTH - 1: whether dropout keeps it.
__device__ unsigned int kept(PhiloxKey key, long long index, unsigned int threshold) {
    const int skip = (int)index & (EDGES ? 7 : 8 - WIDTH);
    const long long counter = index >> 3;
    uint4 words = philox(key, (unsigned int)counter, (unsigned int)(counter >> 32)), next = words;
    if (skip + WIDTH > 8) next = philox(key, (unsigned int)(counter + 1), (unsigned int)((counter + 1) >> 32));
    unsigned int bits = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const unsigned int number = philox_lane(skip + k < 8 ? words : next, (skip + k) % 8);
        bits |= (unsigned int)(number < threshold) << k;
    }
    return bits;
}

// ---- reductions over the groups of a row ----------------------------------------------------------------------------------

// Announces that this block has started: only then other blocks of the cluster may write to its shared memory.
__device__ void start() {
    if constexpr (BLOCKS > 1) cluster_arrive();
}

// Publishes this group's result and returns those of all PARTS of the row. Called once in a kernel.
__device__ const float2* exchange(float2 mine) {
    __shared__ __align__(8) float2 found[ROWS * PARTS];
    float2* parts = found + threadIdx.x / LANES * PARTS;
    float2* slot = parts + blockIdx.x % BLOCKS * GROUPS + threadIdx.x % LANES / GROUP;
    const int lane = threadIdx.x % GROUP;
    if constexpr (BLOCKS == 1) {
        if (lane == 0) *slot = mine;
        __syncthreads();
    } else {
        cluster_wait();
        if (lane < BLOCKS) store_shared_at((u32)__cvta_generic_to_shared(slot), lane, mine);
        cluster_arrive();
        cluster_wait();
    }
    return parts;
}

constexpr int SPAN = PARTS < 32 ? PARTS : 32;  // threads that reduce the parts

// Returns the factor that turns exp(logit - peak) into the softmax; 0 for a row that is fully masked. `peak` is this group's
// largest logit, `total` its sum of exp(logit - peak).
__device__ float normalizer(float peak, float total) {
    float high = peak, sum = total;
    if constexpr (PARTS > 1) {
        const float2* parts = exchange(make_float2(peak, total));
        const int lane = threadIdx.x % SPAN;
#pragma unroll
        for (int part = 0; part < PARTS; part += SPAN) high = fmaxf(high, parts[part + lane].x);
        high = reduce<SPAN>(high, Max{});
        sum = 0.f;
#pragma unroll
        for (int part = 0; part < PARTS; part += SPAN)
            sum += parts[part + lane].y * exponential(parts[part + lane].x - high);
        sum = reduce<SPAN>(sum, Sum{});
    }
    return sum == 0.f ? 0.f : __fdividef(exponential(peak - high), sum);
}

__device__ float row_sum(float sum) {
    sum = reduce<GROUP>(sum, Sum{});
    if constexpr (PARTS > 1) {
        const float2* parts = exchange(make_float2(sum, 0.f));
        sum = 0.f;
#pragma unroll
        for (int part = 0; part < PARTS; part += SPAN) sum += parts[part + threadIdx.x % SPAN].x;
        sum = reduce<SPAN>(sum, Sum{});
    }
    return sum;
}

// ---- both directions ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void forward(const Softmax& a) {
    start();
    const Share share(a);
    const long long r = share.row, size1 = a.mask_sizes[0], size2 = a.mask_sizes[1];
    int visible = share.end;
    if (EDGES && a.queries) visible = min(visible, (int)(r % a.queries) + 1 + a.cols - a.queries);
    if (EDGES && a.lengths) visible = min(visible, a.lengths[r / a.length_rows]);
    const scalar* lines[] = {a.x + r * a.x_stride};
    if (!EDGES && !LONG && a.ahead && threadIdx.x % LANES == 0 && r + a.ahead < a.rows)
        bulk_prefetch(lines[0] + a.ahead * a.x_stride, a.cols * sizeof(scalar));
    if constexpr (STAGED) stage_rows(lines, share, visible);
    long long at = 0;  // offset of the row's mask
    if constexpr (MASK != 0)
        at = r / (size1 * size2) * a.mask_strides[0] + r / size2 % size1 * a.mask_strides[1] + r % size2 * a.mask_strides[2];

    float e[VECTORS][WIDTH];  // logits, then exp(logit - peak)
    auto read_logits = [&](int begin) {
        Vector in[VECTORS], bias[VECTORS];
        Pack<bool> keep[VECTORS];
        read<EDGES>(in, lines[0], begin, visible);
        if constexpr (MASK == 1) read<true>(keep, (const bool*)a.mask + at, begin, visible, a.mask_strides[3]);
        if constexpr (MASK == 2) read<true>(bias, (const scalar*)a.mask + at, begin, visible, a.mask_strides[3]);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int j = begin + i * STEP;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                e[i][k] = (float)in[i].at[k] * a.scale;
                if (MASK == 2) e[i][k] += (float)bias[i].at[k];
                if (MASK == 1 && !keep[i].at[k]) e[i][k] = NEG_INF;
            }
            if (!whole(j, visible)) {
                const unsigned int there = inside(j, visible);
#pragma unroll
                for (int k = 0; k < WIDTH; ++k)
                    if (!(there >> k & 1)) e[i][k] = NEG_INF;
            }
        }
    };

    float peak = LOWEST, total = 0.f;
    auto exponentials = [&] {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) sum += e[i][k] = exponential(e[i][k] - peak);
        return sum;
    };
    for (int n = 0; n < share.steps; ++n) {
        read_logits(share.begin + n * VECTORS * STEP);
        float high = peak;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) high = fmaxf(high, e[i][k]);
        high = reduce<GROUP>(high, Max{});
        if (LONG) total *= exponential(peak - high);
        peak = high;
        total += exponentials();
    }
    const float to_one = normalizer(peak, reduce<GROUP>(total, Sum{}));

    const PhiloxKey key = key_of(a);
    for (int n = share.steps - 1; n >= 0; --n) {  // the last step is still in registers
        const int begin = share.begin + n * VECTORS * STEP;
        if (n < share.steps - 1) {
            read_logits(begin);
            exponentials();
        }
        if (share.there)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int j = begin + i * STEP;
                Vector out;
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) out.at[k] = (scalar)(e[i][k] *= to_one);
                if constexpr (DROPOUT) {
                    if (a.undropped) write(a.undropped + r * a.undropped_stride, j, share.end, out);
                    const unsigned int keep = kept(key, r * a.cols + j, a.threshold);
#pragma unroll
                    for (int k = 0; k < WIDTH; ++k) out.at[k] = (scalar)(e[i][k] * (keep >> k & 1 ? a.factor : 0.f));
                }
                write(a.out + r * a.out_stride, j, share.end, out);
            }
    }
}

__device__ __forceinline__ void backward(const Softmax& a) {
    start();
    const Share share(a);
    const long long r = share.row;
    const int end = share.end;
    const PhiloxKey key = key_of(a);
    const float factor = DROPOUT ? a.factor : 1.f;
    const scalar* lines[] = {a.x + r * a.x_stride, a.dy + r * a.dy_stride};
    if constexpr (STAGED) stage_rows(lines, share, end);

    Vector p[VECTORS], g[VECTORS];
    auto read_both = [&](int begin) {
        read<EDGES>(p, lines[0], begin, end);
        read<EDGES>(g, lines[1], begin, end);
        if constexpr (DROPOUT)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const unsigned int keep = kept(key, r * a.cols + begin + i * STEP, a.threshold);
#pragma unroll
                for (int k = 0; k < WIDTH; ++k)
                    if (!(keep >> k & 1)) g[i].at[k] = scalar{};
            }
    };
    float dot = 0.f;
    for (int n = 0; n < share.steps; ++n) {
        const int begin = share.begin + n * VECTORS * STEP;
        read_both(begin);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            float part = 0.f;
            if (whole(begin + i * STEP, end)) {
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) part += (float)p[i].at[k] * (float)g[i].at[k];
            } else {
                const unsigned int there = inside(begin + i * STEP, end);
#pragma unroll
                for (int k = 0; k < WIDTH; ++k)
                    if (there >> k & 1) part += (float)p[i].at[k] * (float)g[i].at[k];
            }
            dot += part;
        }
    }
    dot = row_sum(dot) * factor;

    for (int n = share.steps - 1; n >= 0; --n) {  // the last step is still in registers
        const int begin = share.begin + n * VECTORS * STEP;
        if (n < share.steps - 1) read_both(begin);
        if (share.there)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                Vector out;
#pragma unroll
                for (int k = 0; k < WIDTH; ++k)
                    out.at[k] = (scalar)(a.scale * (float)p[i].at[k] * ((float)g[i].at[k] * factor - dot));
                write(a.out + r * a.out_stride, begin + i * STEP, end, out);
            }
    }
}
