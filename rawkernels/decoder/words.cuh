#pragma once
// Marked words: what the phases of decoder_step.cu hand to each other. A word of 8 bytes has two 16-bit numbers, or one
// float32, in its low half, and in its high half the mark of the phase that wrote it. A reader loads a word until it has
// the mark that it expects. Each word is complete in itself, so no fence and no order between accesses is needed.
#include "common/global_memory.cuh"
#include "common/pack.cuh"

constexpr int POLLED_ROWS = 8;  // with so many rows all missing words are loaded again at a time: it is few bytes

// A number takes 4 bytes, so `states + i` is the word of numbers i and i + 1. Of 32 adjacent numbers, each 8 are loaded by
// a lane in two loads; the words of a load are adjacent for adjacent lanes.
__device__ const u32* words_of(const scalar* states) { return reinterpret_cast<const u32*>(states); }
__device__ u32* words_of(scalar* states) { return reinterpret_cast<u32*>(states); }
__device__ int word_at(int column) { return (column & ~31) | (column & 4) << 2 | (column & 24) >> 1 | (column & 3); }
constexpr int SECOND = 16;  // from numbers 0 .. 3 of eight to numbers 4 .. 7

__device__ u64 marked(u32 data, u32 mark) { return (u64)mark << 32 | data; }
__device__ u32 mark_of(u64 word) { return word >> 32; }
__device__ u64 load_word(const u32* from) { return load_relaxed(reinterpret_cast<const u64*>(from)); }
__device__ void store_word(u32* to, u32 data, u32 mark) { store_relaxed(reinterpret_cast<u64*>(to), marked(data, mark)); }

// A word that is nearly always there.
__device__ u32 await_word(u64 word, const u32* from, u32 mark) {
    if (mark_of(word) == mark) return word;
    const long long start = clock64();
    while (mark_of(word = load_word(from)) != mark) fault_after_seconds(start);
    return word;
}

// Eight numbers of a row, from a multiple of 8.
struct Eight {
    u64 word[4];
    __device__ void load(const u32* from) {
        load_relaxed(word[0], word[1], reinterpret_cast<const u64*>(from));
        load_relaxed(word[2], word[3], reinterpret_cast<const u64*>(from + SECOND));
    }
    __device__ void clear(u32 mark) { word[0] = word[1] = word[2] = word[3] = marked(0, mark); }
    __device__ bool has(u32 mark) const {
        const u32 first = (mark_of(word[0]) ^ mark) | (mark_of(word[1]) ^ mark);
        return !(first | (mark_of(word[2]) ^ mark) | (mark_of(word[3]) ^ mark));
    }
    __device__ uint4 numbers() const { return make_uint4(word[0], word[1], word[2], word[3]); }
};
__device__ void store_eight(u32* to, const float (&x)[8], u32 mark) {
    u64 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = marked(pack_pair(scalar(), x[2 * i], x[2 * i + 1]), mark);
    store_relaxed(reinterpret_cast<u64*>(to), word[0], word[1]);
    store_relaxed(reinterpret_cast<u64*>(to + SECOND), word[2], word[3]);
}

// Called by a whole warp, whose lanes have loaded their x[i] from from(i), or cleared it: loads again what lacks the mark.
// With many rows a lane first waits for the mark of one, so that blocks that wait leave L2 to those that work; what it takes
// is loaded after that, whole.
template <int N, typename From> __device__ void await(Eight (&x)[N], u32 mark, int rows, const From& from) {
    long long start = -1;
    while (true) {
        const u32* missing = nullptr;
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (!x[i].has(mark)) missing = from(i);
        if (!__any_sync(~0u, missing != nullptr)) return;
        if (start < 0) start = clock64();
        if (missing && rows > POLLED_ROWS)
            while (mark_of(load_word(missing)) != mark) fault_after_seconds(start);
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (!x[i].has(mark)) x[i].load(from(i));
        fault_after_seconds(start);
    }
}
