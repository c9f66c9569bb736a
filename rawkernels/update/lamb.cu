// LAMB over flat buffers: Adam's direction, scaled to the norm of the tensor's weights. One launch computes the norms of
// all tensors, then the weights; a block waits for the norms of the tensor that it updates.
// weight: float, or bf16 without masters; copied: type of the model's 16-bit copy, float if there is none.
// Constants: scalar = float, f16, bf16 (gradients); weight = float; copied = float; BLOCK = 256
// Constants: scalar = float, f16; weight = float; copied = f16; BLOCK = 256
// Constants: scalar = float, bf16; weight = float, bf16; copied = bf16; BLOCK = 256
// Launch:    grid = (any,), block = (BLOCK,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121

#include "common/global_memory.cuh"
#include "common/reduce.cuh"
#include "update/optimizer.cuh"

constexpr int GROUPS = 4;                   // groups of four elements per thread
constexpr int TILE = BLOCK * 4 * GROUPS;    // elements of a tile

// An item of work is (first DECAY_BLOCK, number of DECAY_BLOCKs, tensor, Pass). In `items` all NORMS of a tensor precede its
// WEIGHTS. Blocks take items in this order, so a block only waits for items that others have already taken.
enum Pass { NORMS, WEIGHTS, BOTH };  // BOTH: a tensor without adaptation needs no norms
// From TENSORS on, for each tensor: the number of tiles whose norms are done, and the last round that is complete.
enum Control { TICKET, LEFT, ROUND, TENSORS };

// The second pass reads what other blocks wrote: these go to L2, past L1.
__device__ __forceinline__ Four load_four_l2(const float* from) {
    const float4 x = __ldcg((const float4*)from);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ Four load_four_l2(const bf16* from) {
    const uint2 x = __ldcg((const uint2*)from);
    const bf16* y = (const bf16*)&x;
    return {(float)y[0], (float)y[1], (float)y[2], (float)y[3]};
}
__device__ __forceinline__ void store_four_l2(float* to, const Four& x) {
    __stcg((float4*)to, make_float4(x.x[0], x.x[1], x.x[2], x.x[3]));
}

extern "C" __global__ void __launch_bounds__(BLOCK) lamb_update(
    weight* params,             // (size,)
    const scalar* grads,        // (size,)
    float* exp_avg,             // (size,)
    float* exp_avg_sq,          // (size,)
    copied* model,              // (size,) or null
    const int* items,           // (count, 4)
    const int* tensors,         // (tensors, 3): first DECAY_BLOCK; first element of `sums`, number of them
    float* sums,                // (tiles, 2): sums of squared weights and of squared directions
    float* ratios,              // (tensors,)
    unsigned int* control,      // (3 + 2 * tensors,), zeros before the first launch
    const unsigned int* state,  // (12,)
    int count,
    unsigned int seed_low,
    unsigned int seed_high,
    float log_beta1,
    float rate1,                // 1 - beta1
    float log_beta2,
    float rate2,
    float eps,
    float weight_decay) {
    if (state[SKIP]) return;
    const Moments moments(state, log_beta1, rate1, log_beta2, rate2, eps);
    const float coefficient = number(state, COEFFICIENT), learning_rate = number(state, LEARNING_RATE);
    const PhiloxKey key{seed_low, seed_high, ROUNDING, state[STEP]};
    const unsigned int round = control[ROUND] + 1;
    __shared__ unsigned int shared;

    unsigned int next = threadIdx.x == 0 ? atomicAdd(control + TICKET, 1u) : 0u;
    while (true) {
        __syncthreads();  // `shared` may still be read
        if (threadIdx.x == 0) shared = next;
        __syncthreads();
        const int now = (int)shared;
        if (now >= count) break;
        if (threadIdx.x == 0) next = atomicAdd(control + TICKET, 1u);
        const int4 item = ((const int4*)items)[now];
        const int *tensor = tensors + 3 * item.z, pass = item.w;
        unsigned int *arrived = control + TENSORS + 2 * item.z, *done = arrived + 1;
        const long long begin = (long long)item.x * DECAY_BLOCK, end = begin + item.y * DECAY_BLOCK;
        const float decay = pass == BOTH ? 0.f : weight_decay;
        float ratio = 1.f;
        if (pass == WEIGHTS) {
            if (threadIdx.x == 0) while (load_acquire(done) != round) {}
            __syncthreads();
            ratio = __ldcg(ratios + item.z);
        }
        float weights = 0.f, directions = 0.f;
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            const long long i = begin + 4 * threadIdx.x + n * 4 * BLOCK;
            if (i >= end) break;
            Four p = load_four_l2(params + i), m = load_four_l2(exp_avg + i), v = load_four_l2(exp_avg_sq + i);
            if (pass != WEIGHTS) {
                const Four g = load_four(grads + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) moments.update(g.x[e] * coefficient, m.x[e], v.x[e]);
                store_four_l2(exp_avg + i, m);
                store_four_l2(exp_avg_sq + i, v);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float direction = moments.direction(m.x[e], v.x[e]) + decay * p.x[e];
                weights += p.x[e] * p.x[e];
                directions += direction * direction;
                p.x[e] -= learning_rate * ratio * direction;
            }
            if (pass == NORMS) continue;
            store_weights(params + i, p, i, key);
            if (model) store_four(model + i, p);
        }
        if (pass != NORMS) continue;

        weights = block_reduce<BLOCK>(weights, Sum(), 0.f);
        directions = block_reduce<BLOCK>(directions, Sum(), 0.f);
        if (threadIdx.x == 0) {
            const int slot = tensor[1] + (item.x - tensor[0]) / (TILE / DECAY_BLOCK);
            __stcg((float2*)sums + slot, make_float2(weights, directions));
            __threadfence();
            shared = atomicAdd(arrived, 1u) == tensor[2] - 1;
        }
        __syncthreads();
        if (!shared) continue;
        __threadfence();
        weights = directions = 0.f;
        for (int n = threadIdx.x; n < tensor[2]; n += BLOCK) {
            const float2 sum = __ldcg((const float2*)sums + tensor[1] + n);
            weights += sum.x;
            directions += sum.y;
        }
        weights = block_reduce<BLOCK>(weights, Sum(), 0.f);
        directions = block_reduce<BLOCK>(directions, Sum(), 0.f);
        if (threadIdx.x == 0) {
            *arrived = 0;
            __stcg(ratios + item.z, weights > 0.f && directions > 0.f ? sqrtf(weights) / sqrtf(directions) : 1.f);
            store_release(done, round);
        }
    }
    if (threadIdx.x == 0 && atomicAdd(control + LEFT, 1u) == gridDim.x - 1) {  // all blocks have found the end
        control[TICKET] = control[LEFT] = 0;
        control[ROUND] = round;
    }
}
