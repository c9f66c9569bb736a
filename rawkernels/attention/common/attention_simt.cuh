#pragma once
// Shared by the attention kernels on CUDA cores: tiles in shared memory, products of tiles in registers, logits, dropout.
// The including file has R and N: the rows and columns of a lane's products; SPLIT: the warps that have the same rows; HELD.
//
// A block of 4 SPLIT warps owns some rows (queries, or keys in the gradient of k and v) and loops over the rows of the other
// side tile by tile. SPLIT warps have the same 4 R of the block's rows, and each has 8 N rows of a tile and HEAD_DIM / SPLIT
// columns of a sum. The lanes of a warp form a 4 x 8 grid with coordinates (down, across).
// A lane holds x[r][n], the product of row down + 4r of the warp and row across + 8n of its part of the tile, and sum[r][..],
// columns 4 across + 32c .. + 3 of row down + 4r of a weighted sum of the tile's rows.
#include "attention/common/attention_dropout.cuh"
#include "common/barrier.cuh"
#include "common/compiler.cuh"
#include "common/math.cuh"
#include "common/pack.cuh"

constexpr int THREADS = 128 * SPLIT;
constexpr int OWN = 16 * R, STEP = 8 * N * SPLIT;  // rows of a block, rows of a tile of the other side
constexpr int PITCH = HEAD_DIM + 4;                // floats from row to row of a tile; avoids bank conflicts
constexpr int WIDTH = HEAD_DIM / 8 / SPLIT;        // columns of a lane

// The weights of a weighted sum go from the lanes that hold them to the others through shared memory: those of HELD of the 8
// SPLIT columns of lanes at a time. HELD = 0: through shuffles, where shared memory is short.
constexpr int HOLDER = N * 4 * R + 4;       // floats of a column of lanes; 4 more avoid bank conflicts
constexpr int WEIGHTS = 4 * HELD * HOLDER;  // floats of the block
static_assert(R * N <= 64, "attention_simt.cuh: dropout has a bit for each of a lane's products");
static_assert(HELD ? 8 * SPLIT % HELD == 0 : SPLIT == 1, "attention_simt.cuh: HELD divides 8 SPLIT; shuffles reach one warp");

// A 16-byte load from shared memory takes two cycles per warp instead of four if lanes 1 apart or lanes 2 apart read the same
// address. Therefore across has lane bits 0, 2, 3 and down has bits 1, 4.
__device__ inline int lane_at(int down, int across) {
    return (across & 1) | (down & 1) << 1 | (across & 6) << 1 | (down & 2) << 3;
}
__device__ inline int lane_across() { return (threadIdx.x & 1) | (threadIdx.x >> 1 & 6); }
__device__ inline int lane_down() { return (threadIdx.x >> 1 & 1) | (threadIdx.x >> 3 & 2); }
// The lane's first row of the block's rows, and of a tile.
__device__ inline int lane_own() { return threadIdx.x / (32 * SPLIT) * 4 * R + lane_down(); }
__device__ inline int lane_part() { return threadIdx.x / 32 % SPLIT; }
__device__ inline int lane_step() { return lane_part() * 8 * N + lane_across(); }
__device__ inline int lane_column() { return lane_part() * (HEAD_DIM / SPLIT) + 4 * lane_across(); }

// Returns the reduction of `value` over the lanes of a row.
template <typename Op>
__device__ inline float row_reduce(float value, Op op) {
    value = op(value, __shfl_xor_sync(~0u, value, lane_at(0, 1)));
    value = op(value, __shfl_xor_sync(~0u, value, lane_at(0, 2)));
    return op(value, __shfl_xor_sync(~0u, value, lane_at(0, 4)));
}

// The block's tile of `rows` rows, its head and its sequence; sequences have at most `limit` rows. With a causal mask tiles
// differ in work: then tile 0 of all heads comes first. Else the tiles of a head are neighbours, which read the same.
struct Place { int tile, head, number; };

__device__ inline Place place_at(const Attention& a, int limit, int rows, int heads, int block) {
    const int tiles = (limit + rows - 1) / rows, pairs = gridDim.x / tiles;
    const bool unequal = a.right < a.keys;
    const int tile = unequal ? block / pairs : block % tiles, rest = unequal ? block % pairs : block / tiles;
    return {tile, rest % heads, rest / heads};
}
__device__ inline Place place_at(const Attention& a, int limit, int rows, int heads) {
    return place_at(a, limit, rows, heads, blockIdx.x);
}

// Copies `count` rows (at most ROWS) of `width` columns and fills the rest of the tile with zeros. Read it after tiles_ready().
template <int ROWS>
__device__ inline void load_tile(float* tile, const scalar* rows, const Strides& s, int count, int width) {
    constexpr int APART = THREADS / (HEAD_DIM / 4);  // a thread copies four columns of every APART-th row
    struct alignas(4 * sizeof(scalar)) Four { scalar x, y, z, w; };
    const int first = threadIdx.x / (HEAD_DIM / 4), c = threadIdx.x % (HEAD_DIM / 4) * 4;
    const scalar* from = rows + first * s.row + c * s.column;
    float* to = tile + first * PITCH + c;
    long long step = APART * s.row;
    step = opaque(step);  // otherwise its multiples are kept in registers around the loop
    const size_t aligned = (size_t)rows | s.row * sizeof(scalar) | width * sizeof(scalar);
    if (s.column == 1 && aligned % sizeof(Four) == 0) {
#pragma unroll 4
        for (int r = 0; r < ROWS; r += APART, from += step) {
            const bool there = first + r < count && c < width;
            if constexpr (sizeof(scalar) == 4) {
                cp_async((u32)__cvta_generic_to_shared(to + r * PITCH), from, there);
            } else {
                Four x = {(scalar)0.f, (scalar)0.f, (scalar)0.f, (scalar)0.f};
                if (there) x = *(const Four*)from;
                *(float4*)(to + r * PITCH) = make_float4((float)x.x, (float)x.y, (float)x.z, (float)x.w);
            }
        }
    } else {
#pragma unroll 1
        for (int r = 0; r < ROWS; r += APART, from += step)
            for (int e = 0; e < 4; ++e)
                to[r * PITCH + e] = first + r < count && c + e < width ? (float)from[e * s.column] : 0.f;
    }
}
// Waits for the tiles that the block loads; all its threads have finished what they did before.
__device__ inline void tiles_ready() {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
}

// x[r][n] = dot product of rows; `own` and `tile` are this lane's first rows. Columns 4 further are on their way to registers:
// a row's padding at the end.
__device__ inline void multiply(const float* own, const float* tile, float (&x)[R][N]) {
    constexpr int AHEAD = R < 2 ? R : 2;
    constexpr int UNROLL = HELD && !EXTRAS && __CUDA_ARCH__ < 1000 ? 2 : 1;  // elsewhere registers are short
    float4 z[R], y[N];
    const auto load_own = [&](int begin, int end) {
#pragma unroll
        for (int r = begin; r < end; ++r) z[r] = *(const float4*)(own + 4 * r * PITCH);
    };
    const auto load_other = [&] {
#pragma unroll
        for (int n = 0; n < N; ++n) y[n] = *(const float4*)(tile + 8 * n * PITCH);
    };
#pragma unroll
    for (int e = 0; e < R * N; ++e) x[e / N][e % N] = 0.f;
    load_other();
    load_own(0, AHEAD);
#pragma unroll UNROLL
    for (int d = 0; d < HEAD_DIM; d += 4) {
        load_own(AHEAD, R);
#pragma unroll
        for (int e = 0; e < R * N; ++e) {
            const int r = e / N, n = e % N;
            x[r][n] += z[r].x * y[n].x;
            x[r][n] += z[r].y * y[n].y;
            x[r][n] += z[r].z * y[n].z;
            x[r][n] += z[r].w * y[n].w;
        }
        own += 4, tile += 4;
        load_other();
        load_own(0, AHEAD);
    }
}

// Waits for the warps that have the same rows.
__device__ inline void sync_rows() {
    if constexpr (SPLIT == 1) __syncwarp();
    else bar_sync(1 + threadIdx.x / (32 * SPLIT), 32 * SPLIT);
}

// sum += weights x tile. `shared`: 4 TOGETHER HOLDER floats of the block, for the weights of TOGETHER of the 8 SPLIT columns of
// lanes at a time.
template <int TOGETHER = HELD ? HELD : 8>
__device__ inline void add_product(const float (&weights)[R][N], float* shared, const float* tile, float (&sum)[R][WIDTH]) {
    constexpr int ACROSS = TOGETHER < 8 ? TOGETHER : 8;
    const float* columns = tile + lane_column();
    shared += threadIdx.x / (32 * SPLIT) * (TOGETHER * HOLDER) + lane_down() * R;
#pragma unroll 1
    for (int first = 0; first < 8 * SPLIT; first += ACROSS) {
        if (HELD > 0 && first % TOGETHER == 0) {
            const int mine = lane_part() * 8 + lane_across() - first;
            sync_rows();  // the last weights may still be read
            if (TOGETHER == 8 * SPLIT || (unsigned int)mine < TOGETHER)
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    Pack<float, R> pack;
#pragma unroll
                    for (int r = 0; r < R; ++r) pack.x[r] = weights[r][n];
                    *(Pack<float, R>*)(shared + mine * HOLDER + n * 4 * R) = pack;
                }
            sync_rows();
        }
        const float *from = shared + first % TOGETHER * HOLDER, *rows = columns + (first / 8 * 8 * N + first % 8) * PITCH;
#pragma unroll 1
        for (int across = 0; across < ACROSS; ++across, from += HOLDER, rows += PITCH) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                Pack<float, R> weight;
                if constexpr (HELD > 0) {
                    weight = *(const Pack<float, R>*)(from + n * 4 * R);
                } else {
#pragma unroll
                    for (int r = 0; r < R; ++r) weight.x[r] = __shfl_sync(~0u, weights[r][n], lane_at(lane_down(), across));
                }
#pragma unroll
                for (int c = 0; c < WIDTH; c += 4) {
                    const float4 y = *(const float4*)(rows + 8 * n * PITCH + 8 * c);
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        sum[r][c] += weight.x[r] * y.x;
                        sum[r][c + 1] += weight.x[r] * y.y;
                        sum[r][c + 2] += weight.x[r] * y.z;
                        sum[r][c + 3] += weight.x[r] * y.w;
                    }
                }
            }
        }
    }
}

__device__ inline void store_row(scalar* row, long long column_stride, int width, float factor,
                                 const float (&sum)[WIDTH]) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const int column = lane_column() + 8 * (e / 4 * 4) + e % 4;
        if (column < width) row[column * column_stride] = (scalar)(sum[e] * factor);
    }
}

// The query and key of x[r][n], from those of x[0][0]. KEYS_DOWN: the block owns keys and loops over queries.
template <bool KEYS_DOWN>
struct Position {
    int i, j;
    __device__ int query(int r, int n) const { return i + (KEYS_DOWN ? 8 * n : 4 * r); }
    __device__ int key(int r, int n) const { return j + (KEYS_DOWN ? 4 * r : 8 * n); }
};

template <typename T> __device__ inline float add_bias(float x, T bias) { return x + (float)bias; }
__device__ inline float add_bias(float x, bool seen) { return seen ? x : NEG_INF; }
template <typename T, bool KEYS_DOWN>
__device__ inline void add_biases(const Attention& a, const Sequence& s, int head, Position<KEYS_DOWN> at,
                                  float (&x)[R][N]) {
    const T* bias = (const T*)a.bias_data + s.number * a.bias.batch + head * a.bias.head;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int i = at.query(r, n), j = at.key(r, n);
            if (i < s.queries && j < s.keys) x[r][n] = add_bias(x[r][n], bias[i * a.bias.row + j * a.bias.column]);
        }
}

// Turns products of queries and keys into log2(e) times logits, -inf where masked (as `logit` in attention.cuh).
// `unmasked`: no key here is masked by the window or an end. `slopes`, unless null, are multiplied by the softcap's derivative.
template <bool KEYS_DOWN>
__device__ inline void apply_logits(const Attention& a, const Sequence& s, int head, Position<KEYS_DOWN> at, bool unmasked,
                                    float (&x)[R][N], float (*slopes)[N] = nullptr) {
    at = {opaque(at.i), opaque(at.j)};
#pragma unroll
    for (int e = 0; e < R * N; ++e) x[e / N][e % N] *= EXTRAS ? a.scale : a.scale * LOG2E;
    if (EXTRAS && a.softcap > 0.f)
#pragma unroll
        for (int e = 0; e < R * N; ++e) {
            const float t = tanhf(x[e / N][e % N] / a.softcap);
            if (slopes) slopes[e / N][e % N] *= 1.f - t * t;
            x[e / N][e % N] = a.softcap * t;
        }
    if (EXTRAS && a.slopes) {
        const float slope = slope_of(a, s.number, head);
#pragma unroll
        for (int e = 0; e < R * N; ++e) {
            const int r = e / N, n = e % N;
            x[r][n] -= slope * (float)abs(at.query(r, n) + s.offset - at.key(r, n));
        }
    }
    if (EXTRAS && a.bias_kind == 1) add_biases<bool>(a, s, head, at, x);
    if (EXTRAS && a.bias_kind == 2) add_biases<float>(a, s, head, at, x);
    if (EXTRAS && a.bias_kind == 3) add_biases<scalar>(a, s, head, at, x);
    if (EXTRAS)
#pragma unroll
        for (int e = 0; e < R * N; ++e) x[e / N][e % N] *= LOG2E;
    if (unmasked) return;
#pragma unroll
    for (int e = 0; e < R * N; ++e) {
        const int r = e / N, n = e % N, i = at.query(r, n), j = at.key(r, n), here = i + s.offset;
        const int low = here - a.left, high = i < s.queries ? min(s.keys - 1, here + a.right) : -1;
        x[r][n] = (j < low) | (j > high) ? NEG_INF : x[r][n];
    }
}

// Bit r N + n is set if dropout keeps x[r][n]. A word is for four weights, 8 rows and 8 columns apart; this lane has those that
// it needs.
template <bool KEYS_DOWN>
__device__ inline unsigned long long sample_kept(const Attention& a, const Sequence& s, int head, Position<KEYS_DOWN> at) {
    at = {opaque(at.i), opaque(at.j)};
    unsigned long long bits = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        if (r & 2) continue;  // covered by the word of r - 2
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const unsigned int word = kept_bytes(a, s, head, at.query(r, n), at.key(r, n));
#pragma unroll
            for (int e = 0; e < (R > 2 ? 4 : 2); ++e) {
                const int down = r + e / 2 * 2, across = n + e % 2;
                const int byte = at.query(down, across) / 8 % 2 * 2 + at.key(down, across) / 8 % 2;
                bits |= (unsigned long long)kept(word, byte) << (down * N + across);
            }
        }
    }
    return bits;
}
// x / (1 - p) where kept, otherwise 0.
__device__ inline void apply_dropout(const Attention& a, unsigned long long kept, float (&x)[R][N]) {
#pragma unroll
    for (int e = 0; e < R * N; ++e) x[e / N][e % N] *= kept >> e & 1 ? a.keep_scale : 0.f;
}
