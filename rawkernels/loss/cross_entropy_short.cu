// Softmax cross entropy and its gradient (see cross_entropy.cu) for short rows, each in the registers of LANES lanes.
// Constants: scalar = float, f16, bf16; LANES = 32; VECTORS = 2, 4, 8; CHECKED = false, true
// Constants: scalar = float, f16, bf16; LANES = 8, 16; VECTORS = 2; CHECKED = false, true
// Launch:    grid = (ceil(rows * LANES / 128),), block = (128,). A row has up to LANES * VECTORS vectors of 16 bytes;
//            where LANES < 32 it begins at a multiple of 16 bytes.
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "loss/cross_entropy.cuh"

constexpr int WARPS = 4;
// blocks per multiprocessor, as many as run without spills
constexpr int WITHOUT_SPILLS = __CUDA_ARCH__ >= (CHECKED ? 1200 : 1030) ? 9 : 10;
constexpr int TOGETHER = VECTORS > 4 ? 5 : VECTORS > 2 ? 8 : LANES == 32 && __CUDA_ARCH__ == 900 ? 12 : WITHOUT_SPILLS;

// Reductions over the lanes that share a row.
template <typename Op> __device__ __forceinline__ float row_reduce(float value, Op op) {
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}
__device__ __forceinline__ int row_min(int value) {
    if constexpr (LANES == 32) return warp_min(value);
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) value = min(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, TOGETHER) cross_entropy_rows_short(
    scalar* logits,         // (rows, cols >= vocab), rows `stride` apart
    const void* labels,     // (rows,), int64 where `wide`, else int32
    bool wide,
    long long ignore_index,
    long long* flag,        // of a label out of range
    float* losses,          // (rows,)
    float* statistics,      // (rows, 2) or null: maximum, and sum of exp(x - maximum)
    Summary* summary,
    long long stride,
    long long rows,
    int vocab,
    int cols,
    float label_share,
    float other_share,
    float z_loss,
    bool with_gradient) {
    constexpr int ROWS = 32 / LANES;  // rows of a warp; the last warp may have fewer
    const long long first_row = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    if (first_row >= rows) return;
    const bool exists = ROWS == 1 || first_row + threadIdx.x % 32 / LANES < rows;
    const long long number = exists ? first_row + threadIdx.x % 32 / LANES : rows - 1;
    const LossTerms terms{label_share, other_share, z_loss};
    const int lane = threadIdx.x % LANES;
    const Labels<CHECKED> given{labels, wide, ignore_index, flag};
    const auto label = given[number];
    const Divisor divisor(summary);
    const float scale = summary->scale;
    scalar* row = logits + number * stride;
    const Layout layout(row, vocab);
    const bool has_edge = lane < layout.edges;

    uint4 bits[VECTORS];
    for (int i = 0; i < VECTORS; ++i)
        if (lane + LANES * i < layout.vectors) bits[i] = load_vector(row + layout.vector(lane + LANES * i));
    float edge[1] = {has_edge ? (float)row[layout.edge(lane)] : NEG_INF};
    const int target = given.target(label, vocab);  // after the loads of the row
    const bool counts = target >= 0;
    const float at_label = counts ? (float)row[target] : 0.f;

    float x[VECTORS][WIDTH], peak = edge[0];
    int where = has_edge ? layout.edge(lane) : 0x7fffffff;  // first column of the first vector that holds the peak
    for (int i = 0; i < VECTORS; ++i) {
        if (lane + LANES * i >= layout.vectors) continue;
        unpack(bits[i], x[i]);
        float top = x[i][0];
        for (int j = 1; j < WIDTH; ++j) top = fmaxf(top, x[i][j]);
        if (top > peak || top == peak && layout.vector(lane + LANES * i) < where) where = layout.vector(lane + LANES * i);
        peak = fmaxf(peak, top);
    }
    const float mine = peak;
    peak = row_reduce(peak, Max{});
    const float base = base_of(peak);
    float sum = 0.f, total = 0.f;
    const auto take = [&](float& x) {
        const float shifted = x - base;
        total += shifted;
        x = exp_fast(shifted);
        sum += x;
    };
    for (int i = 0; i < VECTORS; ++i)
        if (lane + LANES * i < layout.vectors)
            for (int j = 0; j < WIDTH; ++j) take(x[i][j]);
    if (has_edge) take(edge[0]);
    sum = row_reduce(sum, Sum{});
    if (terms.u > 0.f) total = row_reduce(total, Sum{});

    const float log_sum = logf(sum), lse = base + log_sum;
    float loss = log_sum - (terms.q - terms.u) * (at_label - base) + terms.z * lse * lse;
    if (terms.u > 0.f) loss -= terms.u * total;  // avoids 0 * -inf = NaN
    if (exists && lane == 0) {
        losses[number] = counts ? loss : 0.f;
        if (statistics) statistics[2 * number] = peak, statistics[2 * number + 1] = sum;
    }
    bool leads = exists && counts && at_label == peak && loss == loss;
    if (LANES == 32 ? leads : __any_sync(~0u, leads)) {
        const int start = layout.start(target);
        const int first = row_min(mine == peak ? where : 0x7fffffff);
        leads = leads && first == start;
        for (int j = start; j < target; ++j) leads = leads && (float)row[j] != at_label;
        const u32 right = __ballot_sync(~0u, leads && lane == 0);
        if (right && threadIdx.x % 32 == 0) atomicAdd(&summary->right, __popc(right));
    }
    if (!with_gradient) return;

    const float weight = scale / divisor.get();
    if (!exists) return;
    const Gradient gradient(peak, sum, weight, terms, target);
    for (int i = 0; i < VECTORS; ++i) {
        const int column = layout.vector(lane + LANES * i);
        if (lane + LANES * i >= layout.vectors) continue;
        if (counts) gradient.finish(x[i], column), bits[i] = pack(x[i]);
        else bits[i] = {0, 0, 0, 0};
        store_vector(row + column, bits[i]);
    }
    if (has_edge) {
        gradient.finish(edge, layout.edge(lane));
        row[layout.edge(lane)] = (scalar)(counts ? edge[0] : 0.f);
    }
    for (int j = vocab + lane; j < cols; j += LANES) row[j] = (scalar)0.f;
}
