// AdamW over flat buffers: the statistics of all gradients, then the update. Every scalar is in `state`.
// Constants: scalar = float, f16, bf16 (gradients); model_scalar = float, f16, bf16 (the model's copy);
//   BLOCK = 256
// Launch:    gradient_statistics: grid = (1 .. 512,), block = (BLOCK,), which depends on size alone, so that
//            the sum has one order. adamw_update: grid = (ceil(size / (8 * BLOCK)),), block = (BLOCK,).
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100

#include "common/reduce.cuh"

constexpr int PER_THREAD = 8;
constexpr int DECAY_BLOCK = 128;  // elements that share a byte of `decay`
constexpr float MIN_LOSS_SCALE = 1.f, MAX_LOSS_SCALE = 4294967296.f;
static_assert(BLOCK % 32 == 0, "adamw.cu: BLOCK must be a multiple of the warp size");

// The places in `state`, as in FIELDS of gpuattn/ops/adamw.py.
enum Field {
    LEARNING_RATE, STEP, DIVISOR, LOSS_SCALE, NORM, COEFFICIENT, SKIP, CLEAN_STEPS, SKIPPED, SKIPPED_IN_A_ROW,
    CLAMPED, BLOCKS_DONE
};

__device__ float& number(unsigned int* state, Field field) { return ((float*)state)[field]; }

// What follows from the sum of squares: see _statistics_reference in gpuattn/ops/adamw.py.
__device__ void conclude(unsigned int* state, float sum, float max_norm, unsigned int growth_interval) {
    const float scale = number(state, LOSS_SCALE);
    const float unscale = 1.f / (scale * number(state, DIVISOR));
    const float norm = sqrtf(sum) * unscale;
    const bool good = isfinite(norm);
    number(state, NORM) = norm;
    number(state, COEFFICIENT) = unscale * fminf(1.f, max_norm / (norm + 1e-6f));
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
    number(state, LOSS_SCALE) = allowed;
}

extern "C" __global__ void gradient_statistics(
    const scalar* __restrict__ grads,  // (size,)
    volatile float* partial,           // (gridDim.x,): sums of squares
    unsigned int* state,               // (12,)
    long long size,
    float max_norm,                    // may be inf
    unsigned int growth_interval) {    // 0: the loss scale stays
    float sum = 0.f;
    for (long long i = blockIdx.x * (long long)BLOCK + threadIdx.x; i < size; i += (long long)gridDim.x * BLOCK) {
        const float g = (float)grads[i];
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
    for (unsigned int i = threadIdx.x; i < gridDim.x; i += BLOCK) sum += partial[i];
    sum = block_reduce<BLOCK>(sum, Sum(), 0.f);
    if (threadIdx.x == 0) {
        state[BLOCKS_DONE] = 0;
        conclude(state, sum, max_norm, growth_interval);
    }
}

extern "C" __global__ void adamw_update(
    float* __restrict__ params,               // (size,)
    const scalar* __restrict__ grads,         // (size,)
    float* __restrict__ exp_avg,              // (size,)
    float* __restrict__ exp_avg_sq,           // (size,)
    model_scalar* __restrict__ model,         // (size,) or null: a copy of the parameters
    const unsigned char* __restrict__ decay,  // (size / 128,), or null: all decay
    const unsigned int* __restrict__ state,   // (12,)
    long long size,
    float log_beta1,
    float rate1,                              // 1 - beta1
    float log_beta2,
    float rate2,
    float eps,
    float weight_decay) {
    if (state[SKIP]) return;
    const float* numbers = (const float*)state;
    const float step = (float)state[STEP], learning_rate = numbers[LEARNING_RATE];
    const float root2 = sqrtf(-expm1f(step * log_beta2));
    const float stride = learning_rate * root2 / -expm1f(step * log_beta1), floor = root2 * eps;
    const float keep = 1.f - learning_rate * weight_decay, coefficient = numbers[COEFFICIENT];

    const long long first = blockIdx.x * (long long)(BLOCK * PER_THREAD) + threadIdx.x;
#pragma unroll
    for (int e = 0; e < PER_THREAD; ++e) {
        const long long i = first + e * BLOCK;
        if (i >= size) return;
        const float g = (float)grads[i] * coefficient;
        const float m = exp_avg[i] + rate1 * (g - exp_avg[i]);
        const float v = exp_avg_sq[i] + rate2 * (g * g - exp_avg_sq[i]);
        const float p = params[i] * (!decay || decay[i / DECAY_BLOCK] ? keep : 1.f);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        params[i] = p - stride * (m / (sqrtf(v) + floor));
        if (model) model[i] = (model_scalar)params[i];
    }
}
