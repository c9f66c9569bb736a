// Dropout: y = x * (kept ? factor : 0), forward and backward. The mask is not stored: it is a function of the key and the
// element's index.
// Constants: scalar = float, f16, bf16; BLOCK = 256
// Launch:    grid = (ceil(count / (8 * BLOCK)),), block = (BLOCK,). A thread takes the eight elements whose
//            random bits come from one Philox counter.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/pack.cuh"
#include "common/philox.cuh"

constexpr int EACH = 8;  // elements of a thread

extern "C" __global__ void dropout_apply(
    const scalar* __restrict__ x,  // (count,)
    scalar* __restrict__ y,        // (count,)
    long long count,
    unsigned int threshold,        // keep 16-bit numbers below it; 65536 keeps all
    float factor,                  // 1 / (1 - p)
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* __restrict__ device_step) {
    const long long counter = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (counter * EACH >= count) return;
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    const uint4 words = philox(key, (unsigned int)counter, (unsigned int)(counter >> 32));
    const auto scale = [&](int lane) { return philox_lane(words, lane) < threshold ? factor : 0.f; };
    const long long first = counter * EACH;
    const bool aligned = ((unsigned long long)x | (unsigned long long)y) % 16 == 0;
    if (aligned && first + EACH <= count) {
        float values[EACH];
        unpack(values, load_pack<EACH>(x + first));
#pragma unroll
        for (int lane = 0; lane < EACH; ++lane) values[lane] *= scale(lane);
        store_pack(y + first, values);
        return;
    }
#pragma unroll
    for (int lane = 0; lane < EACH; ++lane) {
        if (first + lane < count) y[first + lane] = (scalar)((float)x[first + lane] * scale(lane));
    }
}
