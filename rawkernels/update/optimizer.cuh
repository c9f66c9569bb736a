#pragma once
// Updates of flat buffers by an optimizer's rule, four adjacent elements per thread. The including file has the constants
//   scalar   type of the gradients
//   weight   type of the parameters: float, or bf16 with stochastic rounding
//   copied   type of the model's copy of the parameters
//   BLOCK    threads of a block
#include "common/philox.cuh"
#include "update/optimizer_state.cuh"

constexpr int DECAY_BLOCK = 128;                 // elements that share a byte of `decay`; sizes are multiples of it
constexpr unsigned int ROUNDING = 0xFFFFFFFEu;   // the Philox stream for stochastic rounding

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

// Stores new weights: float as it is, bf16 with stochastic rounding, whose expected value is the weight. Element i uses the
// 16 random bits of index i.
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

// The buffers of a launch; `first` and `second` are moments, null where the rule has none.
struct Buffers {
    weight* params;
    const scalar* grads;
    float *first, *second;
    copied* model;                // null: no copy
    const unsigned char* decay;   // (size / 128,), or null: all decay
    const unsigned int* state;
    long long size;
    unsigned int seed_low, seed_high;

    __device__ __forceinline__ PhiloxKey key() const { return {seed_low, seed_high, ROUNDING, state[STEP]}; }
};

// Updates four elements per thread; rule(p, g, first, second, decays) returns the new p. Blocks go from the end of the
// buffers to the start: gradient_statistics read the end last, so it is still in L2.
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

// ---- moments of Adam and LAMB
struct Moments {
    float rate1, rate2, stride, floor;

    // log_beta is log(beta), rate is 1 - beta. direction() returns m' / (sqrt(v') + eps) of the bias-corrected moments.
    __device__ __forceinline__ Moments(const unsigned int* state, float log_beta1, float rate1, float log_beta2,
                                       float rate2, float eps) : rate1(rate1), rate2(rate2) {
        const float step = (float)state[STEP], root2 = sqrtf(-expm1f(step * log_beta2));
        stride = root2 / -expm1f(step * log_beta1);
        floor = root2 * eps;
    }
    __device__ __forceinline__ void update(float g, float& m, float& v) const {
        m += rate1 * (g - m);
        v += rate2 * (g * g - v);
    }
    __device__ __forceinline__ float direction(float m, float v) const { return stride * (m / (sqrtf(v) + floor)); }
};
