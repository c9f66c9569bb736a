// The norm before linear layers folded into their weights, for row_linear.cu: W' = W * gain, and for each output
// bias + W shift and the sum of W'.
// Constants: scalar = f16, bf16
// Launch:    grid = (ceil(all outputs / WARPS),), block = (32 * WARPS,). A warp folds the weights of an output.
// Arch: sm_90a
#include "common/pack.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8, WIDTH = 8;  // WIDTH: elements of a vector

struct Folding {
    const scalar* weight;  // (outputs, inputs)
    const scalar* gain;    // (inputs,)
    const scalar* shift;   // (inputs,), or null: zeros
    const scalar* bias;    // (outputs,), or null: zeros
    scalar* product;       // (outputs, inputs): weight * gain
    float2* folded;        // (outputs,): bias + weight shift, and the sum of `product`
    int inputs, first;     // inputs: a multiple of WIDTH; first: how many outputs come before
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) fold_norm(
    const Folding* layers,
    const int* owners,  // (outputs,): the layer of each
    int outputs) {      // of all layers
    const int output = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (output >= outputs) return;
    const Folding layer = layers[owners[output]];
    const int row = output - layer.first;
    const scalar* weight = layer.weight + (long long)row * layer.inputs;
    scalar* product = layer.product + (long long)row * layer.inputs;
    float sum = 0.f, offset = 0.f;
    for (int k = lane * WIDTH; k < layer.inputs; k += 32 * WIDTH) {
        float values[WIDTH], gain[WIDTH], shift[WIDTH] = {};
        unpack(values, load_pack<WIDTH>(weight + k));
        unpack(gain, load_pack<WIDTH>(layer.gain + k));
        if (layer.shift) unpack(shift, load_pack<WIDTH>(layer.shift + k));
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            offset += values[i] * shift[i];
            values[i] = (float)scalar(values[i] * gain[i]);
            sum += values[i];  // of the rounded weights, so that W' x - mean * sum cancels what they share
        }
        store_pack(product + k, values);
    }
    sum = warp_reduce(sum, Sum()), offset = warp_reduce(offset, Sum());
    if (lane == 0) layer.folded[row] = {offset + (layer.bias ? (float)layer.bias[row] : 0.f), sum};
}
