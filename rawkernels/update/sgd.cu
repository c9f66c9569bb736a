// Gradient descent with momentum over flat buffers.
// weight: float, or bf16 without masters; copied: type of the model's 16-bit copy, float if there is none.
// Constants: scalar = float, f16, bf16 (gradients); weight = float; copied = float; BLOCK = 256
// Constants: scalar = float, f16; weight = float; copied = f16; BLOCK = 256
// Constants: scalar = float, bf16; weight = float, bf16; copied = bf16; BLOCK = 256
// Launch:    grid = (ceil(size / (4 * BLOCK)),), block = (BLOCK,)
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121

#include "update/optimizer.cuh"

struct Sgd {
    float learning_rate, weight_decay, momentum;
    bool nesterov;

    __device__ __forceinline__ float operator()(float p, float g, float& velocity, float&, bool decays) const {
        if (decays) g += weight_decay * p;
        if (momentum == 0.f) return p - learning_rate * g;
        velocity = momentum * velocity + g;
        return p - learning_rate * (nesterov ? g + momentum * velocity : velocity);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK) sgd_update(
    weight* params,               // (size,)
    const scalar* grads,          // (size,)
    float* velocity,              // (size,), or null where momentum is 0
    copied* model,                // (size,) or null
    const unsigned char* decay,   // (size / 128,) or null: all decay
    const unsigned int* state,    // (12,)
    long long size,
    unsigned int seed_low,
    unsigned int seed_high,
    float momentum,
    float weight_decay,
    bool nesterov) {
    if (state[SKIP]) return;
    const Sgd rule{number(state, LEARNING_RATE), weight_decay, momentum, nesterov};
    update(Buffers{params, grads, velocity, nullptr, model, decay, state, size, seed_low, seed_high}, rule);
}
