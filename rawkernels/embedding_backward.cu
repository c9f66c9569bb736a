// Gradient of a table: dweight[id] = scale * the sum of the rows of dropout(dy) whose token is id.
// Constants: scalar = float, f16, bf16; target = float, f16, bf16; BLOCK = 256; COLUMNS = 32
// Launch:    grid = (segments, ceil(cols / COLUMNS)), block = (BLOCK,). A block owns COLUMNS columns
//            of one id; each of its BLOCK / COLUMNS lanes adds every so manieth row, in order.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/philox.cuh"

static_assert(BLOCK % COLUMNS == 0, "embedding_backward.cu: BLOCK must be a multiple of COLUMNS");

extern "C" __global__ void embedding_backward(
    const scalar* __restrict__ dy,      // (tokens, cols)
    const int* __restrict__ order,      // (tokens,): the tokens sorted by id
    const int* __restrict__ segments,   // (gridDim.x,): where each id begins in `order`
    const int* __restrict__ ids,        // (gridDim.x,), or null: segment s is id s
    target* __restrict__ dweight,       // (rows, cols)
    long long tokens,
    long long rows,
    long long cols,
    float scale,
    bool accumulate,
    int keep_below,
    float keep_scale,
    unsigned int seed_low,
    unsigned int seed_high,
    unsigned int stream,
    unsigned int step,
    const unsigned int* device_step) {
    constexpr int LANES = BLOCK / COLUMNS;
    __shared__ float partial[LANES][COLUMNS];
    const int segment = blockIdx.x, lane = threadIdx.x / COLUMNS;
    const long long col = blockIdx.y * (long long)COLUMNS + threadIdx.x % COLUMNS;
    const long long id = ids ? ids[segment] : segment;
    if (id < 0 || id >= rows) return;  // noted by the forward pass
    const long long end = segment + 1 < (int)gridDim.x ? segments[segment + 1] : tokens;
    const bool drops = keep_below < 65536;
    const PhiloxKey key = philox_key(seed_low, seed_high, stream, step, device_step);
    float sum = 0.f;
    if (col < cols) {
        for (long long place = segments[segment] + lane; place < end; place += LANES) {
            const long long at = order[place] * cols + col;
            const bool kept = !drops || (int)philox_u16(key, at) < keep_below;
            if (kept) sum += (float)dy[at];
        }
    }
    partial[lane][threadIdx.x % COLUMNS] = sum;
    __syncthreads();
    if (lane > 0 || col >= cols) return;
    for (int other = 1; other < LANES; ++other) sum += partial[other][threadIdx.x];
    sum *= scale * keep_scale;
    target* out = dweight + id * cols + col;
    *out = (target)(accumulate ? (float)*out + sum : sum);
}
