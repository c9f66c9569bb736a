#pragma once
// The rows of a cache that hold the keys which a sentence's beams see: beams share the keys of common ancestors, and each row
// is listed once, in the order of keys. row_embedding.cu lists them at the start of a step, attention/cache/step_attention.cu
// where that is not done.

constexpr int LISTED_BEAMS = 8;
constexpr u32 ROW = 0xffffff;  // of an entry: beam * room + key; above it a bit for each beam, or column, that sees the row

// The beams whose rows hold the keys `key` of `beams` beams; slots: (beams, room).
struct Holders {
    int of[LISTED_BEAMS];
    __device__ void load(const short* slots, int beams, int room, int key) {
#pragma unroll
        for (int i = 0; i < LISTED_BEAMS; ++i)
            if (i < beams && key < room) of[i] = slots[i * room + key];
    }
};

// Lists the rows of successive keys, one of each thread, behind `filled` entries: put(place, holder, beams that see the row).
// `there`: whether there is such a key. Returns the new number of entries. Has a barrier, in front of the first put; `turn`:
// the number of the call.
template <int THREADS, typename Put>
__device__ int list_rows_of_keys(const Holders& holders, int beams, bool there, int filled, int turn, Put put) {
    __shared__ int totals[2 * THREADS / 32];  // of each warp, in two calls
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* mine = totals + turn % 2 * (THREADS / 32);
    u32 seeing[LISTED_BEAMS], firsts = 0;  // beams that see the same row; the first ones of each row
#pragma unroll
    for (int i = 0; i < LISTED_BEAMS; ++i) seeing[i] = 1u << i;
#pragma unroll
    for (int i = 0; i < LISTED_BEAMS; ++i)
#pragma unroll
        for (int j = 0; j < i; ++j)
            if (i < beams && holders.of[i] == holders.of[j]) seeing[i] |= 1u << j, seeing[j] |= 1u << i;
    int before = 0, all = 0;  // entries of the lanes before, of the warp
#pragma unroll
    for (int i = 0; i < LISTED_BEAMS; ++i) {
        if (i >= beams) break;
        const bool is_first = there && !(seeing[i] & ((1u << i) - 1));
        const u32 lanes = __ballot_sync(~0u, is_first);
        firsts |= is_first ? 1u << i : 0;
        before += __popc(lanes & ((1u << lane) - 1)), all += __popc(lanes);
    }
    if (lane == 0) mine[warp] = all;
    __syncthreads();
    before += filled;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += mine[w];
        filled += mine[w];
    }
#pragma unroll
    for (int i = 0; i < LISTED_BEAMS; ++i)
        if (firsts >> i & 1) put(before++, holders.of[i], seeing[i]);
    return filled;
}
