// y[i] = dropout(scale * weight[tokens[i]] + position_weight[positions[i]]).
// Constants: scalar = float, f16, bf16; token = int; ALIGNED = true; BLOCK = 256
// Constants: scalar = float, bf16; token = long long; ALIGNED = false; BLOCK = 256
// Launch:    grid = (ceil(tokens * cols / (8 * PACKS * BLOCK)),), block = (BLOCK,). A thread makes PACKS packs of eight
//            neighbours of y, whose random bits come from one counter each. ALIGNED: a pack lies within a row, and
//            all rows begin at multiples of 16 bytes.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/index.cuh"
#include "common/pack.cuh"
#include "common/philox.cuh"

constexpr int PACKS = 2;  // as in gpuattn/ops/embedding.py

extern "C" __global__ void __launch_bounds__(BLOCK, 4) embedding_forward(
    const token* __restrict__ tokens,             // (count,)
    const scalar* __restrict__ weight,            // (rows, cols), `stride` apart
    const token* __restrict__ positions,          // (count,), or null: index % length
    const scalar* __restrict__ position_weight,   // (position_rows, cols), `position_stride` apart, or null
    scalar* __restrict__ y,                       // (count, cols)
    unsigned int* arrived,                        // (arrivals,) that become 0 for the gradient, or null
    int arrivals,
    long long count,
    long long rows,
    long long stride,
    long long position_rows,
    long long position_stride,
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
    const long long thread = blockIdx.x * (long long)BLOCK + threadIdx.x;
    for (long long i = thread; i < arrivals; i += gridDim.x * (long long)BLOCK) arrived[i] = 0;

    const auto table_row = [&](long long i) {
        const long long id = tokens[i];
        return out_of_range(id, rows, token_flag) ? 0 : id;
    };
    const auto place_of = [&](long long i) {
        const long long place = positions ? (long long)positions[i] : i % length;
        return out_of_range(place, position_rows, position_flag) ? 0 : place;
    };
    const long long total = count * cols, first = (blockIdx.x * (long long)PACKS * BLOCK + threadIdx.x) * 8;
    float value[PACKS][8];
    if constexpr (ALIGNED) {
        const unsigned int lanes = (unsigned int)(cols / 8);
        long long id[PACKS], place[PACKS], col[PACKS];
        Pack<scalar, 8> row[PACKS], added[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const unsigned int pack = blockIdx.x * PACKS * BLOCK + p * BLOCK + threadIdx.x, i = pack / lanes;
            if (first + p * 8LL * BLOCK >= total) continue;
            col[p] = (pack - i * lanes) * 8LL;
            id[p] = table_row(i);
            if (position_weight) place[p] = place_of(i);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if (first + p * 8LL * BLOCK >= total) continue;
            row[p] = load_pack<8>(weight + id[p] * stride + col[p]);
            if (position_weight) added[p] = load_pack<8>(position_weight + place[p] * position_stride + col[p]);
        }
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                value[p][k] = scale * (float)row[p].x[k];
                if (position_weight) value[p][k] += (float)added[p].x[k];
            }
    } else {
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const long long at = first + p * 8LL * BLOCK;
            long long i = at / cols, col = at - i * cols;
#pragma unroll
            for (int k = 0; k < 8 && at + k < total; ++k) {
                value[p][k] = scale * (float)weight[table_row(i) * stride + col];
                if (position_weight) value[p][k] += (float)position_weight[place_of(i) * position_stride + col];
                if (++col == cols) col = 0, ++i;
            }
        }
    }

    const bool drops = keep_below < 65536;
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const long long at = first + p * 8LL * BLOCK;
        if (at >= total) break;
        if (drops) {
            const uint4 words = philox(key, (unsigned int)(at / 8), (unsigned int)(at / 8 >> 32));
#pragma unroll
            for (int k = 0; k < 8; ++k)
                value[p][k] = (int)philox_lane(words, k) < keep_below ? value[p][k] * keep_scale : 0.f;
        }
        if constexpr (ALIGNED) {
            store_pack<8>(y + at, value[p]);
        } else {
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (at + k < total) y[at + k] = (scalar)value[p][k];
        }
    }
}
