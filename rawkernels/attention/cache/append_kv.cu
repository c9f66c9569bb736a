// Appends new keys and values to a cache: token t of sequence b goes to position lengths[b] + t.
// Constants: scalar = float, f16, bf16
// Launch:    grid = (sequences * tokens,), block = (128,). A block copies one token.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention.cuh"
#include "common/index.cuh"

extern "C" __global__ void __launch_bounds__(128, __CUDA_ARCH__ >= 1200 ? 8 : 0) append_kv(
    const scalar* __restrict__ k,         // (N, T, Hk, D) by strides
    const scalar* __restrict__ v,         // (N, T, Hk, Dv)
    scalar* __restrict__ k_cache,         // (N, S, Hk, D) or (pages, page, Hk, D) by strides
    scalar* __restrict__ v_cache,
    const int* __restrict__ lengths,      // (N,)
    const int* __restrict__ pages,        // (N, room / page), or null
    const Strides k_strides,
    const Strides v_strides,
    const Strides k_cache_strides,
    const Strides v_cache_strides,
    int tokens,
    int kv_heads,
    int head_dim,
    int value_dim,
    int room,                             // capacity of the cache per sequence
    int page,
    int page_count,
    long long* length_flag,
    long long* page_flag) {
    const int number = blockIdx.x / tokens, token = blockIdx.x % tokens;
    long long outer = number, inner = (long long)lengths[number] + token;
    if (out_of_range(inner, room, length_flag)) return;
    if (pages) {
        outer = pages[(long long)number * (room / page) + inner / page];
        inner %= page;
        if (out_of_range(outer, page_count, page_flag)) return;
    }
    k += number * k_strides.batch + token * k_strides.row;
    v += number * v_strides.batch + token * v_strides.row;
    k_cache += outer * k_cache_strides.batch + inner * k_cache_strides.row;
    v_cache += outer * v_cache_strides.batch + inner * v_cache_strides.row;
    for (int e = threadIdx.x; e < kv_heads * head_dim; e += 128) {
        const int head = e / head_dim, column = e % head_dim;
        k_cache[head * k_cache_strides.head + column * k_cache_strides.column] =
            k[head * k_strides.head + column * k_strides.column];
    }
    for (int e = threadIdx.x; e < kv_heads * value_dim; e += 128) {
        const int head = e / value_dim, column = e % value_dim;
        v_cache[head * v_cache_strides.head + column * v_cache_strides.column] =
            v[head * v_strides.head + column * v_strides.column];
    }
}
