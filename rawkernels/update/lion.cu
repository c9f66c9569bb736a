// Lion over flat buffers. weight: float, or bf16 without masters; copied: type of the model's 16-bit copy, float
// if there is none.
// Constants: scalar = float, f16, bf16 (gradients); weight = float; copied = float; BLOCK = 256
// Constants: scalar = float, f16; weight = float; copied = f16; BLOCK = 256
// Constants: scalar = float, bf16; weight = float, bf16; copied = bf16; BLOCK = 256
// Launch:    grid = (ceil(size / (4 * BLOCK)),), block = (BLOCK,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121

#include "update/optimizer.cuh"

struct Lion {
    float learning_rate, keep, rate1, rate2;

    __device__ __forceinline__ float operator()(float p, float g, float& m, float&, bool decays) const {
        const float blend = m + rate1 * (g - m);
        const float sign = (float)(blend > 0.f) - (float)(blend < 0.f);
        m += rate2 * (g - m);
        return (decays ? p * keep : p) - learning_rate * sign;
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK) lion_update(
    weight* params,               // (size,)
    const scalar* grads,          // (size,)
    float* exp_avg,               // (size,)
    copied* model,                // (size,) or null
    const unsigned char* decay,   // (size / 128,) or null: all decay
    const unsigned int* state,    // (12,)
    long long size,
    unsigned int seed_low,
    unsigned int seed_high,
    float rate1,                  // 1 - beta1
    float rate2,
    float weight_decay) {
    if (state[SKIP]) return;
    const float learning_rate = number(state, LEARNING_RATE);
    const Lion rule{learning_rate, 1.f - learning_rate * weight_decay, rate1, rate2};
    update(Buffers{params, grads, exp_avg, nullptr, model, decay, state, size, seed_low, seed_high}, rule);
}
