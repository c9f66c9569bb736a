#pragma once
// Logits in accumulators of mma.sync (see mma.cuh): d[n] is 16 queries x keys 8n .. 8n + 7, of which a lane has queries i,
// i + 8 and keys j + 8n, j + 8n + 1. Logits are in base 2: p = exp2(logit - lse / log(2)).
#include "attention/common/attention_dropout.cuh"
#include "common/compiler.cuh"
#include "common/math.cuh"
#include "common/mma.cuh"

// The keys low .. high that a query sees.
struct Seen { int low, high; };
__device__ __forceinline__ Seen seen_by(const Attention& a, const Sequence& s, int i) {
    const int at = i + s.offset;
    return {at - a.left, i < s.queries ? min(s.keys - 1, at + a.right) : -1};
}
template <int N>
__device__ __forceinline__ void apply_mask(const Attention& a, const Sequence& s, int i, int j, float (&d)[N][4]) {
    i = opaque(i);
    const Seen seen[2] = {seen_by(a, s, i), seen_by(a, s, i + 8)};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = j + 8 * n + e % 2;
            if (key < seen[e / 2].low || key > seen[e / 2].high) d[n][e] = NEG_INF;
        }
}

// ---- from products to logits with more than a positive scale
// The absolute error is at most 2e-7.
__device__ __forceinline__ float tanh_fast(float x) {
    const float e = exp2_fast(-2.f * LOG2E * fabsf(x));
    return copysignf(__fdividef(1.f - e, 1.f + e), x);
}
template <typename T> __device__ __forceinline__ float add_bias(float x, T bias) { return x + (float)bias * LOG2E; }
__device__ __forceinline__ float add_bias(float x, bool seen) { return seen ? x : NEG_INF; }

template <typename T, bool PAIRED, int N>
__device__ __forceinline__ void add_biases(const Attention& a, const Sequence& s, int head, int i, int j, float (&d)[N][4]) {
    struct alignas(2 * sizeof(T)) Pair { T x, y; };
    const T* bias = (const T*)a.bias_data + s.number * a.bias.batch + head * a.bias.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const T* row = bias + min(i + 8 * half, s.queries - 1) * a.bias.row;  // keys and queries past the end are masked later
#pragma unroll
        for (int n = 0; n < N; ++n) {
            Pair b;
            if constexpr (PAIRED) {
                b = *(const Pair*)(row + min(j + 8 * n, (s.keys - 1) & ~1));
            } else {
                b.x = row[min(j + 8 * n, s.keys - 1) * a.bias.column];
                b.y = row[min(j + 8 * n + 1, s.keys - 1) * a.bias.column];
            }
            d[n][2 * half] = add_bias(d[n][2 * half], b.x);
            d[n][2 * half + 1] = add_bias(d[n][2 * half + 1], b.y);
        }
    }
}
// Turns products into logits, except for the window; softcap_grad[n], unless null, becomes the derivative of the softcap.
template <int N> __device__ __forceinline__ void apply_extras(const Attention& a, const Sequence& s, int head, int i, int j,
                                                              float (&d)[N][4], float (*softcap_grad)[4] = nullptr) {
    head = opaque(head), i = opaque(i), j = opaque(j);
    const float scale = a.scale * (a.softcap > 0.f ? 1.f / a.softcap : LOG2E), cap = a.softcap * LOG2E;
    const float slope = slope_of(a, s.number, head) * LOG2E, from = (float)(i + s.offset - j);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            d[n][e] *= scale;
            if (softcap_grad) softcap_grad[n][e] = 1.f;
        }
    if (a.softcap > 0.f)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float t = tanh_fast(d[n][e]);
                if (softcap_grad) softcap_grad[n][e] = 1.f - t * t;
                d[n][e] = t * cap;
            }
    if (a.slopes)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[n][e] -= slope * fabsf(from + (float)(8 * (e / 2) - 8 * n - e % 2));
    // adjacent biases are loaded in pairs where they are aligned
    const int size = a.bias_kind == 1 ? 1 : a.bias_kind == 2 ? 4 : 2;
    const long long even = a.bias.row | a.bias.head | a.bias.batch | a.keys | (long long)a.bias_data / size;
    if (a.bias.column == 1 && even % 2 == 0) {
        if (a.bias_kind == 1) add_biases<bool, true>(a, s, head, i, j, d);
        if (a.bias_kind == 2) add_biases<float, true>(a, s, head, i, j, d);
        if (a.bias_kind == 3) add_biases<scalar, true>(a, s, head, i, j, d);
    } else {
        if (a.bias_kind == 1) add_biases<bool, false>(a, s, head, i, j, d);
        if (a.bias_kind == 2) add_biases<float, false>(a, s, head, i, j, d);
        if (a.bias_kind == 3) add_biases<scalar, false>(a, s, head, i, j, d);
    }
}

// ---- dropout
__device__ __forceinline__ Kept kept_of_lane_opaque(const Attention& a, const Sequence& s, int head, int i, int j) {
    return kept_of_lane(a, s, opaque(head), opaque(i), opaque(j));
}
// Replaces the dropped ones of 16 x 16 packed probabilities by zeros.
__device__ __forceinline__ void apply_dropout(u32 (&p)[4], Kept words) {
#pragma unroll
    for (int n = 0; n < 4; ++n) p[n] &= pair_mask(words, byte_of(n));
}
// The same for the two accumulators that hold the probabilities.
__device__ __forceinline__ void apply_dropout(float (&left)[4], float (&right)[4], Kept words) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        float* pair = (n < 2 ? left : right) + n % 2 * 2;
        if (!kept(words.even, byte_of(n))) pair[0] = 0.f;
        if (!kept(words.odd, byte_of(n))) pair[1] = 0.f;
    }
}
