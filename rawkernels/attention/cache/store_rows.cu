// Copies consecutive rows of packed arrays into rows of tables, as keys of sources or prompts into a cache: row starts[i] + t
// of a source becomes row t of entry places[i] of its table. Up to MOST arrays at a time.
// Launch:    grid = (entries, ceil(rows / rows_of_block)), block = (BLOCK,). A block copies so many rows of each array, that
//            threads have EACH loads under way also where a row is short.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/global_memory.cuh"

constexpr int BLOCK = 128, MOST = 24;
constexpr int EACH = 8;  // loads that a thread has under way; as in gpuattn/ops/attention/store_rows.py

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
    int words,           // of 16 bytes in a row, if all rows are alike and aligned to them; else 0
    int rows,            // of each entry
    int rows_of_block) {  // 1 if words is 0
    const int start = starts[blockIdx.x];
    const long long place = places[blockIdx.x];
    const int first = blockIdx.y * rows_of_block;
    const int end = min(min(first + rows_of_block, rows), lengths ? lengths[place] : rows);
    const auto source = [&](const Copy& copy, int t) {
        return copy.source + min(start + t, copy.rows - 1) * copy.step;  // or the last row
    };
    const auto target = [&](const Copy& copy, int t) { return copy.table + (place * copy.room + t) * copy.bytes; };
    if (words) {
        // A thread goes on by BLOCK words, which are as many rows, copies and words each time: no divisions in the loop.
        const auto divided = [&](int i, int& row, int& which, int& word) {
            const int copies_before = i / words;
            word = i - copies_before * words, row = copies_before / count, which = copies_before - row * count;
        };
        int t, which, word, more_rows, more_copies, more_words;
        divided(threadIdx.x, t, which, word);
        divided(BLOCK, more_rows, more_copies, more_words);
        for (t += first; t < end;) {
            uint4 held[EACH];
            char* to[EACH];
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                to[e] = nullptr;
                if (t < end) {
                    const Copy& copy = copies.each[which];
                    held[e] = load_16_bytes(source(copy, t) + 16 * word);
                    to[e] = target(copy, t) + 16 * word;
                }
                word += more_words, which += more_copies, t += more_rows;
                if (word >= words) word -= words, ++which;
                if (which >= count) which -= count, ++t;
            }
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (to[e]) store_16_bytes(to[e], held[e].x, held[e].y, held[e].z, held[e].w);
        }
        return;
    }
    if (first >= end) return;
#pragma unroll 1
    for (int which = 0; which < count; ++which) {
        const Copy& copy = copies.each[which];
        const auto* from = (const unsigned short*)source(copy, first);
        auto* to = (unsigned short*)target(copy, first);
        for (int i = threadIdx.x; i < copy.bytes / 2; i += BLOCK) to[i] = from[i];
    }
}
