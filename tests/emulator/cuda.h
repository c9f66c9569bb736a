// The parts of CUDA C++ and PTX that the kernels use. Each `asm` statement is translated to a call of the function named
// after its instruction, with the operands in the order of the instruction.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>

typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define __grid_constant__
#define __restrict__

struct uint3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

template <typename A, typename B> std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
template <typename To, typename From> To bits_as(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0.f ? x < 1.f ? x : 1.f : 0.f; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float fast_log2(float x) { return log2f(x); }
#define __log2f fast_log2
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? 0.f : a / b; }
template <typename T> T __ldg(const T* p) { return *p; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 bytes = a | (u64)b << 32;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
using std::isfinite;
using std::isnan;
inline u32 __funnelshift_rc(u32 low, u32 high, u32 n) { return n < 32 ? (low | (u64)high << 32) >> n : high; }
template <typename T> T __ldcs(const T* from) { return *from; }
template <typename T> void __stcs(T* to, T x) { *to = x; }
inline void griddepcontrol_wait() {}  // kernels run one after another
inline void griddepcontrol_launch_dependents() {}
long long clock64();
template <typename T> T atomicAdd(T* to, T x) { const T old = *to; *to += x; return old; }
template <typename T> T atomicMax(T* to, T x) { const T old = *to; if (x > old) *to = x; return old; }
inline u32 atomicInc(u32* to, u32 last) { const u32 old = *to; *to = old < last ? old + 1 : 0; return old; }
inline u32 atomicOr(u32* to, u32 x) { const u32 old = *to; *to |= x; return old; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(u32 x) { return x ? __builtin_ctz(x) + 1 : 0; }
inline u64 __umul64hi(u64 a, u64 b) { return (unsigned __int128)a * b >> 64; }
inline u32 __float2uint_rn(float x) { return (u32)rint((double)x); }
inline u32 __funnelshift_r(u32 low, u32 high, u32 n) { return (low | (u64)high << 32) >> n % 32; }

// ---- thread blocks and warps
void __syncthreads();
int __syncthreads_count(int x);
void __syncwarp();
u32 shuffle(u32 x, int lane);  // the x of that lane
template <typename T> T __shfl_sync(u32, T x, int lane) {
    if constexpr (sizeof(T) == 8) {
        const u64 bits = bits_as<u64>(x);
        const u32 low = shuffle((u32)bits, lane);
        return bits_as<T>((u64)shuffle((u32)(bits >> 32), lane) << 32 | low);
    } else {
        return bits_as<T>(shuffle(bits_as<u32>(x), lane));
    }
}
template <typename T> T __shfl_xor_sync(u32, T x, int mask) { return __shfl_sync(~0u, x, threadIdx.x % 32 ^ mask); }
template <typename T> T __shfl_up_sync(u32, T x, unsigned by) {
    const unsigned lane = threadIdx.x % 32;
    return __shfl_sync(~0u, x, lane < by ? lane : lane - by);
}
u32 __ballot_sync(u32, int x);
inline bool __any_sync(u32, bool x) { return __ballot_sync(~0u, x); }
inline u32 __reduce_min_sync(u32, u32 x) {
    for (int mask = 1; mask < 32; mask *= 2) x = min(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}
inline u32 __reduce_max_sync(u32, u32 x) { return ~__reduce_min_sync(~0u, ~x); }
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float&, float&, float&, float&, u32, u32, u32, u32, u32, u32, float,
                                                         float, float, float);
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float&, float&, float&, float&, u32, u32, u32, u32, u32, u32, float,
                                                       float, float, float);
void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float&, float&, float&, float&, u32, u32, u32, u32, u32, u32, float,
                                                        float, float, float);  // not emulated
void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(float&, float&, float&, float&, u32, u32, u32, float, float, float,
                                                      float);
void* dynamic_shared_memory(size_t alignment);  // aligned no better than that, and so is shared_variable
void* static_shared_memory();
void* shared_variable(int site, size_t bytes, size_t alignment);  // of this block; `site` numbers the declaration
size_t __cvta_generic_to_shared(const void* p);

// ---- numbers
inline float widen_f16(u32 x) { return bits_as<_Float16>((unsigned short)x); }
inline u32 narrow_f16(float x) { return bits_as<unsigned short>((_Float16)x); }
inline u32 narrow_bf16(float x) {
    const u32 u = __float_as_uint(x);
    return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline void prmt_b32(u32& r, u32 a, u32 b, u32 selector) {  // bit 3 of a selector replicates the byte's sign
    const u64 bytes = a | (u64)b << 32;
    r = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 choice = selector >> 4 * i, byte = bytes >> 8 * (choice & 7) & 0xff;
        r |= (choice & 8 ? byte >> 7 ? 0xff : 0 : byte) << 8 * i;
    }
}
inline void cvt_rn_bf16_f32(unsigned short& y, float x) { y = narrow_bf16(x); }
inline void cvt_rn_f16_f32(unsigned short& y, float x) { y = narrow_f16(x); }
inline void cvt_f32_f16(float& y, unsigned short x) { y = widen_f16(x); }
inline void cvt_f32_f16(u32 x, float& low, float& high) { low = widen_f16(x), high = widen_f16(x >> 16); }
inline void cvt_rn_bf16x2_f32(u32& y, float high, float low) { y = narrow_bf16(high) << 16 | narrow_bf16(low); }
inline void cvt_rn_f16x2_f32(u32& y, float high, float low) { y = narrow_f16(high) << 16 | narrow_f16(low); }
inline void cvt_rn_relu_bf16x2_f32(u32& y, float high, float low) { cvt_rn_bf16x2_f32(y, high > 0.f ? high : 0.f, low > 0.f ? low : 0.f); }
inline void cvt_rn_relu_f16x2_f32(u32& y, float high, float low) { cvt_rn_f16x2_f32(y, high > 0.f ? high : 0.f, low > 0.f ? low : 0.f); }
inline void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); y = y < FLT_MIN ? 0.f : y; }
// The lesser of each of two packed 16-bit numbers (`sign` -1: the greater); NaN where a is NaN.
template <typename F> u32 lesser_pair(u32 a, u32 b, float sign, F widen) {
    u32 pair = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const u32 p = a >> shift & 0xffff, q = b >> shift & 0xffff;
        pair |= (sign * widen(p) > sign * widen(q) ? q : p) << shift;
    }
    return pair;
}
inline float widen_bf16(u32 x) { return __uint_as_float(x << 16); }
inline void min_NaN_bf16x2(u32& y, u32 a, u32 b) { y = lesser_pair(a, b, 1, widen_bf16); }
inline void max_NaN_bf16x2(u32& y, u32 a, u32 b) { y = lesser_pair(a, b, -1, widen_bf16); }
inline void min_NaN_f16x2(u32& y, u32 a, u32 b) { y = lesser_pair(a, b, 1, widen_f16); }
inline void max_NaN_f16x2(u32& y, u32 a, u32 b) { y = lesser_pair(a, b, -1, widen_f16); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = 1 / x; }
inline void fma_rn_bf16x2(u32& y, u32 a, u32 b, u32 c) {
    cvt_rn_bf16x2_f32(y, widen_bf16(a >> 16) * widen_bf16(b >> 16) + widen_bf16(c >> 16),
                      widen_bf16(a) * widen_bf16(b) + widen_bf16(c));
}
inline void fma_rn_f16x2(u32& y, u32 a, u32 b, u32 c) {
    cvt_rn_f16x2_f32(y, widen_f16(a >> 16) * widen_f16(b >> 16) + widen_f16(c >> 16),
                     widen_f16(a) * widen_f16(b) + widen_f16(c));
}

// ---- shared memory
void load(u32 address, void* to, u32 bytes);
void store(u32 address, const void* from, u32 bytes);
inline void ld_shared_b32(u32& x, u32 address) { load(address, &x, 4); }
inline void ld_shared_u16(unsigned short& x, u32 address) { load(address, &x, 2); }
inline void ld_shared_v2_f32(float& x, float& y, u32 address) { float v[2]; load(address, v, 8); x = v[0], y = v[1]; }
inline void ld_shared_v2_u32(u32& x, u32& y, u32 address) { u32 v[2]; load(address, v, 8); x = v[0], y = v[1]; }
inline void ld_shared_v4_u32(u32& x, u32& y, u32& z, u32& w, u32 address) {
    u32 v[4];
    load(address, v, 16);
    x = v[0], y = v[1], z = v[2], w = v[3];
}
inline void st_shared_b32(u32 address, u32 x) { store(address, &x, 4); }
inline void st_shared_v4_b32(u32 address, u32 x, u32 y, u32 z, u32 w) {
    const u32 v[4] = {x, y, z, w};
    store(address, v, 16);
}
// Predicated: zeros where not `there`.
inline void ld_global_cg_v4_b32(int there, u32&, u32&, u32&, u32&, u32& x, u32& y, u32& z, u32& w, const void* from) {
    const uint4 v = there ? *(const uint4*)from : uint4{0, 0, 0, 0};
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void st_shared_v2_f32(u32 address, float x, float y) {
    const float v[] = {x, y};
    store(address, v, 8);
}
inline void st_shared_v4_f32(u32 address, float x, float y, float z, float w) {
    const float v[] = {x, y, z, w};
    store(address, v, 16);
}
void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 address, u32 a, u32 b, u32 c, u32 d);
void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 address, u32 a, u32 b, u32 c, u32 d);
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address);
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 address);
void movmatrix_sync_aligned_m8n8_trans_b16(u32& y, u32 x);
void fence_proxy_async_shared_cta();

// ---- global memory
void check_global(const void* address);  // instructions for global memory fault at addresses of shared memory
template <typename T> T __ldcg(const T* from) { return check_global(from), *from; }
template <typename T> void __stcg(T* to, T x) { check_global(to), *to = x; }
inline void __threadfence() {}
void st_global_b32(u64 address, int x);
inline void max_NaN_f32(float& y, float a, float b) { y = a != a || b != b ? NAN : fmaxf(a, b); }
inline void atom_acq_rel_gpu_global_inc_u32(u32& before, u32* to, u32 last) {
    before = *to;
    *to = before < last ? before + 1 : 0;
}
inline void st_global_v4_b32(void* to, u32 x, u32 y, u32 z, u32 w) {
    check_global(to);
    *(uint4*)to = {x, y, z, w};
}
template <typename T> void mad_wide_s32(T*& y, int by, T* x) { y = x + by; }
inline void st_global_cs_v4_b32(void* to, u32 x, u32 y, u32 z, u32 w) {
    st_global_v4_b32(to, x, y, z, w);
}
inline void ld_global_v4_b32(u32& x, u32& y, u32& z, u32& w, const void* from) {
    check_global(from);
    const uint4 v = *(const uint4*)from;
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ld_global_v4_b32(int wanted, u32& x, u32& y, u32& z, u32& w, const void* from) {
    if (wanted) ld_global_v4_b32(x, y, z, w, from);
}
inline void ld_global_cs_v4_b32(u32& x, u32& y, u32& z, u32& w, const void* from) {
    ld_global_v4_b32(x, y, z, w, from);
}
void ld_acquire_gpu_global_b32(int& x, const int* from);
void ld_relaxed_gpu_global_b32(u32& x, const u32* from);
void ld_relaxed_gpu_global_v4_b32(u32& x, u32& y, u32& z, u32& w, const void* from);
void st_relaxed_gpu_global_b32(u32* to, u32 x);
void st_relaxed_gpu_global_v4_b32(u32* to, u32 x, u32 y, u32 z, u32 w);
void red_release_gpu_global_add_s32(int* to);
void ld_acquire_gpu_global_u32(u32& x, const u32* from);
inline void st_release_gpu_global_b32(int* to, int x) { *to = x; }
inline void st_release_gpu_global_u32(u32* to, u32 x) { *to = x; }
inline void red_global_add_v4_f32(float* to, float x, float y, float z, float w) {
    check_global(to);
    float4& sum = *(float4*)to;
    sum = {sum.x + x, sum.y + y, sum.z + z, sum.w + w};
}
inline void fence_proxy_async_global() {}
inline void fence_acq_rel_gpu() {}

// ---- barriers
void mbarrier_init_shared_cta_b64(u32 bar, u32 arrivals);
inline void fence_mbarrier_init_release_cluster() {}
void mbarrier_arrive_expect_tx_shared_cta_b64(u32 bar, u32 bytes);
void mbarrier_arrive_shared_cta_b64(u32 bar);
inline void mbarrier_arrive_shared_cta_b64(u32 loaded, u32 bar) { if (~loaded) mbarrier_arrive_shared_cta_b64(bar); }
void mbarrier_try_wait_parity_shared_cta_b64(u32 bar, u32 parity, u32& done);  // returns when the phase is complete
void bar_sync(int id, int threads);
void bar_arrive(int id, int threads);
void bar_red_or_pred(u32 x, int id, int threads, u32& any);
inline void setmaxnreg_dec_sync_aligned_u32(int = 0) {}
inline void setmaxnreg_inc_sync_aligned_u32(int = 0) {}

// ---- clusters: an address in another block has 1 + that block's rank in bits 24 and above
void mov_u32(int& rank);
void barrier_cluster_arrive();
void barrier_cluster_wait();
inline void barrier_cluster_arrive_relaxed() { barrier_cluster_arrive(); }
inline void barrier_cluster_wait_acquire() { barrier_cluster_wait(); }
inline void mapa_shared_cluster_u32(u32& there, u32 here, int rank) { there = here | (rank + 1) << 24; }
void mbarrier_arrive_shared_cluster_b64(u32 bar);
void st_shared_cluster_b64(u32 address, u64 x);
void ld_shared_cluster_b64(u64& x, u32 address);
void st_shared_cluster_v2_f32(u32 address, float x, float y);
void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(u32 address, u32 x, u32 bar);
void st_async_shared_cluster_mbarrier_complete_tx_bytes_v2_f32(u32 address, float x, float y, u32 bar);
void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_b32(u32 address, u32 x, u32 y, u32 z, u32 w, u32 bar);

// ---- copies of single threads
void copy_later(u32 dst, const void* src, u32 size, u32 bytes);  // zeros after `bytes` of the source
inline void cp_async_cg_shared_global(u32 dst, const void* src, int bytes = 16) { copy_later(dst, src, 16, bytes); }
inline void cp_async_ca_shared_global(u32 dst, const void* src, int size) { copy_later(dst, src, size, size); }
void cp_async_commit_group();
void cp_async_wait_group(int pending);

// ---- TMA
void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    u32 dst, const void* map, int column, int row, int head, int batch, u32 bar, u64 hint);
void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    u32 dst, const void* map, int column, int row, int head, int batch, u32 bar, unsigned short ranks);
void cp_async_bulk_tensor_4d_global_shared_cta_bulk_group(
    const void* map, int column, int row, int head, int batch, u32 src);
inline void prefetch_tensormap(const void*) {}
inline void prefetch_global_L2(const void*) {}
void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 dst, const void* src, u32 bytes, u32 bar);
void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    u32 dst, const void* src, u32 bytes, u32 bar, u64 hint);
void cp_async_bulk_prefetch_L2_global(const void* src, u32 bytes);
void cp_async_bulk_global_shared_cta_bulk_group(void* dst, u32 src, u32 bytes);
void cp_reduce_async_bulk_global_shared_cta_bulk_group_add_f32(float* dst, u32 src, u32 bytes);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group(int pending = 0);
void cp_async_bulk_wait_group_read(int pending = 0);

// ---- wgmma
void wgmma_fence_sync_aligned();
void wgmma_commit_group_sync_aligned();
void wgmma_wait_group_sync_aligned(int pending);
// d (64 x columns) = a b, or += with `add`; a: this thread's fragment, or null for the tile with descriptor a_tile
void wgmma(int columns, bool is_f16, bool add, float* d, const u32* a, u64 a_tile, u64 b_tile, bool a_mn, bool b_mn);
template <int N, typename... X> void wgmma_mma_async(bool is_f16, int add, float& d, X&&... more) {
    const auto x = std::forward_as_tuple(more...);  // the other accumulators, then the operands
    constexpr int a = N / 2 - 1;
    static_assert(sizeof...(X) == a + 4 || sizeof...(X) == a + 6);
    if (&d + a != &std::get<a - 1>(x)) abort();
    if constexpr (sizeof...(X) == a + 4)
        wgmma(N, is_f16, add, &d, nullptr, std::get<a>(x), std::get<a + 1>(x), std::get<a + 2>(x), std::get<a + 3>(x));
    else
        wgmma(N, is_f16, add, &d, &std::get<a>(x), 0, std::get<a + 4>(x), false, std::get<a + 5>(x));
}
