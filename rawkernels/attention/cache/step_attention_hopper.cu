// Attention of one new token of each text over pages, which TMA loads; the kernel also appends the token's key and value.
// Each warp has a ring of SLOTS groups of 16 keys and values in shared memory, which it fills for itself: while it computes
// with one, the next are on their way, and no register waits for them. Products, the order of sums and so the bits are those
// of step_attention.cu with as many warps.
// SETTLED: what wrote caches, counts and page table was over before the kernel before this one let it start, so old keys are
// loaded beside it.
// Constants: scalar = f16, bf16; WARPS = 2, 4, 8; SETTLED = 0, 1
// Launch:    grid = (texts * kv_heads, ceil(heads / kv_heads / 8)), block = (32 * WARPS,), shared = SHARED bytes; more keep
//            blocks from sharing a multiprocessor while others have none
//            dependent: step_attention_hopper
// Arch: sm_90a
#include "attention/cache/key_groups.cuh"
#include "common/cp_async.cuh"
#include "common/global_memory.cuh"
#include "common/grid_dependency.cuh"
#include "common/tma.cuh"

constexpr int HEAD_DIM = 64, PAGE = 64, SLOTS = 2, THREADS = 32 * WARPS;
constexpr int ROW = 2 * HEAD_DIM, VALUES = GROUP * ROW;   // bytes of a key; a slot's values are behind its keys
constexpr int SLOT = 2 * VALUES, RING = SLOTS * SLOT;
constexpr int PITCH = HEAD_DIM / 2 + 4;                   // pairs of elements from column to column
constexpr int SUMS = COLUMNS * PITCH * 8;                 // of a warp's columns, behind their elements
constexpr int FULL = WARPS * RING, NEWEST = FULL + 8 * WARPS * SLOTS, SHARED = 1024 + NEWEST + 2 * ROW;
static_assert(SUMS + COLUMNS * 8 <= RING, "step_attention_hopper.cu: what a warp found has the place of its ring");

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS) step_attention_hopper(
    const __grid_constant__ TensorMap k_map,  // of the pages, (pages * PAGE, kv_heads, HEAD_DIM); boxes of GROUP keys
    const __grid_constant__ TensorMap v_map,
    const scalar* q,                          // (texts, heads, HEAD_DIM), texts q_stride elements apart
    const scalar* k,                          // (texts, kv_heads, HEAD_DIM), texts k_stride elements apart
    const scalar* v,
    scalar* k_cache,                          // (pages, PAGE, kv_heads, HEAD_DIM)
    scalar* v_cache,
    const int* key_counts,                    // (texts,): number of keys, the new one included, which is the last
    const int* page_table,                    // (texts, pages): the pages of a text, in the order of its keys
    scalar* out,                              // (texts, heads, HEAD_DIM)
    long long q_stride,
    long long k_stride,
    long long v_stride,
    int heads,
    int kv_heads,
    int pages,
    float scale) {
    if (!SETTLED) grid_dependency_wait();
    const u32 shared = shared_base();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int text = blockIdx.x / kv_heads, kv_head = blockIdx.x - text * kv_heads, group = heads / kv_heads;
    const int columns = min(COLUMNS, group - (int)blockIdx.y * COLUMNS), first_head = kv_head * group + blockIdx.y * COLUMNS;
    const u32 ring = shared + warp * RING, full = shared + FULL + 8 * warp * SLOTS, newest = shared + NEWEST;
    const u32 zero = unknown_zero(pages);
    if (lane == 0) {
        prefetch(k_map), prefetch(v_map);
        for (int i = 0; i < SLOTS; ++i) mbar_init(full + 8 * i, 1);
        mbar_init_done();
    }
    __syncwarp();
    page_table += (long long)text * pages;
    // The page of the warp's group i is in lane i % 32.
    const auto pages_from = [&](int i) { return page_table[min((warp + (i + lane) * WARPS) * GROUP / PAGE, pages - 1)]; };
    int page = pages_from(0);
    const int count = min(max(key_counts[text], 1), pages * PAGE), groups = (count + GROUP - 1) / GROUP;
    const int own = (groups - warp + WARPS - 1) / WARPS;  // groups of this warp
    // Loads its group i into a slot from which `loaded` came.
    const auto start = [&](int i, u32 loaded) {
        if (i >= own) return;
        if (i % 32 == 0 && i > 0) page = pages_from(i);
        const int first = __shfl_sync(~0u, page, i % 32) * PAGE + (warp + i * WARPS) * GROUP % PAGE;
        if (lane == 0) {
            const u32 slot = ring + i % SLOTS * SLOT, bar = freed(full + 8 * (i % SLOTS), loaded, zero);
            mbar_expect(bar, SLOT);
            tma_load(slot, k_map, bar, 0, first, kv_head, 0, L2_EVICT_FIRST);
            tma_load(slot + VALUES, v_map, bar, 0, first, kv_head, 0, L2_EVICT_FIRST);
        }
    };
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) start(i, 0);
    if (SETTLED) {
        grid_dependency_wait();
        grid_launch_dependents();  // once all blocks of this one have started: row_linear loads its weights beside them
    }
    uint4 query[2] = {};
    if (g < columns)
#pragma unroll
        for (int p = 0; p < 2; ++p)
            query[p] = load_streaming(q + text * q_stride + (first_head + g) * HEAD_DIM + 32 * p + 8 * t);
    const bool has_newest = (groups - 1) % WARPS == warp;  // 8 lanes load the key, 8 the value
    const int chunk = lane % 8 * 8;
    if (has_newest && lane < 16)
        cp_async_16(newest + lane * 16, (lane < 8 ? k + text * k_stride : v + text * v_stride) + kv_head * HEAD_DIM + chunk);
    cp_async_commit();

    float acc[4][4] = {}, top[2] = {NEG_INF, NEG_INF}, sum[2] = {};
    scale *= LOG2E;
#pragma unroll 1
    for (int i = 0; i < own; ++i) {
        const int first = (warp + i * WARPS) * GROUP;
        if (first + GROUP >= count) {
            cp_async_wait<0>();
            __syncwarp();
        }
        mbar_wait(full + 8 * (i % SLOTS), i / SLOTS & 1);
        const u32 slot = ring + i % SLOTS * SLOT;
        // The new key and value, and whatever is behind them in the page, are read where the new ones are.
        uint4 keys[2][2];
        u32 values[4][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int inside = 8 * half + g;
            const bool old = first + inside < count - 1, odd = g % 2;  // odd rows the other way round: no bank conflicts
            uint4 x[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const int part = 4 * (p ^ odd) + t;
                x[p] = load_shared_uint4(old ? slot + inside * ROW + (part ^ g) * 16 : newest + part * 16);
            }
            keys[half][0] = odd ? x[1] : x[0], keys[half][1] = odd ? x[0] : x[1];
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int inside = n / 2 * 8 + 2 * t + n % 2;
            const bool old = first + inside < count - 1;
            const u32 at = old ? slot + VALUES + inside * ROW + (g ^ inside % 8) * 16 : newest + ROW + g * 16;
            const uint4 x = load_shared_uint4(at);
            values[n][0] = x.x, values[n][1] = x.y, values[n][2] = x.z, values[n][3] = x.w;
        }
        float logits[4];
        multiply(logits, keys, query);
#pragma unroll
        for (int j = 0; j < 4; ++j) logits[j] = first + j / 2 * 8 + g < count ? logits[j] * scale : NEG_INF;
        u32 weights[2];
        weigh(weights, logits, top, sum, acc);
        add(acc, values, weights);
        __syncwarp();
        start(i + SLOTS, values[3][0]);  // which was loaded last
    }
    if (has_newest && lane < 16 && blockIdx.y == 0) {
        const long long row = (long long)page_table[(count - 1) / PAGE] * PAGE + (count - 1) % PAGE;
        const uint4 x = load_shared_uint4(newest + lane * 16);
        store_16_bytes((lane < 8 ? k_cache : v_cache) + (row * kv_heads + kv_head) * HEAD_DIM + chunk, x.x, x.y, x.z, x.w);
    }

    // ---- merge the warps
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int column = 2 * t + c;
        sum[c] = sum_of_columns(sum[c]);
        if (g == 0) store_shared(ring + SUMS + column * 8, float2{top[c], sum[c]});
        if (column < columns)
#pragma unroll
            for (int w = 0; w < 4; ++w)
                store_shared(ring + (column * PITCH + 4 * g + w) * 8, float2{acc[w][c], acc[w][c + 2]});
    }
    __syncthreads();
    for (int i = threadIdx.x; i < columns * (HEAD_DIM / 2); i += THREADS) {
        const int column = i / (HEAD_DIM / 2), pair = i % (HEAD_DIM / 2);
        float peak = NEG_INF, total = 0, x = 0, y = 0;
        float2 found[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            found[w] = load_shared_float2(shared + w * RING + SUMS + column * 8);
            peak = fmaxf(peak, found[w].x);
        }
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(found[w].x - peak);
            const float2 part = load_shared_float2(shared + w * RING + (column * PITCH + pair) * 8);
            total += weight * found[w].y, x += weight * part.x, y += weight * part.y;
        }
        scalar* to = out + ((long long)text * heads + first_head + column) * HEAD_DIM + 2 * pair;
        *reinterpret_cast<u32*>(to) = pack_pair(scalar(), x / total, y / total);
    }
}
