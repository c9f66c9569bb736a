#pragma once
// 16 bytes of logits as one vector, and parts of the normaliser of a log-softmax.
#include "common/global_memory.cuh"
#include "common/math.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"

constexpr float LOWEST = -3.4028235e38f, NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fffffff);

__device__ inline float exp_fast(float x) { return exp2_fast(x * LOG2E); }

// log-probability = x - peak - log(sum), with the normalisers of all parts of the row joined.
struct alignas(8) Normaliser { float peak, sum; };

// Joins the lanes' parts; every lane gets the result.
__device__ inline Normaliser warp_join(Normaliser mine) {
    const float peak = warp_reduce(mine.peak, Max{});
    return {peak, warp_reduce(mine.sum * exp_fast(mine.peak - peak), Sum{})};
}
// Joins the parts in a list.
__device__ inline Normaliser warp_join(const Normaliser* part, int parts) {
    Normaliser mine{LOWEST, 0.f};
#pragma unroll 2
    for (int p = threadIdx.x % 32; p < parts; p += 32) {
        const Normaliser other = part[p];
        const float peak = fmaxf(mine.peak, other.peak);
        mine = {peak, mine.sum * exp_fast(mine.peak - peak) + other.sum * exp_fast(other.peak - peak)};
    }
    return warp_join(mine);
}

// ---- vectors
template <typename T> constexpr int WIDTH = 16 / sizeof(T);

__device__ inline unsigned int word(uint4 v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }
__device__ inline float element(uint4 v, int e, float) { return __uint_as_float(word(v, e)); }
__device__ inline float element(uint4 v, int e, bf16) {
    return __uint_as_float(e % 2 ? word(v, e / 2) & 0xffff0000u : word(v, e / 2) << 16);
}
__device__ inline float element(uint4 v, int e, f16) {
    f16 x;
    x.bits = (unsigned short)(word(v, e / 2) >> e % 2 * 16);
    return (float)x;
}
// Elements that are all -inf.
__device__ inline uint4 nothing(u32 bits) { return {bits, bits, bits, bits}; }
__device__ inline uint4 nothing(float) { return nothing(0xff800000u); }
__device__ inline uint4 nothing(bf16) { return nothing(0xff80ff80u); }
__device__ inline uint4 nothing(f16) { return nothing(0xfc00fc00u); }

// The greatest element of a vector; NaN if there is one.
template <typename T>
__device__ float greatest_of(uint4 v) {
    if constexpr (__CUDA_ARCH__ < 800) {
        float greatest = NEG_INF;
        bool any_nan = false;
#pragma unroll
        for (int e = 0; e < WIDTH<T>; e += 2) {
            const float a = element(v, e, T{}), b = element(v, e + 1, T{});
            greatest = fmaxf(greatest, fmaxf(a, b)), any_nan |= is_nan(a, b);
        }
        return any_nan ? NOT_A_NUMBER : greatest;
    } else if constexpr (WIDTH<T> == 8) {
        v.x = max_nan_pair(T{}, max_nan_pair(T{}, v.x, v.y), max_nan_pair(T{}, v.z, v.w));
        return max_nan(element(v, 0, T{}), element(v, 1, T{}));
    } else {
        return max_nan(max_nan(element(v, 0, T{}), element(v, 1, T{})),
                       max_nan(element(v, 2, T{}), element(v, 3, T{})));
    }
}
template <typename T>
__device__ float greatest_but(uint4 v, unsigned int hidden) {  // bit e: ignore element e
    float greatest = NEG_INF;
#pragma unroll
    for (int e = 0; e < WIDTH<T>; ++e)
        if (!(hidden >> e & 1)) greatest = max_nan(greatest, element(v, e, T{}));
    return greatest;
}

// The vector from element j of a row on, with -inf past the row's end and where `banned`, (vocab,) or null, is true.
template <typename T>
__device__ uint4 allowed(uint4 v, int j, int vocab, const bool* banned) {
    union { uint4 vector; T elements[WIDTH<T>]; } out{v};
#pragma unroll
    for (int e = 0; e < WIDTH<T>; ++e)
        if (j + e >= vocab || (banned && banned[j + e])) out.elements[e] = (T)NEG_INF;
    return out.vector;
}

// A row of logits in global memory. Vector v holds elements WIDTH * v to WIDTH * v + WIDTH - 1, whatever the row's alignment;
// past the row's end they are anything. Only pieces of 16 bytes with elements of the row are read.
template <typename T>
struct LogitRow {
    const T* x;
    int vocab;

    __device__ int whole() const { return vocab / WIDTH<T>; }  // vectors that do not pass the end
    __device__ int vectors() const { return (vocab + WIDTH<T> - 1) / WIDTH<T>; }
    __device__ unsigned int shift() const { return (size_t)x % 16; }  // bytes of a vector that lie in the second of two pieces
    __device__ const uint4* piece(int v) const { return (const uint4*)((const char*)x - shift()) + v; }
    __device__ uint4 operator[](int v) const {
        const uint4 first = load_16_bytes(piece(v));
        if (shift() == 0) return first;
        const bool ends = (vocab - v * WIDTH<T>) * sizeof(T) + shift() <= 16;
        return joined(first, ends ? first : load_16_bytes(piece(v + 1)), shift());
    }
    // Bytes shift .. shift + 15 of a and b.
    __device__ static uint4 joined(uint4 a, uint4 b, unsigned int shift) {
        if (shift & 8) a = {a.z, a.w, b.x, b.y}, b = {b.z, b.w, 0, 0};
        if (shift & 4) a = {a.y, a.z, a.w, b.x}, b.x = b.y;
        const unsigned int bits = shift % 4 * 8;
        return {__funnelshift_r(a.x, a.y, bits), __funnelshift_r(a.y, a.z, bits), __funnelshift_r(a.z, a.w, bits),
                __funnelshift_r(a.w, b.x, bits)};
    }
};

constexpr int STAGE = 4;  // vectors that a thread loads at a time

// Starts to load vectors v, v + STRIDE ... of a stage, -inf from vector `end` on, which is at most row.whole(). `second`: the
// pieces behind them.
template <int STRIDE, typename T>
__device__ __forceinline__ void load_stage(uint4 (&to)[STAGE], const LogitRow<T>& row, int v, int end, int second = 0) {
    const uint4* from = row.piece(v + second);
#pragma unroll
    for (int i = 0; i < STAGE; ++i) to[i] = v + i * STRIDE < end ? load_16_bytes(from + i * STRIDE) : nothing(T{});
}
// The stage of a row that is not aligned.
template <int STRIDE, typename T>
__device__ __forceinline__ void load_shifted_stage(uint4 (&to)[STAGE], uint4 (&scratch)[STAGE], const LogitRow<T>& row, int v, int end) {
    load_stage<STRIDE>(to, row, v, end);
    load_stage<STRIDE>(scratch, row, v, end, 1);
#pragma unroll
    for (int i = 0; i < STAGE; ++i) to[i] = row.joined(to[i], scratch[i], row.shift());
}
// Adds the vector that passes the row's end, if it is one of v, v + STRIDE ... and lies before `end`, which is the same in all
// threads.
template <int STRIDE, typename T>
__device__ __forceinline__ void add_last_vector(uint4 (&to)[STAGE], const LogitRow<T>& row, int v, int end) {
    const int whole = row.whole();
    if (whole == row.vectors() || end <= whole) return;
    const uint4 last = allowed<T>(row[whole], whole * WIDTH<T>, row.vocab, nullptr);
#pragma unroll
    for (int i = 0; i < STAGE; ++i)
        if (v + i * STRIDE == whole) to[i] = last;
}
