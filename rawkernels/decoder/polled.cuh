#pragma once
// How phases of decoder_step.cu hand on numbers with POLLED. The arrays for them hold zeros when a launch begins. A word of 4
// bytes, two numbers of 16 bits, is written once, and never as zero bits: -0 is written instead. So a reader loads a word
// until it is not zero. Each word is whole, so no fence and no order between accesses is needed.
#include "common/global_memory.cuh"
#include "common/pack.cuh"

__device__ u32 not_zero(u32 word) { return word ? word : 0x80000000; }
__device__ bool lacks(uint4 x) { return !x.x || !x.y || !x.z || !x.w; }  // a word of these
__device__ void hand_on(scalar* to, u32 word) { store_relaxed(reinterpret_cast<u32*>(to), not_zero(word)); }
__device__ void hand_on(scalar* to, const float (&x)[8]) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = not_zero(pack_pair(scalar(), x[2 * i], x[2 * i + 1]));
    store_relaxed(reinterpret_cast<u32*>(to), word[0], word[1], word[2], word[3]);
}
// A word that is nearly always there when it is asked for.
__device__ u32 await_word(u32 word, const scalar* from) {
    if (word) return word;
    const long long start = clock64();
    while (!(word = load_relaxed(reinterpret_cast<const u32*>(from)))) fault_after_seconds(start);
    return word;
}
// For the launch after this one: a word, or eight numbers.
__device__ void clear_word(scalar* at) { *reinterpret_cast<u32*>(at) = 0; }
__device__ void clear_eight(scalar* at) { *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0); }
