// Gradient of a table: dweight[id] = scale * the sum of the rows of dropout(dy) whose token is id.
// Constants: scalar = float, f16, bf16; target = float; token = int; VEC = 4
// Constants: scalar = bf16; target = bf16; token = int; VEC = 4
// Constants: scalar = f16; target = f16; token = long long; VEC = 1
// Launch:    grid = (chunks + fills, slabs), block = (up to 128,), shared = TILE rows of dy and, to accumulate, of
//            dweight, as wide as a slab: the columns of a block, VEC per thread. The tokens, sorted by id, are cut into
//            `chunks` of `size`; a block adds the rows of one chunk, in order, TILE at a time. The sum of an id within
//            one chunk is written directly. For other ids each chunk stores a partial sum, and the block that stores the
//            last one adds them, in order. The `fills` blocks at the end clear the rows without tokens, WINDOW each.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/pack.cuh"
#include "common/philox.cuh"

constexpr int TILE = 32, WINDOW = 128;  // as in gpuattn/ops/embedding.py
static_assert(TILE == 32, "embedding_backward.cu: a word has one bit for each token of a tile");
static_assert(TILE % MOST_PACKS == 0, "embedding_backward.cu: a tile has room for the packs of fetch_packs");
constexpr int BATCH = 4;   // rows that a thread loads before it adds the first
constexpr int PARTS = 16;  // partial sums that it loads before it adds the first

// The dropout mask of dy: an element is kept if its 16-bit number is below `keep_below`.
struct Dropout {
    PhiloxKey key;
    unsigned int keep_below;

    // Clears the dropped elements of a pack, whose first element is number `at`.
    __device__ void apply(Pack<scalar, VEC>& values, unsigned long long at) const {
        const uint4 words = philox(key, (unsigned int)(at / 8), (unsigned int)(at / 8 >> 32));
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            if (philox_lane(words, (int)((at + i) % 8)) >= keep_below) values.x[i] = (scalar)0.f;
    }

    // The same for packs of two rows, by two threads that share 8 elements of a row: each samples one of the rows.
    __device__ void apply(Pack<scalar, VEC>& here, Pack<scalar, VEC>& there, unsigned long long at,
                          unsigned long long at_there) const {
        const bool second = threadIdx.x % 2;
        const unsigned long long block = (second ? at_there : at) / 8;
        const uint4 words = philox(key, (unsigned int)block, (unsigned int)(block >> 32));
        const u32 for_other[2] = {second ? words.x : words.z, second ? words.y : words.w};
#pragma unroll
        for (int i = 0; i < VEC / 2; ++i) {
            const u32 own = second ? (i ? words.w : words.z) : (i ? words.y : words.x);
            const u32 given = __shfl_xor_sync(~0u, for_other[i], 1);
            apply_word(here, i, second ? given : own), apply_word(there, i, second ? own : given);
        }
    }
    __device__ void apply_word(Pack<scalar, VEC>& values, int i, u32 word) const {
        if ((word & 0xFFFF) >= keep_below) values.x[2 * i] = (scalar)0.f;
        if (word >> 16 >= keep_below) values.x[2 * i + 1] = (scalar)0.f;
    }
};

// The tokens, sorted by id. Without `ids` the tokens are (repeats, length) and an id is the index along the last axis.
struct Sorted {
    const token* ids;
    const int* order;
    u32 tokens, length;

    __device__ u32 row(u32 place) const {
        if (order) return order[place];
        const u32 repeats = tokens / length;
        return place % repeats * length + place / repeats;
    }
    __device__ token id_of_row(u32 row) const { return ids ? ids[row] : (token)(row % length); }
    __device__ token id(u32 place) const { return id_of_row(row(place)); }
};

// Clears, from column `col` on, those of the rows first .. first + WINDOW - 1 that no token has.
__device__ inline void clear(target* dweight, const Sorted& sorted, long long first, long long rows, long long col,
                             long long cols) {
    __shared__ bool used[WINDOW];
#pragma unroll 1
    for (int r = threadIdx.x; r < WINDOW; r += blockDim.x)
        used[r] = first + r >= rows || (!sorted.ids && sorted.tokens && first + r < sorted.length);
    __syncthreads();
    if (sorted.ids) {
        constexpr int N = 16 / sizeof(token), FLIGHT = 4;
        const u32 packs = (sorted.tokens + N - 1) / N;  // the last one may be partial
#pragma unroll 1
        for (u32 begin = threadIdx.x; begin < packs; begin += FLIGHT * blockDim.x) {
            Pack<token, N> ids[FLIGHT];
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u) {
                const u32 pack = min(begin + u * blockDim.x, packs - 1);
                if ((pack + 1) * N <= sorted.tokens) ids[u] = load_pack<N>(sorted.ids + pack * N);
                else
                    for (int i = 0; i < N; ++i) ids[u].x[i] = sorted.ids[min(pack * N + i, sorted.tokens - 1)];
            }
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u)
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const long long r = ids[u].x[i] - first;
                    if (0 <= r && r < WINDOW) used[r] = true;
                }
        }
    }
    __syncthreads();
    if (col >= cols) return;
    const float zeros[VEC] = {};
    target* to = dweight + first * cols + col;
#pragma unroll 1
    for (int r = 0; r < WINDOW; r += 8, to += 8 * cols) {
        bool keep[8];
#pragma unroll
        for (int u = 0; u < 8; ++u) keep[u] = used[r + u];
#pragma unroll
        for (int u = 0; u < 8; ++u)
            if (!keep[u]) store_pack<VEC>(to + u * cols, zeros);
    }
}

extern "C" __global__ void __launch_bounds__(128, 4) embedding_backward(
    const scalar* __restrict__ dy,    // (tokens, cols), rows `stride` apart
    const token* __restrict__ ids,    // (tokens,), 16-byte aligned; or null, see Sorted
    const int* __restrict__ order,    // (tokens,): sorts them by id; null with `ids`
    target* __restrict__ dweight,     // (rows, cols)
    float* __restrict__ partial,      // (chunks, 2, cols): sums of the id that continues, of the one that begins
    unsigned int* arrived,            // (slabs, chunks): partial sums stored for the id that begins there; zeros
    unsigned int tokens,
    long long rows,
    long long cols,
    long long stride,
    unsigned int length,
    int size,
    int chunks,
    float scale,
    bool accumulate,
    unsigned int keep_below,
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step) {
    const Sorted sorted{ids, order, tokens, length};
    const long long col = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * VEC;
    const bool mine = col < cols;
    const int chunk = blockIdx.x, width = blockDim.x;
    if (chunk >= chunks) {
        clear(dweight, sorted, (chunk - chunks) * (long long)WINDOW, rows, col, cols);
        return;
    }

    // The rows and ids of a tile's tokens, and of one token on each side.
    __shared__ u32 row_of[TILE + 2];
    __shared__ token id_of[TILE + 2];
    __shared__ bool last[2];  // for the ids at both ends of the chunk: whether this block is the last one
    extern __shared__ __align__(16) unsigned char staged[];
    // This thread's part of the rows of dy, and of the rows of dweight where a run of one id ends.
    Pack<scalar, VEC>* gradients = reinterpret_cast<Pack<scalar, VEC>*>(staged) + threadIdx.x;
    Pack<target, VEC>* old = reinterpret_cast<Pack<target, VEC>*>(staged + TILE * width * sizeof(*gradients)) + threadIdx.x;

    const auto in_table = [&](token id) { return 0 <= id && id < rows; };  // the forward pass has flagged other ids
    const float factor = scale * keep_scale;
    const auto write = [&](token id, float (&sum)[VEC], const Pack<target, VEC>& before) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum[i] = factor * sum[i] + (accumulate ? (float)before.x[i] : 0.f);
        store_pack<VEC>(dweight + id * cols + col, sum);
    };

    const u32 first = chunk * (u32)size, end = min(first + size, tokens);
    token id_at[2];       // the chunk's first and last id
    int left = 0, right = 0;  // number of chunks before this one that also hold the first id, after it the last id
    float sum[VEC] = {};
    bool from_left = false;
#pragma unroll 1
    for (u32 at = first; at < end; at += TILE) {
        const int count = min((u32)TILE, end - at);
        __syncthreads();  // the previous tile has been read
#pragma unroll 1
        for (int t = threadIdx.x; t < TILE + 2; t += width)
            if (at + t - 1 < tokens) row_of[t] = sorted.row(at + t - 1);  // at = 0, t = 0 wraps around and is skipped
        __syncthreads();
#pragma unroll 1
        for (int t = threadIdx.x; t < TILE + 2; t += width)
            if (at + t - 1 < tokens) id_of[t] = sorted.id_of_row(row_of[t]);
#if __CUDA_ARCH__ >= 800
        if (mine)
#pragma unroll 4
            for (int t = 0; t < count; ++t) fetch_pack<VEC>(gradients + t * width, dy + row_of[t + 1] * stride + col);
#else
        if (mine) fetch_packs(gradients, width, count, [&](int t) { return dy + row_of[t + 1] * stride + col; });
#endif
        __syncthreads();
        const int t = threadIdx.x % 32;
        const u32 ends = __ballot_sync(~0u, t < count && (at + t + 1 == end || id_of[t + 2] != id_of[t + 1]));
#if __CUDA_ARCH__ >= 800
        if (accumulate && mine)
#pragma unroll 4
            for (int t = 0; t < count; ++t)
                if ((ends >> t & 1) && in_table(id_of[t + 1]))
                    fetch_pack<VEC>(old + t * width, dweight + id_of[t + 1] * cols + col);
#else
        if (accumulate && mine && rows > 0)  // also rows that no run ends with: mostly those of the next token
            fetch_packs(old, width, count, [&](int t) {
                const token id = id_of[t + 1];
                return dweight + (in_table(id) ? id : 0) * cols + col;
            });
#endif

        if (at == first) {
            id_at[0] = id_of[1], id_at[1] = end - at <= TILE ? id_of[count] : sorted.id(end - 1);
            const bool more_left = at > 0 && id_of[0] == id_at[0];
            const bool more_right = end < tokens && sorted.id(end) == id_at[1];
            for (bool more = more_left || more_right; more;) {
                const int before = chunk - left - 1 - (int)threadIdx.x, behind = chunk + right + 1 + (int)threadIdx.x;
                const int found = __syncthreads_count(
                    more_left && before >= 0 && sorted.id((before + 1u) * size - 1) == id_at[0]);
                const int found_right = __syncthreads_count(
                    more_right && behind < chunks && sorted.id(behind * (u32)size) == id_at[1]);
                left += found, right += found_right;
                more = found == width || found_right == width;
            }
            from_left = left > 0;
        }

        cp_async_wait_all();
        if (keep_below < 65536) {
            const Dropout dropout{philox_key(seed_low, seed_high, stream, step, device_step), keep_below};
            if (VEC == 4 && width % 2 == 0 && cols % 8 == 0) {
#pragma unroll 2
                for (int t = 0; t < count; t += 2) {
                    const int next = min(t + 1, count - 1);
                    dropout.apply(gradients[t * width], gradients[next * width], row_of[t + 1] * cols + col,
                                  row_of[next + 1] * cols + col);
                }
            } else {
#pragma unroll 1
                for (int t = 0; t < count; ++t) dropout.apply(gradients[t * width], row_of[t + 1] * cols + col);
            }
        }
#pragma unroll 1
        for (int begin = 0; begin < count; begin += BATCH) {
            Pack<scalar, VEC> row[BATCH];
            Pack<target, VEC> before[BATCH];
            token id[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {  // elements past the tile are loaded and not used
                row[u] = gradients[(begin + u) * width], id[u] = id_of[begin + u + 1];
                if (accumulate) before[u] = old[(begin + u) * width];
            }
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                if (begin + u < count)
#pragma unroll
                    for (int i = 0; i < VEC; ++i) sum[i] += (float)row[u].x[i];
                if (!(ends >> (begin + u) & 1)) continue;
                if (from_left || (right > 0 && at + begin + u + 1 == end)) {
                    if (mine) store_pack<VEC>(partial + (chunk * 2LL + !from_left) * cols + col, sum);
                } else if (mine && in_table(id[u])) {
                    write(id[u], sum, before[u]);
                }
                from_left = false;
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum[i] = 0.f;
            }
        }
    }

    // For an id in several chunks, the last block to arrive adds the partial sums, from the chunk where the id begins.
    const bool through = left && right && id_at[0] == id_at[1];
    const auto from = [&](int side) { return side ? chunk : chunk - left; };
    const auto parts = [&](int side) {
        return side ? (right && !through ? right + 1 : 0) : (left ? left + 1 + (through ? right : 0) : 0);
    };
    if (!left && !right) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x < 2) {
        const unsigned int n = parts(threadIdx.x);
        last[threadIdx.x] = n && atomicInc(arrived + blockIdx.y * chunks + from(threadIdx.x), n - 1) == n - 1;
    }
    __syncthreads();
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        const token id = side ? id_at[1] : id_at[0];
        if (!last[side] || !mine || !in_table(id)) continue;
        __threadfence();
        Pack<target, VEC> before;
        if (accumulate) before = load_pack<VEC>(dweight + id * cols + col);
        const float* here = partial + from(side) * 2LL * cols + col;
        const Pack<float, VEC> first_part = load_pack_shared<VEC>(here + cols);
        float total[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) total[i] = first_part.x[i];
        for (int left_over = parts(side) - 1; left_over > 0; left_over -= PARTS) {
            Pack<float, VEC> part[PARTS];
#pragma unroll
            for (int u = 0; u < PARTS; ++u) {
                here += 2 * cols;
                if (u < left_over) part[u] = load_pack_shared<VEC>(here);
            }
#pragma unroll
            for (int u = 0; u < PARTS; ++u)
#pragma unroll
                for (int i = 0; i < VEC; ++i)
                    if (u < left_over) total[i] += part[u].x[i];
        }
        write(id, total, before);
    }
}

// The same by atomics, in no fixed order: sums[id] += scale * dropout(dy)[row]. Grid: (ceil(tokens / FLIGHT), slabs).
constexpr int FLIGHT = 4;  // ATOMIC_ROWS in gpuattn/ops/embedding.py

extern "C" __global__ void __launch_bounds__(128) embedding_backward_atomic(
    const scalar* __restrict__ dy,    // (tokens, cols), rows `stride` apart
    const token* __restrict__ ids,    // (tokens,), or null, see Sorted
    float* sums,                      // (rows, cols)
    unsigned int tokens,
    long long rows,
    long long cols,
    long long stride,
    unsigned int length,
    float scale,
    unsigned int keep_below,
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step) {
    const long long col = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * VEC, first = blockIdx.x * (long long)FLIGHT;
    if (col >= cols) return;
    const Dropout dropout{philox_key(seed_low, seed_high, stream, step, device_step), keep_below};
    Pack<scalar, VEC> gradients[FLIGHT];
#pragma unroll
    for (int u = 0; u < FLIGHT; ++u)
        if (first + u < tokens) gradients[u] = load_pack<VEC>(dy + (first + u) * stride + col);
#pragma unroll
    for (int u = 0; u < FLIGHT; ++u) {
        const long long row = first + u;
        if (row >= tokens) break;
        const long long id = ids ? (long long)ids[row] : (u32)row % length;
        if (id < 0 || id >= rows) continue;
        if (keep_below < 65536) dropout.apply(gradients[u], row * cols + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) atomicAdd(sums + id * cols + col + i, scale * keep_scale * (float)gradients[u].x[i]);
    }
}
