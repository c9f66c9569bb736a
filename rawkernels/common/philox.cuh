#pragma once
// Philox4x32-7: the same bits as gpuattn/rng.py, which explains the counter.

struct PhiloxKey { unsigned int seed_low, seed_high, stream, step; };

// `device_step`, unless null, holds the step in device memory and replaces `step` (for CUDA graphs).
__device__ inline PhiloxKey philox_key(unsigned int seed_low, unsigned int seed_high, unsigned int stream,
                                       unsigned int step, const unsigned int* device_step) {
    return {seed_low, seed_high, stream, device_step ? *device_step : step};
}

__device__ inline uint4 philox(PhiloxKey key, unsigned int c0, unsigned int c1) {
    unsigned int c2 = key.stream, c3 = key.step, k0 = key.seed_low, k1 = key.seed_high;
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        unsigned int low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
        unsigned int low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

// 16-bit number 0 .. 7 of four words, the low half of a word first.
__device__ inline unsigned int philox_lane(uint4 words, int lane) {
    unsigned int word = lane < 4 ? (lane < 2 ? words.x : words.y) : (lane < 6 ? words.z : words.w);
    return lane % 2 ? word >> 16 : word & 0xFFFFu;
}

// The 16-bit number of the element with this logical index.
__device__ inline unsigned int philox_u16(PhiloxKey key, unsigned long long index) {
    unsigned long long block = index / 8;
    return philox_lane(philox(key, (unsigned int)block, (unsigned int)(block >> 32)), (int)(index % 8));
}
