// The launches before and after flash_attention_backward_hopper.cu and .._wide.cu: first lse, delta and the order of tiles,
// at the end dq from its sums.
// Constants: scalar = f16, bf16; WIDTH = 64, 128, 256 (both head sizes rounded up); CHAINED = false
// Constants: scalar = f16, bf16; WIDTH = 64; CHAINED = true (dq_sum is not cleared: the main launch stores to it first)
// Launch:    both: grid = (ceil(longest queries / BM) * heads * sequences,), block = (256,)
// Arch: sm_90a
#include "attention/common/attention_backward_hopper.cuh"
#include "common/wgmma.cuh"

constexpr int THREADS = 256, LANES = WIDTH / 8, PASSES = BM * LANES / THREADS;  // a lane has 16 bytes of a row

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

// The dot product of eight pairs of 16-bit numbers.
__device__ __forceinline__ float dot8(uint4 x, uint4 y) {
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        scalar a, b;
        a.bits = (unsigned short)(xs[i / 2] >> 16 * (i % 2));
        b.bits = (unsigned short)(ys[i / 2] >> 16 * (i % 2));
        sum += (float)a * (float)b;
    }
    return sum;
}

// Tile number `index`. Within sections of heads whose queries fit in L2, the first keys come first, because a causal mask
// leaves them the most queries.
__device__ __forceinline__ Tile tile_at(const Attention& a, int index, int tiles, int section, bool ordered) {
    const int kv_heads = a.heads / a.group, heads = kv_heads * a.sequences, key_tiles = (a.keys + BN - 1) / BN;
    Tile tile = {};
    tile.first = -1;
    if (index == tiles) return tile;
    const int start = index / (key_tiles * section) * section, here = min(section, heads - start);
    const int rest = index - start * key_tiles, sheet = start + rest % here;
    const Sequence s = sequence_at(a, sheet / kv_heads);
    tile.head = sheet % kv_heads;
    tile.first = rest / here * BN;
    tile.batch = a.cu_q ? 0 : s.number;
    tile.key_row = (int)s.first_key + tile.first;
    tile.keys = s.keys;
    tile.key_rows = s.key_rows;
    tile.shift = -s.offset;
    tile.query_row = (int)s.first_query;
    tile.row_block = first_row_block(a, s);
    tile.number = s.number;
    tile.queries = s.queries;
    const int last = min(tile.first + BN, s.keys) - 1;
    const int end = last < tile.first ? 0 : min(s.queries, last - s.offset + a.left + 1);
    tile.begin = max(0, tile.first - s.offset - a.right) / BM;
    tile.blocks = max(0, (end + BM - 1) / BM - tile.begin);
    tile.open_from = (tile.first - s.offset + BN - 1 - a.right + BM - 1) / BM;
    tile.open_to = tile.first + BN > s.keys ? 0 : (tile.first - s.offset + a.left + 1) / BM;
    // Concurrent tiles of a head start at different blocks, so that they do not add to the same dq. Where they add in order,
    // all go downwards from their last block: a tile that sees fewer blocks then reaches each block after earlier tiles.
    const int apart = tile.blocks ? max(0, tile.first / BM - tile.begin) % tile.blocks : 0;
    tile.start = tile.begin + (ordered ? tile.blocks - 1 : apart);
    return tile;
}

// A block of rows of one head.
struct Rows { Sequence s; int head, first, count; long long side; };  // side: the number of the block in lse_rows etc.
__device__ __forceinline__ Rows rows_at(const Attention& a, int row_blocks) {
    // from the end, so that L2 holds what the next launch reads first; the heads of a row, adjacent in memory, together
    const int index = gridDim.x - 1 - blockIdx.x, blocks = (a.queries + BM - 1) / BM;
    const int rows = index / a.heads, block = rows % blocks;
    Rows r;
    r.s = sequence_at(a, rows / blocks);
    r.head = index % a.heads;
    r.first = block * BM;
    r.count = min(BM, r.s.queries - r.first);
    r.side = (long long)r.head * row_blocks + first_row_block(a, r.s) + block;
    return r;
}

// delta = rowsum(dout * out) - dlse (times 1 - p for the main launch), lse in base 2, zeros in dq_sum, and the order of tiles.
extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_rows(
    const Attention a,
    const scalar* __restrict__ out,      // (B, T, H, Dv) or (tokens, H, Dv) by strides, last axis contiguous
    const scalar* __restrict__ dout,     // like out
    const float* __restrict__ lse,       // (B, H, T) or (H, tokens)
    const float* __restrict__ dlse,      // like lse, or null
    float* __restrict__ lse_rows,        // (H, row_blocks, BM)
    float* __restrict__ delta_rows,      // (H, row_blocks, BM)
    float* __restrict__ delta,           // like lse, or null
    float* __restrict__ dq_sum,          // (H, row_blocks, BM * WIDTH)
    Tile* __restrict__ plan,             // (tiles + 1,)
    int* __restrict__ counter,           // becomes `blocks`: those of the main launch, which compute the first tiles
    int* __restrict__ turns,             // (H, row_blocks, 2) if dq is summed in order, or null
    int blocks,
    int tiles,
    int section,
    int row_blocks) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter = blocks;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i <= tiles; i += gridDim.x * THREADS)
        plan[i] = tile_at(a, i, tiles, section, turns != nullptr);

    const Rows r = rows_at(a, row_blocks);
    if (r.count <= 0) return;
    const int lane = threadIdx.x % LANES, row0 = threadIdx.x / LANES;
    const long long at = r.s.first_query + r.first;
    const long long number = a.cu_q ? 0 : r.s.number, lse_at = number * a.lse_batch + r.head * a.lse_head + at;
    out += number * a.out.batch + at * a.out.row + r.head * a.out.head + 8 * lane;
    dout += number * a.dout.batch + at * a.dout.row + r.head * a.dout.head + 8 * lane;
    const bool columns = 8 * lane < a.value_dim;
    if (turns && threadIdx.x < 2) turns[2 * r.side + threadIdx.x] = 0;
    uint4* sums = (uint4*)(dq_sum + r.side * (BM * WIDTH));
    static_assert(PASSES % 4 == 0 && BM * WIDTH / 4 == 2 * PASSES * THREADS, "flash_attention_backward_hopper_rows.cu: passes");
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass += 4) {
        uint4 x[4], y[4];
        float sum[4], at_row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row0 + (pass + i) * (THREADS / LANES);
            x[i] = columns && row < r.count ? *(const uint4*)(out + row * a.out.row) : zeros();
            y[i] = columns && row < r.count ? *(const uint4*)(dout + row * a.dout.row) : zeros();
            at_row[i] = lane == 0 && row < r.count ? lse[lse_at + row] : NEG_INF;
        }
#pragma unroll
        for (int i = 0; i < 8 && !CHAINED; ++i) sums[(2 * pass + i) * THREADS + threadIdx.x] = zeros();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = dot8(x[i], y[i]);
#pragma unroll
            for (int step = LANES / 2; step; step /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row0 + (pass + i) * (THREADS / LANES);
            const bool inside = row < r.count;
            if (lane) continue;
            lse_rows[r.side * BM + row] = at_row[i] == NEG_INF ? INF : at_row[i] * LOG2E;
            if (inside && dlse) sum[i] -= dlse[lse_at + row];
            if (inside && delta) delta[lse_at + row] = sum[i];
            delta_rows[r.side * BM + row] = inside ? sum[i] / a.keep_scale : 0.f;
        }
    }
}

// dq = scale / (1 - p) * sum, from the order of fragments to rows.
extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_dq(
    const Attention a,
    const float* __restrict__ dq_sum,    // (H, row_blocks, BM * WIDTH)
    scalar* __restrict__ dq,             // (B, T, H, D) or (tokens, H, D) by strides, last axis contiguous
    int row_blocks) {
    __shared__ __align__(1024) unsigned char staged[2 * 64 * 128];
    const Rows r = rows_at(a, row_blocks);
    if (r.count <= 0) return;
    const int w = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const float4* sums = (const float4*)(dq_sum + r.side * (BM * WIDTH)) + w * (BM * WIDTH / 8) + thread;
    // A warp has 16 rows x 64 columns at a time: of its warpgroup's 64 rows, or of its warpgroup's half of the columns.
    const u32 tile = (u32)__cvta_generic_to_shared(staged) + w * 64 * 128;
    const int row0 = thread / 32 * 16, first_row = (WIDTH == 64 ? 64 * w : 0) + row0;
    const long long number = a.cu_q ? 0 : r.s.number;
    dq += number * a.dq.batch + (r.s.first_query + r.first) * a.dq.row + r.head * a.dq.head;
#pragma unroll
    for (int part = 0; part < BM * WIDTH / 8192; ++part) {
        const int first_column = WIDTH == 64 ? 0 : w * (WIDTH / 2) + 64 * part;
        float4 x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = sums[(8 * part + i) * 128];
        u32 p[4][4];
        const float scale = a.scale * a.keep_scale;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            p[i / 2][i % 2 * 2] = pack_pair(scalar(), x[i].x * scale, x[i].y * scale);
            p[i / 2][i % 2 * 2 + 1] = pack_pair(scalar(), x[i].z * scale, x[i].w * scale);
        }
        store_tile<64>(tile, row0, p);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 8 + 4 * i, column = first_column + lane % 8 * 8;
            if (first_row + row >= r.count || column >= a.head_dim) continue;
            const u32 from = chunk_address<64>(tile, row0 + row, lane % 8);
            *(uint4*)(dq + (first_row + row) * a.dq.row + column) = load_shared_uint4(from);
        }
        __syncwarp();
    }
}
