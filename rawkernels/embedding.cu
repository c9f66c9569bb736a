// y[i] = dropout(scale * weight[tokens[i]] + position_weight[positions[i]]).
// Constants: scalar = float, f16, bf16; token = int, long long; BLOCK = 256
// Launch:    grid = (tokens,), block = (BLOCK,). A block copies one row.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/index.cuh"
#include "common/philox.cuh"

extern "C" __global__ void embedding_forward(
    const token* __restrict__ tokens,             // (gridDim.x,)
    const scalar* __restrict__ weight,            // (rows, cols)
    const token* __restrict__ positions,          // (gridDim.x,), or null: block index % length
    const scalar* __restrict__ position_weight,   // (position_rows, cols) or null
    scalar* __restrict__ y,                       // (gridDim.x, cols)
    long long rows,
    long long position_rows,
    long long cols,
    long long length,
    float scale,
    int keep_below,                               // an element is kept if its 16 bits are below
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step,
    long long* token_flag,
    long long* position_flag) {
    const long long i = blockIdx.x;
    long long id = tokens[i];
    if (out_of_range(id, rows, token_flag)) id = 0;
    long long place = 0;
    if (position_weight) {
        place = positions ? (long long)positions[i] : i % length;
        if (out_of_range(place, position_rows, position_flag)) place = 0;
    }
    const bool drops = keep_below < 65536;
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    for (long long col = threadIdx.x; col < cols; col += BLOCK) {
        float value = scale * (float)weight[id * cols + col];
        if (position_weight) value += (float)position_weight[place * cols + col];
        if (drops) value = (int)philox_u16(key, i * cols + col) < keep_below ? value * keep_scale : 0.f;
        y[i * cols + col] = (scalar)value;
    }
}
