// AdamW and Adam over flat buffers. weight: float, or bf16 without masters; copied: type of the model's 16-bit copy, float
// if there is none.
// Constants: scalar = float, f16, bf16 (gradients); weight = float; copied = float; BLOCK = 256
// Constants: scalar = float, f16; weight = float; copied = f16; BLOCK = 256
// Constants: scalar = float, bf16; weight = float, bf16; copied = bf16; BLOCK = 256
// Launch:    grid = (ceil(size / (4 * BLOCK)),), block = (BLOCK,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121

#include "update/optimizer.cuh"

struct AdamW {
    Moments moments;
    float learning_rate, keep, coupled;

    __device__ __forceinline__ float operator()(float p, float g, float& m, float& v, bool decays) const {
        moments.update(decays ? g + coupled * p : g, m, v);
        return (decays ? p * keep : p) - learning_rate * moments.direction(m, v);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK) adamw_update(
    weight* params,               // (size,)
    const scalar* grads,          // (size,)
    float* exp_avg,               // (size,)
    float* exp_avg_sq,            // (size,)
    copied* model,                // (size,) or null
    const unsigned char* decay,   // (size / 128,) or null: all decay
    const unsigned int* state,    // (12,)
    long long size,
    unsigned int seed_low,
    unsigned int seed_high,
    float log_beta1,
    float rate1,                  // 1 - beta1
    float log_beta2,
    float rate2,
    float eps,
    float weight_decay,
    bool decoupled) {             // AdamW; else Adam, which adds the decay to the gradient
    if (state[SKIP]) return;
    const float learning_rate = number(state, LEARNING_RATE);
    const AdamW rule{
        Moments(state, log_beta1, rate1, log_beta2, rate2, eps), learning_rate,
        decoupled ? 1.f - learning_rate * weight_decay : 1.f, decoupled ? 0.f : weight_decay};
    update(Buffers{params, grads, exp_avg, exp_avg_sq, model, decay, state, size, seed_low, seed_high}, rule);
}
