#pragma once
// Samples the tables of attention's dropout (gpuattn/ops/attention/dropout.py): random words and bounds.
#include "common/philox.cuh"

// Words 4 draw .. 4 draw + 3 of a row of 16 queries or 16 keys; sheet = sequence * heads + head. Factors are odd, so their
// lowest random bits are not needed; those of a row of queries are collected in `point`.
__device__ __forceinline__ uint4 sample_words(PhiloxKey key, unsigned int row, unsigned int draw, unsigned int sheet,
                                            bool of_keys, unsigned int& point) {
    uint4 drawn = philox(key, row << 5 | draw, sheet | (unsigned int)of_keys << 31);
    if (of_keys) return drawn;
    if (draw < 16) point |= (drawn.x & 1) << draw;
    drawn.x |= 1, drawn.y |= 1;
    return drawn;
}
// The bounds of 16 queries as four bytes: the threshold rounded stochastically by the 16 random bits of `point`.
__device__ __forceinline__ unsigned int round_bounds(unsigned int point, unsigned int threshold) {
    const unsigned int whole = threshold / 512, rest = threshold % 512 * 128;
    unsigned int bounds = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
        const unsigned int quarter = byte % 2 * 2 + byte / 2;
        bounds |= (whole + ((point + (quarter << 14) & 0xffff) + rest >> 16)) << 8 * byte;
    }
    return bounds;
}
