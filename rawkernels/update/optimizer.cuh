#pragma once
// What the optimizers share: the state of a run, four neighbours of a buffer at a time, and an update of all elements.
// `scalar` (gradients), `weight` (parameters: float, or bf16 that are rounded at random), `copied` (the model's copy of
// them) and BLOCK are constants of the file that includes this.
#include "update/optimizer_state.cuh"
#include "common/philox.cuh"

constexpr int DECAY_BLOCK = 128;                 // elements that share a byte of `decay`, and that sizes are multiples of
constexpr unsigned int ROUNDING = 0xFFFFFFFEu;   // the stream of random numbers that new weights are rounded by

struct Four { float x[4]; };

__device__ __forceinline__ Four load_four(const float* from) {
    const float4 x = *(const float4*)from;
    return {x.x, x.y, x.z, x.w};
}
template <typename T> __device__ __forceinline__ Four load_four(const T* from) {
    const uint2 x = *(const uint2*)from;
    const T* y = (const T*)&x;
    return {(float)y[0], (float)y[1], (float)y[2], (float)y[3]};
}
__device__ __forceinline__ void store_four(float* to, const Four& x) {
    *(float4*)to = make_float4(x.x[0], x.x[1], x.x[2], x.x[3]);
}
template <typename T> __device__ __forceinline__ void store_four(T* to, const Four& x) {
    uint2 packed;
    T* y = (T*)&packed;
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = (T)x.x[e];
    *(uint2*)to = packed;
}

// New weights: as they are, or as one of the two bf16 around each, the nearer one the more often, so that the mean is
// right. Element i takes the 16 bits of index i.
__device__ __forceinline__ void store_weights(float* to, const Four& x, long long, const PhiloxKey&) { store_four(to, x); }
__device__ __forceinline__ void store_weights(bf16* to, const Four& x, long long i, const PhiloxKey& key) {
    const uint4 words = philox(key, (unsigned int)(i / 8), (unsigned int)(i / 8 >> 32));
    Four y;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const unsigned int bits = __float_as_uint(x.x[e]), lane = philox_lane(words, e + (i & 4));
        y.x[e] = isfinite(x.x[e]) ? __uint_as_float((bits + lane) & 0xffff0000u) : x.x[e];
    }
    store_four(to, y);
}

// Of one launch; `first` and `second` are moments, null where the rule has none.
struct Buffers {
    weight* params;
    const scalar* grads;
    float *first, *second;
    copied* model;                // null: no copy
    const unsigned char* decay;   // (size / 128,), null: all decay
    const unsigned int* state;
    long long size;
    unsigned int seed_low, seed_high;

    __device__ __forceinline__ PhiloxKey key() const { return {seed_low, seed_high, ROUNDING, state[STEP]}; }
};

// Four elements a thread, each by `rule(p, g, first, second, decays)`, which returns the new p. From the end on: what the
// statistics read last of the gradients is still in L2.
template <typename Rule> __device__ __forceinline__ void update(const Buffers& b, const Rule& rule) {
    const long long i = 4 * ((gridDim.x - 1 - blockIdx.x) * (long long)BLOCK + threadIdx.x);
    if (i >= b.size) return;
    Four g = load_four(b.grads + i), p = load_four(b.params + i), m = {}, v = {};
    if (b.first) m = load_four(b.first + i);
    if (b.second) v = load_four(b.second + i);
    const bool decays = !b.decay || b.decay[i / DECAY_BLOCK];
    const float coefficient = number(b.state, COEFFICIENT);
#pragma unroll
    for (int e = 0; e < 4; ++e) p.x[e] = rule(p.x[e], g.x[e] * coefficient, m.x[e], v.x[e], decays);
    if (b.first) store_four(b.first + i, m);
    if (b.second) store_four(b.second + i, v);
    store_weights(b.params + i, p, i, b.key());
    if (b.model) store_four(b.model + i, p);
}

// ---- Adam's moments, which LAMB has too
struct Moments {
    float rate1, rate2, stride, floor;

    // log_beta, rate: log(beta) and 1 - beta. direction() then returns m' / (sqrt(v') + eps), corrected for the start.
    __device__ __forceinline__ Moments(const unsigned int* state, float log_beta1, float rate1, float log_beta2,
                                       float rate2, float eps) : rate1(rate1), rate2(rate2) {
        const float step = (float)state[STEP], root2 = sqrtf(-expm1f(step * log_beta2));
        stride = root2 / -expm1f(step * log_beta1);
        floor = root2 * eps;
    }
    __device__ __forceinline__ void take(float g, float& m, float& v) const {
        m += rate1 * (g - m);
        v += rate2 * (g * g - v);
    }
    __device__ __forceinline__ float direction(float m, float v) const { return stride * (m / (sqrtf(v) + floor)); }
};
