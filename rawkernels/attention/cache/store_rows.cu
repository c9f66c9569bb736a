// Copies consecutive rows of packed arrays into rows of tables, as keys of sources or prompts into a cache: row starts[i] + t
// of a source becomes row t of entry places[i] of its table. Up to MOST arrays at a time.
// Launch:    grid = (entries, rows), block = (BLOCK,). A block copies one row of each array.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/global_memory.cuh"

constexpr int BLOCK = 128, MOST = 24;
constexpr int EACH = 8;  // loads that a thread has under way

struct Copy {
    char* table;         // (N, room) rows of `bytes`
    const char* source;  // (rows,) of them, `step` bytes apart
    long long step;
    int room, rows, bytes, unused;
};
struct Copies { Copy each[MOST]; };

extern "C" __global__ void __launch_bounds__(BLOCK) store_rows(
    const __grid_constant__ Copies copies,
    const int* starts,   // (entries,)
    const int* places,   // (entries,); two entries may write the same row: either may be there
    const int* lengths,  // (N,): rows of an entry from there on stay as they are; or null
    int count,           // of copies
    int words) {         // of 16 bytes in a row, if all rows are alike and aligned to them; else 0
    const int t = blockIdx.y, start = starts[blockIdx.x];
    const long long place = places[blockIdx.x];
    if (lengths && t >= lengths[place]) return;
    const auto source = [&](const Copy& copy) { return copy.source + min(start + t, copy.rows - 1) * copy.step; };  // or the last
    const auto target = [&](const Copy& copy) { return copy.table + (place * copy.room + t) * copy.bytes; };
    if (words) {
        for (int first = threadIdx.x; first < count * words; first += EACH * BLOCK) {
            uint4 held[EACH];
            char* to[EACH];
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int i = first + e * BLOCK, which = i / words, word = i - which * words;
                if (which >= count) continue;
                held[e] = load_16_bytes(source(copies.each[which]) + 16 * word);
                to[e] = target(copies.each[which]) + 16 * word;
            }
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (first + e * BLOCK < count * words) store_16_bytes(to[e], held[e].x, held[e].y, held[e].z, held[e].w);
        }
        return;
    }
#pragma unroll 1
    for (int which = 0; which < count; ++which) {
        const Copy& copy = copies.each[which];
        const auto* from = (const unsigned short*)source(copy);
        auto* to = (unsigned short*)target(copy);
        for (int i = threadIdx.x; i < copy.bytes / 2; i += BLOCK) to[i] = from[i];
    }
}
