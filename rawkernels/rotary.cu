// Rotary position embedding: pair i of adjacent elements (x, y) of a head is rotated by the angle position *
// base^(-2 i / head_dim). The gradient is the inverse rotation. The output may be the input.
// Constants: scalar = float, f16, bf16; VECTOR = false, true; BLOCK = 256
// Launch:    grid = (ceil(tokens / (BLOCK / (packs * lanes))),), block = (BLOCK,). A thread takes one pack of a token,
//            8 elements if VECTOR, else a pair, in every `lanes`-th head of q and k: one sine and cosine for all.
//            dependent: rotary
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "attention/common/attention.cuh"
#include "common/grid_dependency.cuh"
#include "common/pack.cuh"

constexpr int NUMBERS = VECTOR ? 8 : 2, PAIRS = NUMBERS / 2;
constexpr int HEADS = 4;  // heads that a thread loads at a time

struct Rates { float2 of[128]; };  // full turns per position of each pair, as the sum of two floats

using Some = Pack<scalar, NUMBERS>;

__device__ inline Some load(const scalar* x, const Strides& strides) {
    if constexpr (VECTOR) return load_pack<NUMBERS>(x);
    Some some;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) some.x[i] = x[i * strides.column];
    return some;
}

__device__ inline void store(scalar* x, const Strides& strides, const float (&values)[NUMBERS]) {
    if constexpr (VECTOR) {
        store_pack<NUMBERS>(x, values);
    } else {
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) x[i * strides.column] = (scalar)values[i];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) rotary(
    const scalar* q,                    // (batches, rows, q_heads, head_dim) by strides
    const scalar* k,                    // (batches, rows, k_heads, head_dim) by strides
    scalar* q_out,
    scalar* k_out,
    const Strides q_strides,
    const Strides k_strides,
    const Strides q_out_strides,
    const Strides k_out_strides,
    const int* positions,               // (batches * rows,), or null: the row's number
    const __grid_constant__ Rates rates,
    int tokens,                         // batches * rows
    int rows,
    int q_heads,
    int k_heads,
    int packs,                          // of a head
    int lanes,
    float direction) {                  // 1, or -1 for the inverse
    grid_dependency_wait();
    const int group = packs * lanes, slot = threadIdx.x / group, within = threadIdx.x % group;
    const int pack = within % packs, lane = within / packs;
    const int token = blockIdx.x * (BLOCK / group) + slot;
    if (slot >= BLOCK / group || token >= tokens) return;
    const int batch = token / rows, row = token % rows, heads = q_heads + k_heads;
    const float position = (float)(positions ? positions[token] : row);
    float sine[PAIRS], cosine[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const float2 rate = rates.of[pack * PAIRS + i];
        const float turns = position * rate.x, lost = fmaf(position, rate.x, -turns);
        const float part = (turns - rintf(turns)) + fmaf(position, rate.y, lost);
        sincospif(2.f * part, &sine[i], &cosine[i]);
        sine[i] *= direction;
    }
    const long long column = pack * NUMBERS;
    q += batch * q_strides.batch + row * q_strides.row + column * q_strides.column;
    k += batch * k_strides.batch + row * k_strides.row + column * k_strides.column;
    q_out += batch * q_out_strides.batch + row * q_out_strides.row + column * q_out_strides.column;
    k_out += batch * k_out_strides.batch + row * k_out_strides.row + column * k_out_strides.column;
    for (int first = lane; first < heads; first += HEADS * lanes) {
        Some some[HEADS];
#pragma unroll
        for (int j = 0; j < HEADS; ++j) {
            const int head = first + j * lanes;
            if (head >= heads) break;
            some[j] = head < q_heads ? load(q + head * q_strides.head, q_strides)
                                     : load(k + (head - q_heads) * k_strides.head, k_strides);
        }
#pragma unroll
        for (int j = 0; j < HEADS; ++j) {
            const int head = first + j * lanes;
            if (head >= heads) break;
            float values[NUMBERS];
            unpack(values, some[j]);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float x = values[2 * i], y = values[2 * i + 1];
                values[2 * i] = x * cosine[i] - y * sine[i];
                values[2 * i + 1] = x * sine[i] + y * cosine[i];
            }
            if (head < q_heads) store(q_out + head * q_out_strides.head, q_out_strides, values);
            else store(k_out + (head - q_heads) * k_out_strides.head, k_out_strides, values);
        }
    }
}
