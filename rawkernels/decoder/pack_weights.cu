// The weights of linear layers in the order in which decoder_step.cu reads them, the norm before a layer folded in:
// W norm(x) + bias = rstd * (V x - mean * sums) + offsets, with V = W * gain, sums = V 1 and offsets = bias + W shift.
// Constants: scalar = f16, bf16
// Launch:    grid = (units,), block = (32 * WARPS,). A block packs the weights of TILE outputs of a layer.
// Arch: sm_90a
#include "common/pack.cuh"
#include "common/reduce.cuh"

constexpr int TILE = 16, WARPS = 8, WIDTH = 8, DEPTH = 32;  // outputs and inputs of a piece; elements of a vector

struct Layer {
    const scalar* weight;  // (outputs, inputs)
    const scalar* gain;    // (inputs,), of the norm, or null: no norm
    const scalar* shift;   // (inputs,), or null: zeros
    const scalar* bias;    // (outputs,), or null: zeros
    scalar* packed;        // for each TILE outputs: weights (inputs / DEPTH, TILE, DEPTH), rows past `outputs` are zeros;
                           // then in float32 sums (TILE,) and offsets (TILE,)
    int outputs, inputs;   // inputs: a multiple of DEPTH
    int first, unused;     // the block that has the first unit
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) pack_weights(
    const Layer* layers,
    const int* owners) {  // (units,): the layer of each
    const Layer layer = layers[owners[blockIdx.x]];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, inputs = layer.inputs, unit = blockIdx.x - layer.first;
    scalar* packed = layer.packed + (long long)unit * TILE * (inputs + 4);
    float* sums = reinterpret_cast<float*>(packed + TILE * inputs);
    for (int inside = warp; inside < TILE; inside += WARPS) {
        const int row = unit * TILE + inside;
        float sum = 0, offset = 0;
        for (int k = lane * WIDTH; k < inputs; k += 32 * WIDTH) {
            float values[WIDTH] = {}, other[WIDTH];
            if (row < layer.outputs) unpack(values, load_pack<WIDTH>(layer.weight + (long long)row * inputs + k));
            if (layer.shift) {
                unpack(other, load_pack<WIDTH>(layer.shift + k));
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) offset += values[i] * other[i];
            }
            if (layer.gain) {
                unpack(other, load_pack<WIDTH>(layer.gain + k));
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    values[i] = (float)scalar(values[i] * other[i]);
                    sum += values[i];  // of the rounded weights, so that V x - mean * sums cancels what they share
                }
            }
            store_pack(packed + ((k / DEPTH) * TILE + inside) * DEPTH + k % DEPTH, values);
        }
        sum = warp_reduce(sum, Sum()), offset = warp_reduce(offset, Sum());
        if (lane == 0) {
            sums[inside] = sum;
            sums[TILE + inside] = offset + (layer.bias && row < layer.outputs ? (float)layer.bias[row] : 0.f);
        }
    }
}
