// The norm of all gradients, and from it: whether to skip the update, the clipping coefficient, the next loss scale.
// Constants: scalar = float, f16, bf16; BLOCK = 256
// Launch:    grid = (1 .. 1024,), a function of size alone, so that the order of the sum is fixed; block = (BLOCK,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121

#include "update/optimizer_state.cuh"
#include "common/reduce.cuh"

constexpr int WIDTH = 16 / sizeof(scalar);  // elements of a load
constexpr int IN_FLIGHT = 4;                // loads of a thread at a time
constexpr float MIN_LOSS_SCALE = 1.f, MAX_LOSS_SCALE = 4294967296.f;
static_assert(BLOCK % 32 == 0, "gradient_statistics.cu: BLOCK must be a multiple of the warp size");

// The same as _reference in gpuattn/ops/update/gradient_statistics.py.
__device__ void conclude(unsigned int* state, float sum, float max_norm, unsigned int growth_interval) {
    float* numbers = (float*)state;
    const float scale = numbers[LOSS_SCALE];
    const float unscale = 1.f / (scale * numbers[DIVISOR]);
    const float norm = sqrtf(sum) * unscale;
    const bool good = isfinite(norm);
    numbers[NORM] = norm;
    numbers[COEFFICIENT] = unscale * fminf(1.f, max_norm / (norm + 1e-6f));
    state[SKIP] = !good;
    state[STEP] += good;
    state[SKIPPED] += !good;
    state[SKIPPED_IN_A_ROW] = good ? 0 : state[SKIPPED_IN_A_ROW] + 1;
    if (growth_interval == 0) return;
    const unsigned int clean = good ? state[CLEAN_STEPS] + 1 : 0;
    const bool grow = clean >= growth_interval;
    const float wanted = grow ? scale * 2.f : good ? scale : scale * 0.5f;
    const float allowed = fminf(fmaxf(wanted, MIN_LOSS_SCALE), MAX_LOSS_SCALE);
    state[CLAMPED] += allowed != wanted;
    state[CLEAN_STEPS] = grow ? 0 : clean;
    numbers[LOSS_SCALE] = allowed;
}

// WIDTH independent sums of squares, so that additions do not wait for each other.
__device__ __forceinline__ void add_squares(float (&sums)[WIDTH], uint4 loaded) {
    const scalar* g = (const scalar*)&loaded;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sums[e] += (float)g[e] * (float)g[e];
}

extern "C" __global__ void __launch_bounds__(BLOCK) gradient_statistics(
    const scalar* __restrict__ grads,  // (size,), aligned to 16 bytes
    volatile float* partial,           // (gridDim.x,): sums of squares
    unsigned int* state,               // (12,)
    long long size,
    float max_norm,                    // may be inf
    unsigned int growth_interval) {    // 0: keep the loss scale
    const uint4* vectors = (const uint4*)grads;
    const long long count = size / WIDTH, stride = (long long)gridDim.x * BLOCK;
    long long i = blockIdx.x * (long long)BLOCK + threadIdx.x;
    float sums[WIDTH] = {};
    for (; i + (IN_FLIGHT - 1) * stride < count; i += IN_FLIGHT * stride) {
        uint4 loaded[IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; ++n) loaded[n] = __ldcg(vectors + i + n * stride);
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; ++n) add_squares(sums, loaded[n]);
    }
    for (; i < count; i += stride) add_squares(sums, __ldcg(vectors + i));
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sum += sums[e];
    if (blockIdx.x == 0 && threadIdx.x < size % WIDTH) {
        const float g = (float)grads[count * WIDTH + threadIdx.x];
        sum += g * g;
    }
    sum = block_reduce<BLOCK>(sum, Sum(), 0.f);

    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(&state[BLOCKS_DONE], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = 0.f;
    for (unsigned int n = threadIdx.x; n < gridDim.x; n += BLOCK) sum += partial[n];
    sum = block_reduce<BLOCK>(sum, Sum(), 0.f);
    if (threadIdx.x == 0) {
        state[BLOCKS_DONE] = 0;
        conclude(state, sum, max_norm, growth_interval);
    }
}
