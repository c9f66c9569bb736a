// Attention, softmax(scale * q k^T) v, on tensor cores by mma.sync. Dao, "FlashAttention-2" (2023).
// Constants: scalar = bf16; HEAD_DIM = 64, 128; EXTRAS = false, true; DROPOUT = false, true
// Constants: scalar = bf16; HEAD_DIM = 32, 96, 256; EXTRAS = false; DROPOUT = false
// Constants: scalar = bf16; HEAD_DIM = 256; EXTRAS = true; DROPOUT = true
// Constants: scalar = f16; HEAD_DIM = 64, 128; EXTRAS = false; DROPOUT = false
// Constants: scalar = float; HEAD_DIM = 32, 64, 96, 128; EXTRAS = false; DROPOUT = false
// Constants: scalar = float; HEAD_DIM = 64, 128; EXTRAS = true; DROPOUT = true
// Constants below sm_80: scalar = f16; HEAD_DIM = 64, 128; EXTRAS = false, true; DROPOUT = false, true
// Constants below sm_80: scalar = f16; HEAD_DIM = 32, 96, 256; EXTRAS = false; DROPOUT = false
// Constants below sm_80: scalar = f16; HEAD_DIM = 256; EXTRAS = true; DROPOUT = true
//   (both head sizes rounded up; float32 is rounded to TF32)
// Launch:    grid = (ceil(longest queries / ROWS) * heads * sequences,), block = (THREADS,), shared = SHARED_BYTES
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention_mma.cuh"

constexpr bool TF32 = sizeof(scalar) == 4;
static_assert(HEAD_DIM % (TF32 ? 32 : 16) == 0 && HEAD_DIM <= (TF32 ? 128 : 256),
              "flash_attention_forward_ampere.cu: HEAD_DIM is 16 .. 256, or of float 32 .. 128");
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int ROW_BYTES = HEAD_DIM * (int)sizeof(scalar), CHUNK = 16 / (int)sizeof(scalar);  // columns in 16 bytes
constexpr int M = ROW_BYTES <= 256 ? 2 : 1;       // groups of 16 queries of a warp
constexpr int ROWS = 16 * M * WARPS;
// Keys of a step: as many as registers allow without spills, and few enough that shared memory of sm_80 has room for two
// blocks; that of sm_75, 64 KiB, for two up to head size 64.
#if __CUDA_ARCH__ >= 900
constexpr int PLAIN_KEYS = 64;
#else
constexpr int PLAIN_KEYS = HEAD_DIM > 64 ? 48 : 64;
#endif
#if __CUDA_ARCH__ < 800
constexpr int KEYS = HEAD_DIM > 128 || HEAD_DIM == 128 && EXTRAS && DROPOUT ? 16 : 32;
#else
// Whether registers do not suffice for 32 keys a step; gpuattn/ops/attention/ampere.py: forward_tile.
constexpr bool SPILLS = HEAD_DIM == 128 && EXTRAS &&
                        (__CUDA_ARCH__ >= 1200 ? !DROPOUT : DROPOUT && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900);
constexpr int KEYS = TF32 || HEAD_DIM > 128   ? 32
                     : !EXTRAS && !DROPOUT    ? PLAIN_KEYS
                     : HEAD_DIM > 64          ? (SPILLS ? 16 : 32)
                                              : 48;
#endif
constexpr int N = KEYS / 8, STEPS = ROW_BYTES / 32;  // accumulators of 16 x 8 logits; steps of 32 bytes along the head
constexpr int SLABS = (ROW_BYTES + 127) / 128;
constexpr u32 Q_BYTES = SLABS * ROWS * 128, K_BYTES = SLABS * KEYS * 128;  // followed by k, k, v, v
constexpr bool Q_IN_REGISTERS = ROW_BYTES <= 128;
// Copies by registers: whether the next keys are on their way during the first product, and the next values during the second;
// otherwise, where registers are short, they arrive between the two.
constexpr bool KEYS_IN_FLIGHT = BY_REGISTERS && HEAD_DIM != 128;
constexpr bool VALUES_IN_FLIGHT = BY_REGISTERS && (HEAD_DIM != 128 || !EXTRAS && !DROPOUT);
// Whether addresses of keys and values are computed again in every step, instead of kept in registers, which are short.
constexpr bool ROWS_AGAIN = HEAD_DIM == 128 && !EXTRAS && DROPOUT && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900;
constexpr float GROWTH = 8.f;  // sums are rescaled only if the maximum grows by more than this, in base 2
constexpr int SHARED_BYTES = Q_BYTES + 4 * K_BYTES;

// Copies rows of an array to a tile asynchronously, with zeros past `rows` and `columns`. Eight threads copy 128 bytes of
// every APART-th row; `source` is where this thread starts. finish() ends what fetch() started.
constexpr int APART = THREADS / 8;
template <int R> using Fetched = Copy[R / APART][SLABS];
__device__ __forceinline__ const scalar* thread_rows(const scalar* rows, long long stride) {
    return rows + threadIdx.x / 8 * stride + threadIdx.x % 8 * CHUNK;
}
template <int R>
__device__ __forceinline__ void fetch(Fetched<R>& copies, u32 tile, const scalar* source, long long stride, int rows,
                                      int columns) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    long long step = APART * stride;
    step = opaque(step);  // otherwise its multiples are kept in registers around the loop
#pragma unroll
    for (int i = 0; i < R / APART; ++i, source += step)
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const int column = 8 * CHUNK * slab + CHUNK * chunk;
            if (ROW_BYTES % 128 == 0 || column < HEAD_DIM)
                copies[i][slab].start(chunk_address<R>(tile, row + i * APART, 8 * slab + chunk), source + 8 * CHUNK * slab,
                                      row + i * APART < rows && column < columns);
        }
}
template <int R> __device__ __forceinline__ void finish(const Fetched<R>& copies, u32 tile) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < R / APART; ++i)
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            if (ROW_BYTES % 128 == 0 || 8 * CHUNK * slab + CHUNK * chunk < HEAD_DIM)
                copies[i][slab].finish(chunk_address<R>(tile, row + i * APART, 8 * slab + chunk));
}

// Prepares what this thread copied so that mma.sync rounds it to nearest TF32.
template <int R> __device__ __forceinline__ void round_fetched(u32 tile) {
#pragma unroll
    for (int i = 0; i < R; i += APART)
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const u32 address = chunk_address<R>(tile, threadIdx.x / 8 + i, 8 * slab + threadIdx.x % 8);
            const uint4 x = load_shared_uint4(address);
            store_shared(address, for_tf32(__uint_as_float(x.x)), for_tf32(__uint_as_float(x.y)),
                         for_tf32(__uint_as_float(x.z)), for_tf32(__uint_as_float(x.w)));
        }
}

// The warp's rows of Q, in registers where they fit, otherwise loaded from shared memory in every step.
struct Queries {
    u32 lane_address, held[Q_IN_REGISTERS ? STEPS : 1][M][4];

    __device__ __forceinline__ void read(int step) {
#pragma unroll
        for (int m = 0; m < M; ++m)
            ldmatrix(held[Q_IN_REGISTERS ? step : 0][m], offset_address<ROWS>(lane_address, 16 * m, 16 * step));
    }
    __device__ __forceinline__ const u32 (&operator[](int step) const)[M][4] { return held[Q_IN_REGISTERS ? step : 0]; }
};
// x += q k^T over one step of 32 bytes of columns.
__device__ __forceinline__ void multiply_step(float (&x)[M][N][4], Queries& q, u32 k_lane, int step) {
    u32 b[4];
    if (!Q_IN_REGISTERS) q.read(step);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        ldmatrix(b, offset_address<KEYS>(k_lane, 16 * n, 16 * step));
#pragma unroll
        for (int m = 0; m < M; ++m) mma_pair(x[m][2 * n], x[m][2 * n + 1], q[step][m], b);
    }
}

// The address from which this lane reads v, see add_values.
__device__ __forceinline__ u32 lane_of_values(u32 v_tile) {
    return TF32 ? chunk_address<KEYS>(v_tile, threadIdx.x % 4 * 2, threadIdx.x % 32 / 4) : lane_address(v_tile);
}
// Applies dropout to the weights of 16 keys, in two accumulators, and packs them to operands a; TF32 stays in the accumulators.
template <typename T>
__device__ __forceinline__ void dropout_and_pack(T, u32 (&p)[4], float (&left)[4], float (&right)[4], const Attention& a,
                                              const Sequence& s, int head, int i, int j) {
    if constexpr (TF32) {
        if (DROPOUT) apply_dropout(left, right, kept_of_lane_opaque(a, s, head, i, j));
    } else {
        pack<T>(p, left, right);
        if (DROPOUT) apply_dropout(p, kept_of_lane_opaque(a, s, head, i, j));
    }
}
// sum += weights v for the 16 keys of accumulators n and n + 1.
__device__ __forceinline__ void add_values(float (&sum)[M][HEAD_DIM / 8][4], const float (&x)[M][N][4], int n,
                                           const u32 (&p)[M][4], u32 v_lane) {
    if (!TF32) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 b[4];
            ldmatrix_transposed(b, offset_address<KEYS>(v_lane, 8 * n, 16 * step));
#pragma unroll
            for (int m = 0; m < M; ++m) mma_pair(sum[m][2 * step], sum[m][2 * step + 1], p[m], b);
        }
        return;
    }
    // TF32: keys may be summed in any order, and columns may be assigned to accumulators in any order. A lane has the weights
    // of keys 2t and 2t + 1, so it reads these rows of v; four adjacent columns, one load, go to one column of four
    // accumulators.
#pragma unroll
    for (int block = n; block < n + 2; ++block) {
        u32 weights[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) weights[m][e] = __float_as_uint(for_tf32(x[m][block][e % 2 * 2 + e / 2]));
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const u32 address = v_lane + (slab * KEYS + 8 * block) * 128;
            const uint4 even = load_shared_uint4(address), odd = load_shared_uint4((address ^ 16) + 128);
            const u32 b[4][2] = {{even.x, odd.x}, {even.y, odd.y}, {even.z, odd.z}, {even.w, odd.w}};
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int m = 0; m < M; ++m) mma(scalar(), sum[m][4 * slab + e], weights[m], b[e][0], b[e][1]);
        }
    }
}
// Stages 16 rows of the output in the Q tile.
template <typename T> __device__ __forceinline__ void stage_rows(T, u32 q_tile, int row, const float (&sum)[HEAD_DIM / 8][4]) {
    if constexpr (!TF32) {
#pragma unroll
        for (int n = 0; n < 2 * STEPS; ++n) store_fragment<ROWS, T>(q_tile, row, 8 * n, sum[n]);
    }
}
// Stores 16 rows of float32 output to `rows`, of which `count` exist.
__device__ __forceinline__ void store_floats(scalar* rows, const Attention& a, int count, const float (&sum)[HEAD_DIM / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {  // accumulators n / 4 * 4 .. + 3 have columns 8t (+ 4) .. + 3 of a slab
        const int row = lane / 4 + n % 4 / 2 * 8, column = n / 4 * 32 + lane % 4 * 8 + n % 2 * 4;
        const auto& from = *(const float(*)[4][4])sum[n / 4 * 4];
        if (row < count && column < a.value_dim)
            *(float4*)(rows + row * a.out.row + column) =
                make_float4(from[0][n % 4], from[1][n % 4], from[2][n % 4], from[3][n % 4]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) flash_attention_forward(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides; rows 16-byte aligned
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    scalar* __restrict__ out,             // (B, T, H, Dv)
    float* __restrict__ lse) {            // (B, H, T)
    // Tiles of one head are adjacent, so they share K and V in L2. The last tiles see the most keys and go first.
    const int tiles = (a.queries + ROWS - 1) / ROWS, pair = blockIdx.x / tiles, head = pair % a.heads;
    const int first = (tiles - 1 - blockIdx.x % tiles) * ROWS;
    const Sequence s = sequence_at(a, pair / a.heads);
    if (first >= s.queries) return;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp * 16 * M;
    const int i = first + own + lane / 4;  // this lane's queries are i + 8h + 16m
    const u32 q_tile = shared_tiles(), k_tiles = q_tile + Q_BYTES, v_tiles = k_tiles + 2 * K_BYTES;
    const int kv_head = head / a.group, last = min(first + ROWS, s.queries) - 1 + s.offset;
    const scalar* k_next = thread_rows(rows_of(k, a.k, s.number, s.first_key, kv_head), a.k.row);
    const scalar* v_next = thread_rows(rows_of(v, a.v, s.number, s.first_key, kv_head), a.v.row);

    // keys begin .. end - 1 are seen by some query, keys unmasked_begin .. unmasked_end - 1 by all queries
    const int begin = max(0, first + s.offset - a.left) / KEYS * KEYS, end = min(s.keys, last + a.right + 1);
    const int unmasked_begin = last - a.left, unmasked_end = min(s.keys, first + s.offset + a.right + 1);
    k_next += begin * a.k.row;
    v_next += begin * a.v.row;
    Fetched<KEYS> k_copies, v_copies;
    auto fetch_keys = [&](int j, u32 stage) {
        if constexpr (ROWS_AGAIN) k_next = thread_rows(rows_of(k, a.k, opaque(s.number), s.first_key + j, kv_head), a.k.row);
        fetch<KEYS>(k_copies, k_tiles + stage, k_next, a.k.row, s.keys - j, a.head_dim);
    };
    auto fetch_values = [&](int j, u32 stage) {  // after fetch_keys
        if constexpr (ROWS_AGAIN) v_next = thread_rows(rows_of(v, a.v, opaque(s.number), s.first_key + j, kv_head), a.v.row);
        fetch<KEYS>(v_copies, v_tiles + stage, v_next, a.v.row, s.keys - j, a.value_dim);
        cp_async_commit();
        k_next += KEYS * a.k.row;
        v_next += KEYS * a.v.row;
    };
    u32 stage = 0;
    if (begin < end) {
        Fetched<ROWS> q_copies;
        const scalar* q_rows = thread_rows(rows_of(q, a.q, s.number, s.first_query + first, head), a.q.row);
        fetch<ROWS>(q_copies, q_tile, q_rows, a.q.row, s.queries - first, a.head_dim);
        finish<ROWS>(q_copies, q_tile);
        fetch_keys(begin, 0);
        finish<KEYS>(k_copies, k_tiles);
        fetch_values(begin, 0);
        finish<KEYS>(v_copies, v_tiles);
    }
    const float c = EXTRAS ? 1.f : a.scale * LOG2E;  // converts logits to base 2

    float sum[M][HEAD_DIM / 8][4] = {}, total[M][2] = {}, top[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) top[m][0] = top[m][1] = NEG_INF;
    Queries queries;
    queries.lane_address = lane_address(q_tile) + own * 128;

#pragma unroll 1
    for (int j = begin; j < end; j += KEYS) {
        const u32 k_lane = lane_address_swapped(k_tiles + stage), v_lane = lane_of_values(v_tiles + stage);
        cp_async_wait<0>();
        if (TF32) {
            round_fetched<KEYS>(k_tiles + stage);
            round_fetched<KEYS>(v_tiles + stage);
            if (j == begin) round_fetched<ROWS>(q_tile);
        }
        __syncthreads();
        if (Q_IN_REGISTERS && j == begin)
#pragma unroll
            for (int step = 0; step < STEPS; ++step) queries.read(step);
        if (KEYS_IN_FLIGHT && j + KEYS < end) fetch_keys(j + KEYS, stage ^ K_BYTES);
        float x[M][N][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) multiply_step(x, queries, k_lane, step);
        if (KEYS_IN_FLIGHT && j + KEYS < end) finish<KEYS>(k_copies, k_tiles + (stage ^ K_BYTES));

        if (EXTRAS) {
#pragma unroll
            for (int m = 0; m < M; ++m) apply_extras(a, s, head, i + 16 * m, j + lane % 4 * 2, x[m]);
        }
        if (j < unmasked_begin || j + KEYS > unmasked_end) {
#pragma unroll
            for (int m = 0; m < M; ++m) apply_mask(a, s, i + 16 * m, j + lane % 4 * 2, x[m]);
        }
        float peak[M][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float y = NEG_INF;
#pragma unroll
                for (int n = 0; n < N; ++n) y = fmaxf(y, fmaxf(x[m][n][2 * h], x[m][n][2 * h + 1]));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
                peak[m][h] = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
                grown |= (peak[m][h] - top[m][h]) * c > GROWTH;
            }
        if (__any_sync(~0u, grown)) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float high = fmaxf(top[m][h], peak[m][h]);
                    const float correction = high == NEG_INF ? 1.f : exp2_fast((top[m][h] - high) * c);
                    top[m][h] = high;
                    total[m][h] *= correction;
#pragma unroll
                    for (int n = 0; n < HEAD_DIM / 8; ++n) sum[m][n][2 * h] *= correction, sum[m][n][2 * h + 1] *= correction;
                }
        }
        stage ^= K_BYTES;
        if (j + KEYS < end) {
            if (!KEYS_IN_FLIGHT) fetch_keys(j + KEYS, stage);
            if (!KEYS_IN_FLIGHT) finish<KEYS>(k_copies, k_tiles + stage);
            fetch_values(j + KEYS, stage);
            if (!VALUES_IN_FLIGHT) finish<KEYS>(v_copies, v_tiles + stage);
        }
        float base[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) base[m][h] = top[m][h] == NEG_INF ? 0.f : -top[m][h] * c;
        // 16 keys at a time: the exponentials of the next keys overlap with the products of these
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 p[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    float& y = x[m][n + e / 4][e % 4];
                    y = exp2_fast(fmaf(y, c, base[m][e / 2 % 2]));
                    total[m][e / 2 % 2] += y;
                }
                dropout_and_pack(scalar(), p[m], x[m][n], x[m][n + 1], a, s, head, i + 16 * m,
                              j + 8 * n + lane % 4 * 2);
            }
            add_values(sum, x, n, p, v_lane);
        }
        if (VALUES_IN_FLIGHT && j + KEYS < end) finish<KEYS>(v_copies, v_tiles + stage);
    }

    // the output is staged in the warp's own rows of the Q tile
    const long long first_query = sequence_at(a, opaque(s.number)).first_query + first;
    const float sink = a.sink ? a.sink[head] * LOG2E : NEG_INF;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float all = total[m][h] + __shfl_xor_sync(~0u, total[m][h], 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const float high = all > 0.f ? top[m][h] * c : NEG_INF, peak = fmaxf(high, sink);
            const float correction = all > 0.f ? exp2_fast(high - peak) : 0.f;
            all = peak == NEG_INF ? 0.f : all * correction + exp2_fast(sink - peak);
            const float factor = all > 0.f ? correction / all * a.keep_scale : 0.f;
            const int row = own + lane / 4 + 16 * m + 8 * h;
            if (lane % 4 == 0 && first + row < s.queries)
                lse[s.number * a.lse_batch + head * a.lse_head + first_query + row] = LN2 * peak + logf(all);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) sum[m][n][2 * h] *= factor, sum[m][n][2 * h + 1] *= factor;
        }
        stage_rows(scalar(), q_tile, own + 16 * m, sum[m]);
    }
    __syncwarp();
    scalar* rows = out + s.number * a.out.batch + first_query * a.out.row + head * a.out.head;
    if (TF32) {
#pragma unroll
        for (int m = 0; m < M; ++m)
            store_floats(rows + (own + 16 * m) * a.out.row, a, s.queries - first - own - 16 * m, sum[m]);
        return;
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
        for (int r = 0; r < 4 * M; ++r) {
            const int row = own + 4 * r + lane / 8, column = 64 * slab + lane % 8 * 8;
            if (first + row < s.queries && column < a.value_dim)
                *(uint4*)(rows + row * a.out.row + column) = load_shared_uint4(chunk_address<ROWS>(q_tile, row, column / 8));
        }
}
