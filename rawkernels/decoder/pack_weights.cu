// The weights of linear layers in the order in which decoder_step.cu or cluster_step.cu reads them, the norm before folded in:
// W norm(x) + bias = rstd * (V x - mean * sums) + offsets, with V = W * gain, sums = V 1 and offsets = bias + W shift.
// Constants: scalar = f16, bf16
// Launch:    grid = (units,), block = (32 * WARPS,). A block packs the weights of TILE outputs of a layer.
// Arch: sm_90a
#include "common/pack.cuh"

constexpr int TILE = 16, WARPS = 8, WIDTH = 8, DEPTH = 32;  // outputs and inputs of a piece; elements of a vector

constexpr int PIECE = TILE * DEPTH;                         // weights; a unit is TILE outputs

struct Layer {
    const scalar* weight;  // (outputs, inputs)
    const scalar* gain;    // (inputs,), of the norm, or null: no norm
    const scalar* shift;   // (inputs,), or null: zeros
    const scalar* bias;    // (outputs,), or null: zeros
    scalar* packed;        // rows past `outputs` are zeros; where units and pieces lie: see the strides
    float* tails;          // of each unit: sums (TILE,) and offsets (TILE,)
    int outputs, inputs;   // inputs: a multiple of DEPTH
    int first;             // the block that has the first unit
    // strides of elements: unit u is at u / units * far + u % units * near, its piece p at p * PIECE + p / pieces * gap
    int units, far, near, pieces, gap;
    int tail_units, tail_far;  // the tail of unit u is at u / tail_units * tail_far + u % tail_units * 2 * TILE
};

// A piece is two operands a of mma, 16 bytes of each lane: lane 4 g + t has inputs 8 t to 8 t + 3 of rows g and g + 8 in
// the first, 8 t + 4 to 8 t + 7 in the second. So operand b of both is the vector of inputs 8 t to 8 t + 7.
extern "C" __global__ void __launch_bounds__(32 * WARPS) pack_weights(
    const Layer* layers,
    const int* owners) {  // (units,): the layer of each
    __shared__ float2 partial[WARPS][TILE];  // the part of a warp in the sum and the offset of a row
    const Layer layer = layers[owners[blockIdx.x]];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, inputs = layer.inputs;
    const int unit = blockIdx.x - layer.first, row = unit * TILE + g;
    scalar* packed = layer.packed + (long long)(unit / layer.units) * layer.far + unit % layer.units * layer.near;
    float2 all[2] = {};
    for (int k = warp * DEPTH + t * WIDTH; k < inputs; k += WARPS * DEPTH) {
        float rows[2][WIDTH] = {}, gain[WIDTH], shift[WIDTH];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (row + 8 * i < layer.outputs)
                unpack(rows[i], load_pack<WIDTH>(layer.weight + (long long)(row + 8 * i) * inputs + k));
        if (layer.shift) {
            unpack(shift, load_pack<WIDTH>(layer.shift + k));
#pragma unroll
            for (int i = 0; i < 2 * WIDTH; ++i) all[i / WIDTH].y += rows[i / WIDTH][i % WIDTH] * shift[i % WIDTH];
        }
        if (layer.gain) {
            unpack(gain, load_pack<WIDTH>(layer.gain + k));
#pragma unroll
            for (int i = 0; i < 2 * WIDTH; ++i) {
                float& x = rows[i / WIDTH][i % WIDTH];
                x = (float)scalar(x * gain[i % WIDTH]);
                all[i / WIDTH].x += x;  // of the rounded weights, so that V x - mean * sums cancels what they share
            }
        }
        scalar* to = packed + k / DEPTH * PIECE + lane * WIDTH;
        if (layer.gap) to += (long long)(k / DEPTH / layer.pieces) * layer.gap;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float(&low)[WIDTH] = rows[0], (&high)[WIDTH] = rows[1];
            const int i = 4 * half;
            store_pack(to + half * PIECE / 2,
                       {low[i], low[i + 1], high[i], high[i + 1], low[i + 2], low[i + 3], high[i + 2], high[i + 3]});
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int other = 1; other < 4; other <<= 1) {
            all[i].x += __shfl_xor_sync(~0u, all[i].x, other);
            all[i].y += __shfl_xor_sync(~0u, all[i].y, other);
        }
        if (t == 0) partial[warp][g + 8 * i] = all[i];
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        float sum = 0, offset = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partial[w][threadIdx.x].x, offset += partial[w][threadIdx.x].y;
        const int of = unit * TILE + threadIdx.x;
        float* sums = layer.tails + (long long)(unit / layer.tail_units) * layer.tail_far + unit % layer.tail_units * 2 * TILE;
        sums[threadIdx.x] = sum;
        sums[TILE + threadIdx.x] = offset + (layer.bias && of < layer.outputs ? (float)layer.bias[of] : 0.f);
    }
}
