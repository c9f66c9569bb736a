#pragma once
// Dropout of a thread's packs of a row.
#include "common/philox.cuh"
#include "norm/norm.cuh"

struct Dropout {
    PhiloxKey key;
    unsigned int threshold;
    float factor;

    // Applies dropout to the elements index .. index + VEC - 1; index is a multiple of VEC. A threshold of 65536 keeps all.
    __device__ __forceinline__ void operator()(float (&values)[VEC], long long index) const {
        if (threshold > 0xFFFFu) return;
        const unsigned long long counter = (unsigned long long)index / 8;
        uint4 words = philox(key, (unsigned int)counter, (unsigned int)(counter >> 32));
        if constexpr (VEC == 1) {
            values[0] *= philox_lane(words, (int)(index % 8)) < threshold ? factor : 0.f;
        } else {
            if (VEC == 4 && index % 8) words.x = words.z, words.y = words.w;
#pragma unroll
            for (int i = 0; i < VEC; ++i) values[i] *= philox_lane(words, i) < threshold ? factor : 0.f;
        }
    }
};
