#pragma once
// How phases of decoder_step.cu hand on numbers with POLLED. Arrays that they hand on hold zeros when a launch begins. A word
// of 4 bytes, two numbers of 16 bits or a float, is written once, and never as zero bits: -0 is written instead. So a reader
// loads a word until it is not zero. Each word is whole, so no fence and no order between accesses is needed.
#include "common/global_memory.cuh"
#include "common/pack.cuh"

__device__ u32 not_zero(u32 word) { return word ? word : 0x80000000; }
__device__ bool lacks(uint4 x) { return !x.x || !x.y || !x.z || !x.w; }  // a word of these
__device__ void hand_on(void* to, u32 word) { store_relaxed(static_cast<u32*>(to), not_zero(word)); }
__device__ void hand_on(scalar* to, const float (&x)[8]) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = not_zero(pack_pair(scalar(), x[2 * i], x[2 * i + 1]));
    store_relaxed(reinterpret_cast<u32*>(to), word[0], word[1], word[2], word[3]);
}
template <typename Pair> __device__ Pair* moved(Pair* pair, int by) { return reinterpret_cast<Pair*>((size_t)pair + 2ll * by); }
__device__ uint2 load_handed(const float2* from) {
    const uint2* words = reinterpret_cast<const uint2*>(from);
    return POLLED ? load_relaxed(words) : *words;
}
__device__ void hand_on(float2* to, float a, float b) {
    hand_on(&to->x, __float_as_uint(a));
    hand_on(&to->y, __float_as_uint(b));
}
// A word that is nearly always there when it is asked for.
__device__ u32 await_word(u32 word, const void* from) {
    if (word) return word;
    const long long start = clock64();
    while (!(word = load_relaxed(static_cast<const u32*>(from)))) fault_after_seconds(start);
    return word;
}
