// LAMB over flat buffers: Adam's direction, its length that of the tensor's weights. One launch: first the norms of all
// tensors, then their weights, where a block waits until the tensor's norms are known.
// weight: float, or bf16 without masters; copied: the model's 16-bit copy, float if none.
// Constants: scalar = float, f16, bf16 (gradients); weight = float; copied = float; BLOCK = 256
// Constants: scalar = float, f16; weight = float; copied = f16; BLOCK = 256
// Constants: scalar = float, bf16; weight = float, bf16; copied = bf16; BLOCK = 256
// Launch:    grid = (any,), block = (BLOCK,)
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100

#include "update/optimizer.cuh"
#include "common/reduce.cuh"

constexpr int GROUPS = 4, TILE = BLOCK * 4 * GROUPS;  // groups of four elements of a thread; elements of a tile

// What a block does with a tile: in `items` as (first DECAY_BLOCK, how many of them, tensor, Pass), in an order in which
// a tensor's NORMS all come before its WEIGHTS. Blocks take them in that order, so what one waits for is being done.
enum Pass { NORMS, WEIGHTS, BOTH };  // BOTH: of a tensor that is not adapted
enum Control { TICKET, LEFT, ROUND, TENSORS };  // then of each tensor: its tiles whose norms are taken, the last round done

__device__ __forceinline__ unsigned int acquire(const unsigned int* from) {
    unsigned int x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// Other blocks write what the second pass reads: from L2, past this multiprocessor's own cache.
__device__ __forceinline__ Four read_four(const float* from) {
    const float4 x = __ldcg((const float4*)from);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ Four read_four(const bf16* from) {
    const uint2 x = __ldcg((const uint2*)from);
    const bf16* y = (const bf16*)&x;
    return {(float)y[0], (float)y[1], (float)y[2], (float)y[3]};
}
__device__ __forceinline__ void keep_four(float* to, const Four& x) {
    __stcg((float4*)to, make_float4(x.x[0], x.x[1], x.x[2], x.x[3]));
}

extern "C" __global__ void __launch_bounds__(BLOCK) lamb_update(
    weight* params,             // (size,)
    const scalar* grads,        // (size,)
    float* exp_avg,             // (size,)
    float* exp_avg_sq,          // (size,)
    copied* model,              // (size,) or null
    const int* items,           // (count, 4)
    const int* tensors,         // (tensors, 3): first DECAY_BLOCK; first of `sums`, how many
    float* sums,                // (tiles, 2): squares of weights and of directions
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

    unsigned int following = threadIdx.x == 0 ? atomicAdd(control + TICKET, 1u) : 0u;
    while (true) {
        __syncthreads();  // `shared` may still be read
        if (threadIdx.x == 0) shared = following;
        __syncthreads();
        const int now = (int)shared;
        if (now >= count) break;
        if (threadIdx.x == 0) following = atomicAdd(control + TICKET, 1u);
        const int4 item = ((const int4*)items)[now];
        const int *tensor = tensors + 3 * item.z, pass = item.w;
        unsigned int *arrived = control + TENSORS + 2 * item.z, *done = arrived + 1;
        const long long begin = (long long)item.x * DECAY_BLOCK, end = begin + item.y * DECAY_BLOCK;
        const float decay = pass == BOTH ? 0.f : weight_decay;
        float ratio = 1.f;
        if (pass == WEIGHTS) {
            if (threadIdx.x == 0) while (acquire(done) != round) {}
            __syncthreads();
            ratio = __ldcg(ratios + item.z);
        }
        float weights = 0.f, directions = 0.f;
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            const long long i = begin + 4 * threadIdx.x + n * 4 * BLOCK;
            if (i >= end) break;
            Four p = read_four(params + i), m = read_four(exp_avg + i), v = read_four(exp_avg_sq + i);
            if (pass != WEIGHTS) {
                const Four g = load_four(grads + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) moments.take(g.x[e] * coefficient, m.x[e], v.x[e]);
                keep_four(exp_avg + i, m);
                keep_four(exp_avg_sq + i, v);
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
            asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(done), "r"(round) : "memory");
        }
    }
    if (threadIdx.x == 0 && atomicAdd(control + LEFT, 1u) == gridDim.x - 1) {  // all blocks have found the end
        control[TICKET] = control[LEFT] = 0;
        control[ROUND] = round;
    }
}
