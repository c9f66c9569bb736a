// h = residual + dropout(x W^T + x_bias), normed = LayerNorm or RMSNorm of h, in one launch, for Hopper. A block computes
// whole rows of the product, so the norm can be computed in registers.
// Constants: scalar = f16, bf16; ROWS = 128; COLUMNS = 384; RMS = false; DROPOUT = true
// Constants: scalar = bf16; ROWS = 64; COLUMNS = 128, 512; RMS = true; DROPOUT = false
// Launch:    grid = (ceil(rows / ROWS),), block = (384,), shared = SHARED bytes
//            dependent: linear_dropout_add_norm_forward
// Arch: sm_90a
//
// The residual is loaded into a stage of the product's ring, h overwrites it there and TMA stores it, then the same for
// normed. The dropout mask, one bit per column, is sampled by three warps during the product or, where the product is deep,
// before it by all warps except the loading one: sampling slows the product down.
#include "common/grid_dependency.cuh"
#include "common/philox.cuh"
#include "common/pipeline.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

// ---- the main loop: c (ROWS x COLUMNS) += x W^T. One thread loads stages of K = 64, two warpgroups multiply: with 128 rows
// each has 64 rows, with 64 rows each has half of the columns. Elements outside x and W are zeros.
struct RowProduct {
    static constexpr int THREADS = 384, CONSUMERS = 256, PRODUCER = 2;
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // with 384 threads a launch gives 168 to each
    static constexpr bool STACKED = ROWS == 128;                 // the warpgroups have different rows, else columns
    static constexpr int OWN = STACKED ? COLUMNS : COLUMNS / 2;  // columns of a warpgroup
    static constexpr int PARTS = OWN > 256 ? 2 : 1;              // products per warpgroup
    static constexpr int PART = OWN / PARTS;                     // columns of a product
    static constexpr int X_BYTES = ROWS * 128, STAGE = X_BYTES + COLUMNS * 128;
    static constexpr int FIT = 221184 / STAGE, STAGES = FIT < 6 ? FIT : 6, BYTES = 1024 + STAGES * STAGE;
    static_assert(ROWS == 128 || ROWS == 64, "linear_dropout_add_norm.cu: ROWS is 64 or 128");
    static_assert(OWN * 64 == PARTS * PART * 64 && PARTS * PART <= 384,
                  "linear_dropout_add_norm.cu: at most 192 accumulators per thread");

    using Ring = PipelineState<STAGES>;

    u32 shared;
    int group;  // the thread's warpgroup
    __device__ __forceinline__ RowProduct() : shared(__shfl_sync(~0u, shared_base(), 0)), group(warpgroup()) {}

    __device__ __forceinline__ u32 full(const Ring& r) const { return shared + 8 * r.stage; }
    __device__ __forceinline__ u32 empty(const Ring& r) const { return shared + 64 + 8 * r.stage; }
    __device__ __forceinline__ u32 place(const Ring& r) const { return shared + 1024 + r.stage * STAGE; }  // of x, then W
    __device__ __forceinline__ u32 end() const { return shared + BYTES; }
    __device__ __forceinline__ int row() const { return STACKED ? 64 * group : 0; }
    __device__ __forceinline__ int column() const { return STACKED ? 0 : OWN * group; }

    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) {
                mbar_init(shared + 8 * i, 1);
                mbar_init(shared + 64 + 8 * i, CONSUMERS / 32);
            }
            mbar_init_done();
        }
        __syncthreads();
    }

    // ---- producer
    __device__ __forceinline__ void begin(const Ring& ring, int bytes) const {  // waits until the stage is empty
        mbar_wait(empty(ring), ring.parity ^ 1);
        mbar_expect(full(ring), bytes);
    }
    __device__ __forceinline__ void load(Ring& ring, const TensorMap& x_map, const TensorMap& matrix_map, int first_row,
                                         int depth) const {
#pragma unroll 1
        for (int k = 0; k < depth; k += 64, ring.next()) {
            begin(ring, STAGE);
            tma_load(place(ring), x_map, full(ring), k, first_row, 0, 0, L2_EVICT_FIRST);
#pragma unroll
            for (int n = 0; n < COLUMNS; n += PART)
                tma_load(place(ring) + X_BYTES + n * 128, matrix_map, full(ring), k, n, 0, 0);
        }
    }

    // ---- consumers
    __device__ __forceinline__ void wait(const Ring& ring) const { mbar_wait(full(ring), ring.parity); }
    __device__ __forceinline__ void release(const Ring& ring) const {  // one arrival per warp
        if (threadIdx.x % 32 == 0) mbar_arrive(empty(ring));
    }
    // Element i of c[j] has row row() + fragment_row(i) and column column() + j * PART + fragment_column(i).
    __device__ __forceinline__ void accumulate(Ring& ring, float (&c)[PARTS][PART / 2], int depth) const {
        const u32 own_x = row() * 128, own_columns = X_BYTES + column() * 128;
#pragma unroll
        for (int j = 0; j < PARTS; ++j) keep_live(c[j]);
        Ring before;
#pragma unroll 1
        for (int step = 0; 64 * step < depth; ++step) {
            wait(ring);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < PARTS; ++j)
                product<K_MAJOR, K_MAJOR, ROWS, 64, 64>(c[j], place(ring) + own_x,
                                                        place(ring) + own_columns + j * PART * 128, true);
            wgmma_commit();
            wgmma_wait<1>();
            if (step) release(before);
            before = ring;
            ring.next();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < PARTS; ++j) keep_live(c[j]);
        if (depth) release(before);
    }
};

using P = RowProduct;
constexpr int OWN = P::OWN;
constexpr int SLAB = 64 * 128, SLABS = OWN / 64;  // a warpgroup's 64 rows x 64 columns of residual, h or normed
// Shared memory after the stages: x_bias, weight, bias; what the warpgroups exchange; the dropout mask.
constexpr int VECTOR = 2 * COLUMNS;
constexpr int SHARES = 3 * VECTOR;
constexpr int KEPT = SHARES + 1024, KEPT_ROW = COLUMNS / 8;
constexpr int SHARED = 1024 + P::BYTES + KEPT + ROWS * KEPT_ROW;
static_assert(OWN % 64 == 0, "linear_dropout_add_norm.cu: a warpgroup has whole slabs");
enum { CONSUMERS_MEET = 1, ALL_SAMPLED = 2 };  // named barriers
constexpr int SAMPLERS = 96;               // threads that sample during the product
constexpr int ALL = P::THREADS - 32;       // threads that sample before a deep product
constexpr int DEEP = 1024;                 // depth from which on a product is deep
constexpr int FACTOR = 512;                // offset of dropout's factor in shared memory

// Copies a vector, or `fill` if null, to shared memory, with a lane's pairs of 32 columns in 16 contiguous bytes.
__device__ __forceinline__ void fetch_vector(u32 to, const scalar* vector, float fill) {
    for (int i = threadIdx.x; i < COLUMNS / 2; i += P::CONSUMERS) {
        const u32 pair = vector ? vector[2 * i].bits | (u32)vector[2 * i + 1].bits << 16 : pack_pair(scalar(), fill, fill);
        store_shared(to + i / 16 * 64 + i % 4 * 16 + i / 4 % 4 * 4, pair);
    }
}
struct Pairs { u32 x[4]; };  // a lane's columns 8 n + 2 (lane % 4) and the next one, n = 0 .. 3
__device__ __forceinline__ Pairs vector_pairs(u32 vector, int q) {
    const uint4 x = load_shared_uint4(vector + 64 * q + threadIdx.x % 4 * 16);
    return {{x.x, x.y, x.z, x.w}};
}

// Samples the dropout mask of the block's rows with `threads` threads. A word has the bits of 32 columns, from four Philox
// counters; byte n has the columns of the lanes with lane % 4 = n.
__device__ __forceinline__ void sample_mask(u32 kept, const PhiloxKey& key, u32 threshold, int first_row, int thread,
                                            int threads) {
    const unsigned long long begin = (unsigned long long)first_row * KEPT_ROW;
#pragma unroll 1
    for (int at = thread; at < ROWS * KEPT_ROW / 4; at += threads) {
        u32 bits = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const unsigned long long counter = begin + 4 * at + n;
            const uint4 drawn = philox(key, (u32)counter, (u32)(counter >> 32));
            const u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (words[i] << 16 < threshold << 16) bits |= 1u << 8 * i + 2 * n;
                if (words[i] < threshold << 16) bits |= 2u << 8 * i + 2 * n;
            }
        }
        store_shared(kept + 4 * at, bits);
    }
}

// Exchanges four values of two rows, of which each warpgroup has half the columns; returns those of the other warpgroup.
__device__ __forceinline__ float4 of_other(const P& p, int row, float a, float b, float c, float d) {
    const u32 place = p.end() + SHARES + (row / 16 * 8 + row % 8) * 16;
    if (threadIdx.x % 4 == 0) store_shared(place + 512 * p.group, a, b, c, d);
    bar_sync(CONSUMERS_MEET, P::CONSUMERS);
    const uint4 x = load_shared_uint4(place + 512 * (p.group ^ 1));
    return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}
__device__ __forceinline__ void quad_sum(float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
}

extern "C" __global__ void __launch_bounds__(P::THREADS, 1) linear_dropout_add_norm_forward(
    const __grid_constant__ TensorMap x_map,         // (rows, depth); boxes of ROWS rows
    const __grid_constant__ TensorMap matrix_map,    // (COLUMNS, depth); boxes of PART rows
    const __grid_constant__ TensorMap residual_map,  // (rows, COLUMNS); boxes of 64 rows
    const __grid_constant__ TensorMap normed_map,    // (rows, COLUMNS); boxes of 16 rows
    const __grid_constant__ TensorMap h_map,         // (rows, COLUMNS); boxes of 16 rows
    const scalar* weight,                            // (COLUMNS,) of the norm, or null
    const scalar* bias,                              // (COLUMNS,) of the norm, or null
    const scalar* x_bias,                            // (COLUMNS,) or null
    float* mean,                                     // (rows,) of h minus the row's first element
    float* rstd,                                     // (rows,), or null: neither is stored
    int rows,
    int depth,
    float eps,
    unsigned int threshold,                          // of DROPOUT: keep 16-bit numbers below it
    float factor,                                    // 1 / (1 - p)
    unsigned int seed_low, unsigned int seed_high, unsigned int stream, unsigned int step,
    const unsigned int* device_step) {
    grid_dependency_wait();
    const P p;
    if (threadIdx.x == 0) store_shared(p.shared + FACTOR, __float_as_uint(factor));
    p.init();
    const int first = blockIdx.x * ROWS, thread = threadIdx.x;
    const auto sample_as = [&](int of_them, int all) {
        sample_mask(p.end() + KEPT, philox_key(seed_low, seed_high, stream, step, device_step), threshold, first, of_them, all);
    };
    if (DROPOUT && depth >= DEEP && thread / 32 != P::CONSUMERS / 32)
        sample_as(thread < P::CONSUMERS ? thread : thread - 32, ALL);
    if (p.group == P::PRODUCER) {
        decrease_registers<P::PRODUCER_REGISTERS>();
        if (DROPOUT && threadIdx.x % 128 >= 32) {
            if (depth < DEEP) sample_as(thread - P::CONSUMERS - 32, SAMPLERS);
            bar_arrive(ALL_SAMPLED, P::CONSUMERS + SAMPLERS);
        }
        if (threadIdx.x % 128) return;
        P::Ring ring;
        p.load(ring, x_map, matrix_map, first, depth);
#pragma unroll
        for (int row = 0; row < ROWS; row += 64, ring.next()) {
            p.begin(ring, SLAB * COLUMNS / 64);
#pragma unroll
            for (int s = 0; s < COLUMNS / 64; ++s)
                tma_load(p.place(ring) + s * SLAB, residual_map, p.full(ring), 64 * s, first + row, 0, 0, L2_EVICT_FIRST);
        }
        return;
    }
    increase_registers<P::CONSUMER_REGISTERS>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int warp_row = first + p.row() + 16 * warp;
    fetch_vector(p.end(), x_bias, 0.f);
    fetch_vector(p.end() + VECTOR, weight, 1.f);
    fetch_vector(p.end() + 2 * VECTOR, bias, 0.f);
    bar_sync(CONSUMERS_MEET, P::CONSUMERS);

    const u32 vectors = p.end() + 2 * p.column();
    P::Ring ring;
    float c[P::PARTS][P::PART / 2];
    const auto accumulators = [&](int k) { return &c[k / (P::PART / 16)][k % (P::PART / 16) * 8]; };  // of the k-th 16 columns
#pragma unroll
    for (int q = 0; q < OWN / 32; ++q) {
        const Pairs x_biases = vector_pairs(vectors, q);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 x = unpack_pair(scalar(), x_biases.x[i / 2]);
            float* const d = accumulators(2 * q + i / 4) + i % 4 * 2;
            d[0] = x.x, d[1] = x.y;
        }
    }
    p.accumulate(ring, c, depth);
    if (DROPOUT) bar_sync(ALL_SAMPLED, P::CONSUMERS + SAMPLERS);
    if (P::STACKED && p.group) ring.next();
    p.wait(ring);

    // ---- h, which overwrites the residual in shared memory; the next columns are read while these are computed
    const u32 own = p.place(ring) + (P::STACKED ? 0 : p.group * SLABS * SLAB) + warp * 2048;
    const auto place = [&](int k) { return chunk_address<64>(own, lane & 15, 2 * k + (lane >> 4)); };
    const auto leave = [&](const TensorMap& map, int slab) {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            tma_store(map, own + slab * SLAB, p.column() + slab * 64, warp_row, 0, 0);
            bulk_commit();
        }
    };
    const int row = 16 * warp + lane / 4;  // and row + 8, of the warpgroup's 64
    const u32 kept = p.end() + KEPT + (p.row() + row) * KEPT_ROW + p.column() / 8;
    const float keep_scale = load_shared_float(p.shared + FACTOR);  // a kernel parameter is loaded under each predicate
    u32 h[OWN / 16][4], kept_bits[2];
    float sum[2] = {0.f, 0.f}, square[2] = {0.f, 0.f}, pivot[2] = {0.f, 0.f};
    ldmatrix(h[0], place(0));
#pragma unroll
    for (int k = 0; k < OWN / 16; ++k) {
        if (k + 1 < OWN / 16) ldmatrix(h[k + 1], place(k + 1));
        if (DROPOUT && k % 2 == 0)
#pragma unroll
            for (int r = 0; r < 2; ++r) kept_bits[r] = load_shared(kept + 8 * r * KEPT_ROW + 2 * k) >> lane % 4 * 8;
        const float* const d = accumulators(k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // pairs of rows r and r + 8 in eight columns, then in the next eight
            float2 x = unpack_pair(scalar(), h[k][i]);
            if (DROPOUT) {
                const int bit = 2 * (k % 2 * 2 + i / 2);
                if (kept_bits[i % 2] & 1u << bit) x.x = fmaf(d[2 * i], keep_scale, x.x);
                if (kept_bits[i % 2] & 2u << bit) x.y = fmaf(d[2 * i + 1], keep_scale, x.y);
            } else {
                x.x += d[2 * i], x.y += d[2 * i + 1];
            }
            h[k][i] = pack_pair(scalar(), x.x, x.y);
            const float2 rounded = unpack_pair(scalar(), h[k][i]);
            if (!RMS && k == 0 && i < 2) pivot[i] = __shfl_sync(~0u, rounded.x, lane & ~3);
            const float low = rounded.x - pivot[i % 2], high = rounded.y - pivot[i % 2];
            sum[i % 2] += low + high;
            square[i % 2] = fmaf(low, low, fmaf(high, high, square[i % 2]));
        }
        stmatrix(place(k), h[k]);
        keep_live(sum), keep_live(square);  // computed now: later, all their terms would stay live
        if (k % 4 == 3) leave(h_map, k / 4);
    }
    keep_live(h);  // as packed words, not unpacked
    grid_launch_dependents();

    // ---- the statistics of h minus the row's first element. That element is at most sqrt(N) standard deviations from the
    // mean of N elements, so the sum of squares loses little precision, and a constant row is exact.
    quad_sum(sum);
    quad_sum(square);
    float scale[2], shift[2], center[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float average = RMS ? 0.f : sum[r] * (1.f / OWN);
        center[r] = pivot[r] + average;
        square[r] = fmaf(-average, sum[r], square[r]);
    }
    if (!P::STACKED) {
        const float4 other = of_other(p, row, center[0], center[1], square[0], square[1]);
        const float centers[2] = {other.x, other.y}, squares[2] = {other.z, other.w};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float apart = center[r] - centers[r];
            square[r] = fmaf(apart * apart, OWN / 2, square[r] + squares[r]);
            center[r] = (center[r] + centers[r]) * 0.5f;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        scale[r] = rsqrtf(square[r] * (1.f / COLUMNS) + eps);
        shift[r] = -center[r] * scale[r];
        const int at = first + p.row() + row + 8 * r;
        if (rstd && lane % 4 == 0 && p.column() == 0 && at < rows) {
            mean[at] = center[r] - pivot[r];
            rstd[at] = scale[r];
        }
    }

    // ---- normed, which overwrites h in shared memory
    if (lane == 0) bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int q = 0; q < OWN / 32; ++q) {
        const Pairs weights = vector_pairs(vectors + VECTOR, q), biases = vector_pairs(vectors + 2 * VECTOR, q);
#pragma unroll
        for (int k = 2 * q; k < 2 * q + 2; ++k) {
            u32 tile[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 w = unpack_pair(scalar(), weights.x[k % 2 * 2 + i / 2]);
                const float2 b = unpack_pair(scalar(), biases.x[k % 2 * 2 + i / 2]);
                const float2 x = unpack_pair(scalar(), h[k][i]);
                const float low = fmaf(x.x, scale[i % 2], shift[i % 2]), high = fmaf(x.y, scale[i % 2], shift[i % 2]);
                tile[i] = pack_pair(scalar(), fmaf(low, w.x, b.x), fmaf(high, w.y, b.y));
            }
            stmatrix(place(k), tile);
        }
        if (q % 2) leave(normed_map, q / 2);
    }
    if (lane == 0) bulk_wait_read();
}
