// The gradient of attention in float32 on CUDA cores with five products instead of seven: delta, then dk and dv by key tiles,
// which also add their part of dq to global memory. Notes: notes/cuda-cores.md.
// Constants: scalar = float; HEAD_DIM = 64, 128; EXTRAS = false, true
//   (both head sizes rounded up; EXTRAS: softcap, bias without a gradient, slopes or dropout)
// Launch:    rows: grid = (max(1, ceil(rows * heads / 4)),), block = (128,), one warp per row and head
//            whole: grid = (ceil(longest keys / OWN) * KV heads * sequences,), block = (THREADS,), shared = SHARED_BYTES
// Arch: sm_90 sm_100 sm_103
#include "attention/common/attention_backward_simt.cuh"

// The weights of dq, dS of all keys of the block and all queries of a tile, are in shared memory as the sum of dk reads them.
// A warp computes dq of 32 queries (a lane: 2 N) and 32 columns (a lane: 4) over the keys of a part.
constexpr int HOLDERS = 8 * SPLIT, COLUMNS = HEAD_DIM / 32, PARTS = 4 / COLUMNS;
constexpr bool IN_DOUT = SPLIT > 1;  // they take the place of dout's tile
constexpr int EXCHANGED = PARTS > 1 ? THREADS * N * 4 : 0;
constexpr int SHARED_BYTES = 4 * (2 * (OWN + STEP) * PITCH + WEIGHTS + EXCHANGED);
static_assert(N == 4 && R % 4 == 0 && (PARTS == 1 || PARTS == 2), "flash_attention_backward_simt_whole.cu: HEAD_DIM is 64 or 128");
static_assert(4 * HOLDERS * HOLDER <= (IN_DOUT ? STEP * PITCH : WEIGHTS), "flash_attention_backward_simt_whole.cu: dS has no room");

// delta, zeros for dq, and zeros for `turns`.
extern "C" __global__ void __launch_bounds__(128) flash_attention_whole_rows(
    const Attention a,
    const scalar* __restrict__ out,   // (rows, H, Dv) by strides
    const scalar* __restrict__ dout,  // (rows, H, Dv) by strides
    const float* __restrict__ dlse,   // like delta, or null
    float* __restrict__ delta,        // (B, H, T), or (H, tokens)
    float* __restrict__ dq,           // (rows, H, D) by strides
    int* __restrict__ turns,          // (count,)
    long long rows,                   // B * T, or tokens
    int count) {
    for (long long e = blockIdx.x * 128LL + threadIdx.x; e < count; e += gridDim.x * 128LL) turns[e] = 0;
    DeltaRow row;
    if (!write_delta(a, out, dout, dlse, delta, rows, &row)) return;
    dq += row.number * a.dq.batch + row.at * a.dq.row + row.head * a.dq.head;
    for (int c = threadIdx.x % 32; c < a.head_dim; c += 32) dq[c * a.dq.column] = 0.f;
}

// What a lane has of dq: sum[x][n] is for query `query` + 8 n of the tile, x = 1: 4 further in part 0, 4 before in part 1.
struct QueryLane {
    int warp, part, group, query, column;
    // `thread` is opaque: the lane's numbers occupy no registers during the other products
    __device__ explicit QueryLane(int thread) {
        const int across = (thread & 1) | (thread >> 1 & 6), down = (thread >> 1 & 1) | (thread >> 3 & 2);
        warp = thread / 32, part = PARTS == 1 ? 0 : warp / COLUMNS, group = PARTS == 1 ? warp / COLUMNS : 0;
        query = group * 8 * N + down + 4 * part;
        column = warp % COLUMNS * 32 + 4 * across;
    }
};

// sum = dS^T K over the keys of the lane's part. `weights`: as add_product stored them.
__device__ inline void multiply_queries(const QueryLane& lane, const float* weights, const float* keys, float (&sum)[2][N][4]) {
    constexpr int GROUPS = 4 / PARTS;  // of 4 R keys
    const float* from = weights + (lane.part * GROUPS * HOLDERS + lane.query - lane.group * (8 * N - 8)) * HOLDER;
    const float* rows = keys + lane.part * GROUPS * 4 * R * PITCH + lane.column;
    const float* other = from + (lane.part == 0 ? 4 : -4) * HOLDER;
#pragma unroll
    for (int e = 0; e < 8 * N; ++e) sum[e / 4 / N][e / 4 % N][e % 4] = 0.f;
    float4 weight[2 * N], first;  // of the next four keys
    const auto load = [&](int ahead, int row) {
        first = *(const float4*)(rows + row * PITCH);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            weight[n] = *(const float4*)(from + n * 4 * R + ahead);
            weight[N + n] = *(const float4*)(other + n * 4 * R + ahead);
        }
    };
#pragma unroll 1
    for (int group = 0; group < GROUPS; ++group) {
        load(0, 0);
#pragma unroll 1
        for (int down = 0; down < 4; ++down, from += R, other += R, rows += PITCH) {  // R keys, 4 apart
#pragma unroll
            for (int r = 0; r < R; r += 4) {
                float4 now[2 * N], y[4] = {first};
#pragma unroll
                for (int e = 1; e < 4; ++e) y[e] = *(const float4*)(rows + 4 * (r + e) * PITCH);
#pragma unroll
                for (int m = 0; m < 2 * N; ++m) now[m] = weight[m];
                load(r + 4, r + 4 < R ? 4 * (r + 4) : 1);  // at the end of a group in vain
#pragma unroll
                for (int e = 0; e < 4; ++e) {
#pragma unroll
                    for (int m = 0; m < 2 * N; ++m) {
                        const float w = e == 0 ? now[m].x : e == 1 ? now[m].y : e == 2 ? now[m].z : now[m].w;
                        float(&to)[4] = sum[m / N][m % N];
                        to[0] += w * y[e].x;
                        to[1] += w * y[e].y;
                        to[2] += w * y[e].z;
                        to[3] += w * y[e].w;
                    }
                }
            }
        }
        from += HOLDERS * HOLDER - 4 * R, other += HOLDERS * HOLDER - 4 * R, rows += (4 * R - 4) * PITCH;
    }
}

// Gives the other part's warp the sums of x = 1, which are its x = 0, and adds what it gives.
__device__ inline void exchange(int thread, int warp, float* shared, float (&sum)[2][N][4]) {
    float4* to = (float4*)shared + warp * (32 * N) + thread % 32;
    const float4* from = (const float4*)shared + (warp ^ COLUMNS) * (32 * N) + thread % 32;
#pragma unroll
    for (int n = 0; n < N; ++n) to[32 * n] = make_float4(sum[1][n][0], sum[1][n][1], sum[1][n][2], sum[1][n][3]);
    bar_sync(1 + warp % COLUMNS, 64);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float4 y = from[32 * n];
        sum[0][n][0] += y.x, sum[0][n][1] += y.y, sum[0][n][2] += y.z, sum[0][n][3] += y.w;
    }
}

// dq += scale * sum. `dq`: the lane's query of n = 0; `count`: queries from it to the end.
__device__ inline void add_queries(const Attention& a, const QueryLane& lane, float* dq, int count, const float (&sum)[2][N][4]) {
    const size_t aligned = (size_t)dq | (a.dq.row | a.head_dim) * sizeof(float);
    const bool by_four = a.dq.column == 1 && aligned % 16 == 0;
    dq += lane.column * a.dq.column;
#pragma unroll
    for (int e = 0; e < 2 * N / PARTS; ++e, dq += 4 * PARTS * a.dq.row) {
        const float(&x)[4] = PARTS == 1 ? sum[e % 2][e / 2] : sum[0][e];
        if (4 * PARTS * e >= count) break;
        if (!by_four) {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (lane.column + c < a.head_dim) atomicAdd(dq + c * a.dq.column, x[c] * a.scale);
        } else if (lane.column < a.head_dim) {
            add_global(dq, x[0] * a.scale, x[1] * a.scale, x[2] * a.scale, x[3] * a.scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2 / SPLIT) flash_attention_whole(
    const Attention a,
    const scalar* __restrict__ q,         // (B, T, H, D), or (tokens, H, D) with cu_q, by strides
    const scalar* __restrict__ k,         // (B, S, Hk, D)
    const scalar* __restrict__ v,         // (B, S, Hk, Dv)
    const scalar* __restrict__ dout,      // (B, T, H, Dv)
    const float* __restrict__ lse,        // (B, H, T)
    const float* __restrict__ delta,      // (B, H, T)
    float* dq,                            // (B, T, H, D) of zeros
    scalar* __restrict__ dk,              // (B, S, Hk, D)
    scalar* __restrict__ dv,              // (B, S, Hk, Dv)
    int* turns) {                         // zeros: the next block; how many tiles are in dq, (B, H, query tiles)
    extern __shared__ __align__(16) float k_tile[];
    float* v_tile = k_tile + OWN * PITCH;
    float* q_tile = v_tile + OWN * PITCH;
    float* dout_tile = q_tile + STEP * PITCH;
    float* weights = dout_tile + STEP * PITCH;
    float* ds_weights = IN_DOUT ? dout_tile : weights;

    // blocks take tiles in the order in which they start: those that a block waits for have started before
    __shared__ int taken;
    if (threadIdx.x == 0) taken = atomicAdd(turns, 1);
    __syncthreads();
    const Place place = place_at(a, a.keys, OWN, a.heads / a.group, taken);
    const Sequence s = sequence_at(a, place.number);
    const int kv_head = place.head, first = place.tile * OWN;
    if (first >= s.key_rows) return;
    const int own = lane_own(), j = first + own;  // this lane's keys are j + 4r

    const QueryRange range = queries_of(a, s, first);
    const int begin = range.begin, end = range.end;
    load_tile<OWN>(k_tile, rows_of(k, a.k, s.number, s.first_key + first, kv_head), a.k, s.keys - first, a.head_dim);
    load_tile<OWN>(v_tile, rows_of(v, a.v, s.number, s.first_key + first, kv_head), a.v, s.keys - first, a.value_dim);

    // From the last query tile, which all tiles of keys that run together see under a causal mask, to the first; all heads of
    // the group for each: no tile waits long for those before it, whose parts of dq come first.
    int i = begin + (max(0, end - begin + STEP - 1) / STEP - 1) * STEP, member = 0;  // of the group; no queries: i < begin
    const auto load_queries = [&](int i, int member) {
        const scalar* rows = rows_of(q, a.q, s.number, s.first_query + i, kv_head * a.group + member);
        load_tile<STEP>(q_tile, rows, a.q, s.queries - i, a.head_dim);
    };
    const auto turn_of = [&](int i, int member) {
        const int tiles = (a.queries + STEP - 1) / STEP, head = kv_head * a.group + member;
        return turns + 1 + ((long long)s.number * a.heads + head) * tiles + i / STEP;
    };
    const auto end_turn = [&](int i, int member) {  // of the step before this one, whose parts of dq all threads have added
        if (threadIdx.x == 0)
            increment_release(member > 0 ? turn_of(i, member - 1) : turn_of(i + STEP, a.group - 1));
    };
    const bool any = i >= begin;
    if (any) load_queries(i, 0);

    float dk_sum[R][WIDTH] = {}, dv_sum[R][WIDTH] = {};
#pragma unroll 1
    for (bool later = false; i >= begin; later = true) {
        const int head = kv_head * a.group + member;
        tiles_ready();
        if (later) end_turn(i, member);
        load_tile<STEP>(dout_tile, rows_of(dout, a.dout, s.number, s.first_query + i, head), a.dout, s.queries - i, a.value_dim);

        const Position<true> at = {i + lane_step(), j};
        float p[R][N], ds[R][N];
        multiply(k_tile + own * PITCH, q_tile + lane_step() * PITCH, p);
        tiles_ready();
        multiply(v_tile + own * PITCH, dout_tile + lane_step() * PITCH, ds);
        const bool unmasked = i >= range.unmasked_begin && i + STEP <= range.unmasked_end;
        gradient_weights(a, s, head, at, unmasked, lse, delta, p, ds);
        add_product(p, weights, dout_tile, dv_sum);
        if (IN_DOUT) __syncthreads();
        add_product<HOLDERS>(ds, ds_weights, q_tile, dk_sum);
        __syncthreads();
        const bool wraps = member + 1 == a.group;
        const int next = wraps ? i - STEP : i, next_member = wraps ? 0 : member + 1;
        if (next >= begin) load_queries(next, next_member);

        const int thread = opaque((int)threadIdx.x);
        const QueryLane lane(thread);
        float dq_sum[2][N][4];
        multiply_queries(lane, ds_weights, k_tile, dq_sum);
        if constexpr (PARTS > 1) exchange(thread, lane.warp, weights + WEIGHTS, dq_sum);
        // before this tile come those from the first one that queries of this step see
        if (thread % 32 == 0) wait_for_count(turn_of(i, member), place.tile - max(0, i + s.offset - a.left) / OWN);
        __syncwarp();
        const int query = i + lane.query;
        float* row = dq + s.number * a.dq.batch + (s.first_query + query) * a.dq.row + head * a.dq.head;
        add_queries(a, lane, row, s.queries - query, dq_sum);
        i = next, member = next_member;
    }
    if (any) {
        __syncthreads();
        end_turn(i, member);
    }

    store_keys(a, s.number, kv_head, j, dk, dv, dk_sum, dv_sum);
}
