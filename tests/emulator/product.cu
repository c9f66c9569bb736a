// A kernel for the emulator's tests: out = a b^T, with a tile a stored by threads and a tile b loaded by TMA.
// `mistake`: the number of the mistake to make, or 0 for none.
// Arch: sm_90a
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int BYTES = 64 * 128;

extern "C" __global__ void __launch_bounds__(128) product_of_tiles(
    const __grid_constant__ TensorMap a_map,    // (1, 64, 1, 64)
    const __grid_constant__ TensorMap b_map,    // the same
    const __grid_constant__ TensorMap out_map,  // the same
    int mistake) {
    const u32 bar = shared_base(), a = bar + 1024, b = a + BYTES, copy = b + BYTES;
    const int thread = threadIdx.x;
    if (thread == 0) {
        mbar_init(bar, 1);
        mbar_init_done();
    }
    __syncthreads();
    if (thread == 0) {
        mbar_expect(bar, mistake == 1 ? BYTES : 2 * BYTES);
        tma_load(a, a_map, bar, 0, 0, 0, 0);
        tma_load(b, b_map, bar, 0, 0, 0, 0);
    }
    if (mistake != 2) mbar_wait(bar, mistake == 3);
    for (int at = 4 * thread; at < BYTES; at += 512) store_shared(copy + at, load_shared(a + at));
    if (mistake != 4) fence_async_proxy();
    if (mistake != 5) bar_sync(1, mistake == 10 ? 160 : 128);

    float d[32];
    keep_live(d);
    if (mistake != 6) wgmma_fence();
    product<K_MAJOR, K_MAJOR, 64, 64, 64>(d, copy, b);
    wgmma_commit();
    if (mistake == 7) store_shared(b + 4 * thread, 0);
    if (mistake != 8) wgmma_wait<0>();
    keep_live(d);
    u32 rounded[4][4];
    pack(rounded, d);
    store_tile<64>(a, thread / 32 * 16, rounded);
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
        tma_store(out_map, a, 0, 0, 0, 0);
        bulk_commit();
        if (mistake != 9) bulk_wait_read();
    }
}
