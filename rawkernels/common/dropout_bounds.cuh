#pragma once
// The bounds of 16 queries in attention's dropout (gpuattn/ops/attention_dropout.py), as four bytes: rounded up or down as
// `point`, of 16 random bits, decides.
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
