#pragma once
#include "common/cp_async.cuh"
#include "common/global_memory.cuh"
#include "common/pair.cuh"
// N adjacent elements of a row, moved by one instruction up to 16 bytes.

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T x[N];
};

template <int N, typename T>
__device__ inline Pack<T, N> load_pack(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, typename T>
__device__ inline void store_pack(T* to, const float (&values)[N]) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        u32 pair[N / 2];
#pragma unroll
        for (int i = 0; i < N; i += 2) pair[i / 2] = pack_pair(T(), values[i], values[i + 1]);
        if constexpr (N == 8) store_16_bytes(to, pair[0], pair[1], pair[2], pair[3]);
        else if constexpr (N == 4) *reinterpret_cast<uint2*>(to) = make_uint2(pair[0], pair[1]);
        else *reinterpret_cast<u32*>(to) = pair[0];
    } else if constexpr (sizeof(T) == 4 && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            store_16_bytes(to + i, __float_as_uint(values[i]), __float_as_uint(values[i + 1]),
                           __float_as_uint(values[i + 2]), __float_as_uint(values[i + 3]));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = (T)values[i];
    }
}

// The elements of a pack as float32.
template <int N, typename T>
__device__ inline void unpack(float (&values)[N], const Pack<T, N>& pack) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float2 pair = unpack_pair(T(), pack.x[i].bits | (u32)pack.x[i + 1].bits << 16);
            values[i] = pair.x, values[i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = (float)pack.x[i];
    }
}

// Loads past L1, for data that other blocks of this launch wrote.
template <int N>
__device__ inline Pack<float, N> load_pack_shared(const float* from) {
    Pack<float, N> pack;
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = __ldcg(reinterpret_cast<const float4*>(from + i));
            pack.x[i] = four.x, pack.x[i + 1] = four.y, pack.x[i + 2] = four.z, pack.x[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) pack.x[i] = __ldcg(from + i);
    }
    return pack;
}

// Copies a pack to shared memory, by cp.async where that supports the size. The thread must call cp_async_wait_all()
// before it reads the copy.
template <int N, typename T>
__device__ inline void fetch_pack(Pack<T, N>* to, const T* from) {
    constexpr int BYTES = sizeof(T) * N;
    if constexpr (BYTES == 4 || BYTES == 8 || BYTES == 16) {
        cp_async_small<BYTES>((u32)__cvta_generic_to_shared(to), from);
    } else {
        *to = load_pack<N>(from);
    }
}

constexpr int MOST_PACKS = 16;
#if __CUDA_ARCH__ < 800
// fetch_pack(to + t * step, from(t)) for t = 0 .. count - 1, and anything up to a multiple of MOST_PACKS. All loads of up to
// MOST_PACKS come before the first store: the compiler moves none before a store if its address comes from shared memory.
template <int N, typename T, typename From>
__device__ inline void fetch_packs(Pack<T, N>* to, int step, int count, const From& from) {
    constexpr int BYTES = sizeof(Pack<T, N>), PACKS = BYTES > 8 ? MOST_PACKS / 2 : MOST_PACKS;
    struct alignas(BYTES) Bytes { char x[BYTES]; };  // one register for four, not one for each element
#pragma unroll 1
    for (int begin = 0; begin < count; begin += PACKS) {
        Bytes packs[PACKS];
#pragma unroll
        for (int u = 0; u < PACKS; ++u) packs[u] = *(const Bytes*)from(min(begin + u, count - 1));
#pragma unroll
        for (int u = 0; u < PACKS; ++u) *(Bytes*)(to + (begin + u) * step) = packs[u];
    }
}
#endif
