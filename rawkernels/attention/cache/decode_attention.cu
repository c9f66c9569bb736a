// Attention of a few new tokens over a key-value cache, on tensor cores: blocks split the keys, warps split a block's keys.
// A block takes up to 64 query rows of one KV head: (sharer, token, head of the group), flattened. Keys and values are
// loaded in stages of KEYS rows by cp.async, with STAGES - 1 of them in flight. Warp w multiplies the 16 rows of tile
// w % tiles with every (4 / tiles)-th group of 16 keys of a stage, and keeps its own maximum, sum and output until the end.
// Constants: scalar = f16, bf16; HEAD_DIM = 64 (both head sizes rounded up); STAGES = 4
// Constants: scalar = f16, bf16; HEAD_DIM = 128; STAGES = 3, 2 (2 if a block has less than 100 KiB)
// Constants: scalar = f16, bf16; HEAD_DIM = 256; STAGES = 3
// Constants below sm_80: scalar = f16; HEAD_DIM = 64, 128, 256; STAGES = 3
// Launch:    grid = (KV heads * ceil(rows / 64) * splits * sequences,), block = (128,),
//            shared = STAGES * 2 * TILE bytes
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/cache/decode.cuh"
#include "common/mma.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "decode_attention.cu: HEAD_DIM is 64, 128 or 256");
constexpr int THREADS = 128, WARPS = 4, ROWS = 64;
#if __CUDA_ARCH__ >= 800
constexpr int KEYS = HEAD_DIM == 256 ? 32 : 64;
#else
constexpr int KEYS = HEAD_DIM == 256 ? 16 : HEAD_DIM == 128 ? 32 : 64;  // a block has 64 KiB of shared memory
#endif
constexpr int TILE = KEYS * HEAD_DIM * 2;   // bytes of a stage's keys, or of its values
constexpr int CHUNKS = HEAD_DIM / 8;        // chunks of 16 bytes in a row
#if __CUDA_ARCH__ >= 800
constexpr int MERGED = HEAD_DIM;            // columns that warps merge at a time, in the shared memory of the tiles
#else
constexpr int MERGED = HEAD_DIM == 256 ? 128 : HEAD_DIM;
#endif
constexpr int PITCH = MERGED + 8;           // floats from row to row when warps merge; avoids bank conflicts
constexpr int WIDE = HEAD_DIM == 256 ? 1 : 2;  // groups of 16 keys that a warp processes at once, if it has several
constexpr long long NOWHERE = 1ll << 62;
static_assert(WARPS * 16 * PITCH * 4 <= STAGES * 2 * TILE, "decode_attention.cu: what warps merge does not fit in the tiles");

// A warp's 16 rows. A lane holds elements of rows lane / 4 and lane / 4 + 8.
struct Rows {
    u32 q[HEAD_DIM / 16][4];
    int at[2];            // the keys at their positions
    float slope[2];
    float top[2], sum[2], o[CHUNKS][4];
};

// Attends to 16 * N keys of a stage, from its row `key` on, which is key j of the sequence.
template <int N>
__device__ __forceinline__ void attend(Rows& r, const Decode& a, u32 k_lane, u32 v_lane, int key, int j, int last) {
    const int quarter = threadIdx.x % 4;
    float x[2 * N][4] = {}, peak[2] = {NEG_INF, NEG_INF};
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            u32 b[4];
            ldmatrix(b, offset_address<KEYS>(k_lane, key + 16 * n, 16 * step));
            mma_pair(x[2 * n], x[2 * n + 1], r.q[step], b);
        }
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) {
        const int half = i / 2 % 2, column = i / 4 * 8 + 2 * quarter + i % 2, back = r.at[half] - j - column;
        float& value = x[i / 4][i % 4];
        value = scaled_logit(a, value) - r.slope[half] * back;
        value = back < 0 || back > a.window || j + column >= last ? NEG_INF : value;
        peak[half] = fmaxf(peak[half], value);
    }
    bool higher = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        peak[half] = fmaxf(peak[half], __shfl_xor_sync(~0u, peak[half], 1));
        peak[half] = fmaxf(peak[half], __shfl_xor_sync(~0u, peak[half], 2));
        higher |= peak[half] > r.top[half];
    }
    if (__any_sync(~0u, higher)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float new_top = fmaxf(r.top[half], peak[half]);
            const float correction = exp2_fast(r.top[half] - finite_or_zero(new_top));
            r.top[half] = new_top;
            r.sum[half] *= correction;
#pragma unroll
            for (int n = 0; n < CHUNKS; ++n) r.o[n][2 * half] *= correction, r.o[n][2 * half + 1] *= correction;
        }
    }
    const float base[2] = {finite_or_zero(r.top[0]), finite_or_zero(r.top[1])};
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) {
        float& value = x[i / 4][i % 4];
        value = exp2_fast(value - base[i / 2 % 2]);
        r.sum[i / 2 % 2] += value;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        u32 p[4];
        pack(p, x[2 * n], x[2 * n + 1]);
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 2) {
            u32 b[4];
            ldmatrix_transposed(b, offset_address<KEYS>(v_lane, key + 16 * n, 8 * c));
            mma_pair(r.o[c], r.o[c + 1], p, b);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) decode_attention(
    const Decode a,
    const scalar* __restrict__ q,         // (B, T, H, D) by strides
    const scalar* __restrict__ k,         // (N, S, Hk, D) or (pages, page, Hk, D) by strides
    const scalar* __restrict__ v,
    scalar* __restrict__ out,             // (B, T, H, Dv); with one split
    float* __restrict__ lse,              // (B, H, T); with one split
    float* __restrict__ parts,            // (splits, B, T, H, Dv)
    float* __restrict__ parts_lse) {      // (splits, B, T, H)
    __shared__ Spot spots[STAGES][KEYS];
    __shared__ float tops[WARPS][16], sums[WARPS][16];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quarter = lane % 4;
    const Work w = work_at<ROWS>(a);
    if (w.first == w.last && w.split > 0) {
        if (thread < w.rows) store_lse(a, w, query_at(a, w, thread), NEG_INF, lse, parts_lse);
        return;
    }

    // ---- the pipeline: the addresses of keys are looked up one stage before they are loaded
    const u32 tiles_at = shared_tiles();
    const int chunk = thread % CHUNKS, chunk_row = thread / CHUNKS;
    const bool k_inside = 8 * chunk < a.head_dim, v_inside = 8 * chunk < a.value_dim;
    auto look_up = [&](int stage) {
        const int j = w.first + stage * KEYS + thread;
        return thread < KEYS && j < w.last ? outer_index(a, w.number, j) : -1;
    };
    auto note = [&](int stage, int outer) {
        const int j = w.first + stage * KEYS + thread;
        if (thread < KEYS)
            spots[stage % STAGES][thread] = outer < 0 ? Spot{NOWHERE, NOWHERE} : spot_at(a, outer, j, w.kv_head);
    };
    auto load = [&](int stage) {
        const int place = stage % STAGES;
        const u32 k_tile = tiles_at + place * 2 * TILE, v_tile = k_tile + TILE;
#pragma unroll(HEAD_DIM < 256 ? 8 : BY_REGISTERS ? 1 : 2)
        for (int row = 0; row < KEYS; row += THREADS / CHUNKS) {
            const Spot spot = spots[place][row + chunk_row];
            const bool there = spot.k != NOWHERE;
            cp_async(chunk_address<KEYS>(k_tile, row + chunk_row, chunk),
                     k + (there && k_inside ? spot.k + 8 * chunk : 0), there && k_inside);
            cp_async(chunk_address<KEYS>(v_tile, row + chunk_row, chunk),
                     v + (there && v_inside ? spot.v + 8 * chunk : 0), there && v_inside);
        }
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) note(stage, look_up(stage));
    __syncthreads();
    const int stages = (w.last - w.first + KEYS - 1) / KEYS;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < stages) load(stage);
        cp_async_commit();
    }

    // ---- this warp's rows: fragments of q, positions of rows lane / 4 and lane / 4 + 8
    const int tiles = w.rows > 32 ? 4 : w.rows > 16 ? 2 : 1, groups = WARPS / tiles;
    const int tile = warp % tiles, group = warp / tiles;
    Rows r = {};
    r.top[0] = r.top[1] = NEG_INF;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + lane / 4 + 8 * half;
        const Query query = query_at(a, w, row < w.rows ? row : 0);
        const scalar* q_row = q + query.batch * a.q.batch + query.token * a.q.row + query.head * a.q.head;
        r.at[half] = query.at;
        r.slope[half] = slope_of(a, query);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int column = 16 * step + 8 * part + 2 * quarter;
                const bool there = row < w.rows && column < a.head_dim;
                r.q[step][half + 2 * part] = there ? *(const u32*)(q_row + column) : 0;
            }
    }

    const u32 k_lane = lane_address_swapped(tiles_at), v_lane = lane_address(tiles_at + TILE);
    const int stride = 16 * groups;
    for (int stage = 0; stage < stages; ++stage) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is complete, and the previous one has been read
        if (stage + STAGES - 1 < stages) load(stage + STAGES - 1);
        cp_async_commit();
        const int next = look_up(stage + STAGES);
        const u32 here = stage % STAGES * 2 * TILE;
        const int first = w.first + stage * KEYS;
        if (16 * tile < w.rows) {
            if (WIDE > 1 && groups <= KEYS / 16 / WIDE) {
                for (int key = 16 * WIDE * group; key < KEYS && first + key < w.last; key += WIDE * stride)
                    attend<WIDE>(r, a, k_lane + here, v_lane + here, key, first + key, w.last);
            } else {
                for (int key = 16 * group; key < KEYS && first + key < w.last; key += stride)
                    attend<1>(r, a, k_lane + here, v_lane + here, key, first + key, w.last);
            }
        }
        note(stage + STAGES, next);
    }

    // ---- merge the warps that took different keys of the same rows, in the shared memory of the tiles
    cp_async_wait<0>();
    __syncthreads();
    extern __shared__ __align__(128) float merged[];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        r.sum[half] += __shfl_xor_sync(~0u, r.sum[half], 1);
        r.sum[half] += __shfl_xor_sync(~0u, r.sum[half], 2);
        if (quarter == 0) tops[warp][row] = r.top[half], sums[warp][row] = r.sum[half];
        float* o_row = merged + (16 * warp + row) * PITCH + 2 * quarter;
#pragma unroll
        for (int n = 0; n < MERGED / 8; ++n) *(float2*)(o_row + 8 * n) = {r.o[n][2 * half], r.o[n][2 * half + 1]};
    }
    __syncthreads();
#pragma unroll
    for (int from = 0; from < HEAD_DIM; from += MERGED) {
        if (from > 0) {
            __syncthreads();  // the columns before have been read
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* o_row = merged + (16 * warp + lane / 4 + 8 * half) * PITCH + 2 * quarter;
                const auto* o = r.o + from / 8;
#pragma unroll
                for (int n = 0; n < MERGED / 8; ++n) *(float2*)(o_row + 8 * n) = {o[n][2 * half], o[n][2 * half + 1]};
            }
            __syncthreads();
        }
        for (int row = warp; row < w.rows; row += WARPS) {
            const Query query = query_at(a, w, row);
            const int mine = row / 16, inside = row % 16;  // tile, row in the tile; its group g is warp mine + g * tiles
            const float sink = sink_of(a, w, query);
            float peak = sink, weights[WARPS] = {};
            for (int g = 0; g < groups; ++g) peak = fmaxf(peak, tops[mine + g * tiles][inside]);
            const float base = finite_or_zero(peak);
            float total = exp2_fast(sink - base);
#pragma unroll
            for (int g = 0; g < WARPS; ++g)
                if (g < groups) {
                    weights[g] = exp2_fast(tops[mine + g * tiles][inside] - base);
                    total += weights[g] * sums[mine + g * tiles][inside];
                }
            const float factor = total == 0.f ? 0.f : 1.f / total;
            for (int column = lane; column < (MERGED < HEAD_DIM ? min(MERGED, a.value_dim - from) : a.value_dim);
                 column += 32) {
                float y = 0.f;
#pragma unroll
                for (int g = 0; g < WARPS; ++g)
                    if (g < groups) y += weights[g] * merged[(16 * (mine + g * tiles) + inside) * PITCH + column];
                store_value(a, w, query, from + column, y * factor, out, parts);
            }
            if (from == 0 && lane == 0) store_lse(a, w, query, (base + log2f(total)) * LN2, lse, parts_lse);
        }
    }
}
