#pragma once
// Marked words: how phases of decoder_step.cu hand on states with MARKED. A word of 8 bytes has two numbers of 16 bits in its
// low half, and in its high half the mark of the phase that wrote it. A reader loads a word until it has the mark that it
// expects. Each word is whole, so no fence and no order between accesses is needed.
#include "common/global_memory.cuh"
#include "common/pack.cuh"

// A number takes 4 bytes, so `states + i` is the word of the numbers i and i + 1. Of 32 adjacent numbers each 8 are loaded
// by a lane in two loads; the words of a load are adjacent for adjacent lanes.
__device__ const u32* words_of(const scalar* states) { return reinterpret_cast<const u32*>(states); }
__device__ u32* words_of(scalar* states) { return reinterpret_cast<u32*>(states); }
__device__ int word_at(int column) { return (column & ~31) | (column & 4) << 2 | (column & 24) >> 1 | (column & 3); }
constexpr int SECOND = 16;  // from numbers 0 .. 3 of eight to numbers 4 .. 7

__device__ u64 marked(u32 numbers, u32 mark) { return (u64)mark << 32 | numbers; }
__device__ u32 mark_of(u64 word) { return word >> 32; }
__device__ u64 load_word(const u32* from) { return load_relaxed(reinterpret_cast<const u64*>(from)); }
__device__ void store_word(u32* to, u32 numbers, u32 mark) {
    store_relaxed(reinterpret_cast<u64*>(to), marked(numbers, mark));
}
// A word that is nearly always there when it is asked for.
__device__ u32 await_word(u64 word, const u32* from, u32 mark) {
    if (mark_of(word) == mark) return word;
    const long long start = clock64();
    while (mark_of(word = load_word(from)) != mark) fault_after_seconds(start);
    return word;
}

// A pair of floats in two words.
__device__ u32* words_of(float2* pairs) { return reinterpret_cast<u32*>(pairs); }
__device__ void store_pair(u32* to, float a, float b, u32 mark) {
    store_relaxed(reinterpret_cast<u64*>(to), marked(__float_as_uint(a), mark), marked(__float_as_uint(b), mark));
}
__device__ float2 load_pair(const u32* from, u32 mark, u32& lacks) {
    u64 a, b;
    load_relaxed(a, b, reinterpret_cast<const u64*>(from));
    lacks |= (mark_of(a) ^ mark) | (mark_of(b) ^ mark);
    return make_float2(__uint_as_float(a), __uint_as_float(b));
}

// Eight numbers of a row, from a multiple of 8, and the marks of their words.
struct Eight {
    uint4 numbers, marks;
    __device__ void load(const u32* from) {
        u64 word[4];
        load_relaxed(word[0], word[1], reinterpret_cast<const u64*>(from));
        load_relaxed(word[2], word[3], reinterpret_cast<const u64*>(from + SECOND));
        numbers = make_uint4(word[0], word[1], word[2], word[3]);
        marks = make_uint4(mark_of(word[0]), mark_of(word[1]), mark_of(word[2]), mark_of(word[3]));
    }
    __device__ u32 lacks(u32 mark) const { return (marks.x ^ mark) | (marks.y ^ mark) | (marks.z ^ mark) | (marks.w ^ mark); }
};
__device__ void store_eight(u32* to, const float (&x)[8], u32 mark) {
    u64 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = marked(pack_pair(scalar(), x[2 * i], x[2 * i + 1]), mark);
    store_relaxed(reinterpret_cast<u64*>(to), word[0], word[1]);
    store_relaxed(reinterpret_cast<u64*>(to + SECOND), word[2], word[3]);
}
