// y[i] = dropout(scale * weight[tokens[i]] + position_weight[positions[i]]).
// Constants: scalar = float, f16; token = int; POSITIONS = true; DROPOUT = true; ALIGNED = true; BLOCK = 256
// Constants: scalar = bf16; token = int; POSITIONS = false; DROPOUT = false; ALIGNED = true; BLOCK = 256
// Constants: scalar = float, bf16; token = long long; POSITIONS = true; DROPOUT = true; ALIGNED = false; BLOCK = 256
// Launch:    a thread computes PACKS packs of eight adjacent elements of y; the random bits of a pack come from one
//            Philox counter. ALIGNED, if every pack lies within a row and all rows are aligned to 16 bytes:
//            grid = (ceil(tokens / rows), slabs of a row), block = (packs of a slab / PACKS, rows), at most BLOCK threads.
//            Otherwise grid = (ceil(tokens * cols / (8 * PACKS * BLOCK)),), block = (BLOCK,).
//            dependent: embedding_forward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "common/grid_dependency.cuh"
#include "common/index.cuh"
#include "common/pack.cuh"
#include "common/philox.cuh"

constexpr int PACKS = POSITIONS ? 1 : 2;  // as in gpuattn/ops/embedding.py
// blocks per multiprocessor, at least
constexpr int BLOCKS = ALIGNED && sizeof(scalar) == 2 ? 2048 / BLOCK : 4;

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) embedding_forward(
    const token* tokens,             // (count,)
    const scalar* weight,            // (rows, cols), `stride` apart
    const token* positions,          // (count,), or null: index % length
    const scalar* position_weight,   // (position_rows, cols), `position_stride` apart, of POSITIONS
    scalar* __restrict__ y,          // (count, cols)
    unsigned int* arrived,           // (arrivals,) counters to set to 0 for the gradient, or null
    int arrivals,
    int count,
    long long rows,
    long long stride,
    long long position_rows,
    long long position_stride,
    int cols,
    int length,
    float scale,
    int keep_below,                  // of DROPOUT: keep elements whose 16-bit number is below
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step,
    long long* token_flag,
    long long* position_flag) {
    grid_dependency_wait();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    if (arrived)
#pragma unroll 1
        for (long long i = (long long)blockIdx.x * threads + thread; i < arrivals; i += (long long)gridDim.x * threads)
            arrived[i] = 0;

    const auto table_row = [&](int i) {
        const long long id = tokens[i];
        return out_of_range(id, rows, token_flag) ? 0 : id;
    };
    const auto place_of = [&](int i) {
        const long long place = positions ? (long long)positions[i] : i % length;
        return out_of_range(place, position_rows, position_flag) ? 0 : place;
    };
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, DROPOUT ? device_step : nullptr);
    const auto apply_dropout = [&](float (&value)[8], long long at) {
        const uint4 words = philox(key, (unsigned int)(at / 8), (unsigned int)(at / 8 >> 32));
#pragma unroll
        for (int k = 0; k < 8; ++k)
            value[k] = (int)philox_lane(words, k) < keep_below ? value[k] * keep_scale : 0.f;
    };

    if constexpr (ALIGNED) {
        const int i = blockIdx.x * blockDim.y + threadIdx.y, apart = blockDim.x * 8;
        const int col = (blockIdx.y * PACKS * blockDim.x + threadIdx.x) * 8;
        if (i >= count) return;
        const scalar* row = weight + table_row(i) * stride + col;
        const scalar* added = POSITIONS ? position_weight + place_of(i) * position_stride + col : nullptr;
        Pack<scalar, 8> pack[PACKS], more[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (col + p * apart >= cols) continue;
            pack[p] = load_pack<8>(row + p * apart);
            if constexpr (POSITIONS) more[p] = load_pack<8>(added + p * apart);
        }
        const long long first = (long long)i * cols + col;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (col + p * apart >= cols) return;
            float value[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                value[k] = scale * (float)pack[p].x[k];
                if constexpr (POSITIONS) value[k] += (float)more[p].x[k];
            }
            if constexpr (DROPOUT) apply_dropout(value, first + p * apart);
            store_pack<8>(y + first + p * apart, value);
        }
    } else {
        const long long total = (long long)count * cols;
        const long long first = (blockIdx.x * (long long)(PACKS * BLOCK) + threadIdx.x) * 8;
        float value[PACKS][8];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const long long at = first + p * BLOCK * 8;
            int i = at / cols, col = at - (long long)i * cols;
#pragma unroll
            for (int k = 0; k < 8 && at + k < total; ++k) {
                value[p][k] = scale * (float)weight[table_row(i) * stride + col];
                if constexpr (POSITIONS) value[p][k] += (float)position_weight[place_of(i) * position_stride + col];
                if (++col == cols) col = 0, ++i;
            }
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const long long at = first + p * BLOCK * 8;
            if (at >= total) return;
            if constexpr (DROPOUT) apply_dropout(value[p], at);
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (at + k < total) y[at + k] = (scalar)value[p][k];
        }
    }
}
