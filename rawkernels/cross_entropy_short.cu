// Softmax cross entropy and its gradient (see cross_entropy.cu) of short rows, each in the registers of a warp.
// Constants: scalar = float, f16, bf16; VECTORS = 2, 4, 8
// Launch:    grid = (ceil(rows / 4),), block = (128,). A row has up to 32 * VECTORS vectors of 16 bytes.
// Arch: sm_80 sm_86 sm_89 sm_90 sm_100
#include "common/cross_entropy.cuh"

constexpr int WARPS = 4;
constexpr int TOGETHER = VECTORS > 4 ? 5 : VECTORS > 2 ? 8 : __CUDA_ARCH__ == 900 ? 12 : 10;  // blocks of a multiprocessor, without spills

extern "C" __global__ void __launch_bounds__(32 * WARPS, TOGETHER) cross_entropy_rows_short(
    scalar* logits,         // (rows, cols >= vocab), rows `stride` apart
    const int* targets,     // (rows,)
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
    const long long number = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (number >= rows) return;
    const Goal goal{label_share, other_share, z_loss};
    const int lane = threadIdx.x % 32, target = targets[number];
    const Divisor divisor(summary);
    const float scale = summary->scale;
    scalar* row = logits + number * stride;
    const Layout layout(row, vocab);
    const bool counts = target >= 0, has_edge = lane < layout.edges;

    uint4 bits[VECTORS];
    for (int i = 0; i < VECTORS; ++i)
        if (lane + 32 * i < layout.vectors) bits[i] = load_vector(row + layout.vector(lane + 32 * i));
    float edge[1] = {has_edge ? (float)row[layout.edge(lane)] : NEG_INF};
    const float at_label = counts ? (float)row[target] : 0.f;

    float x[VECTORS][WIDTH], peak = edge[0];
    int where = has_edge ? layout.edge(lane) : 0x7fffffff;  // the first column of the first vector with the peak
    for (int i = 0; i < VECTORS; ++i) {
        if (lane + 32 * i >= layout.vectors) continue;
        unpack(bits[i], x[i]);
        float top = x[i][0];
        for (int j = 1; j < WIDTH; ++j) top = fmaxf(top, x[i][j]);
        if (top > peak || top == peak && layout.vector(lane + 32 * i) < where) where = layout.vector(lane + 32 * i);
        peak = fmaxf(peak, top);
    }
    const float mine = peak;
    peak = warp_reduce(peak, Max{});
    const float base = base_of(peak);
    float sum = 0.f, total = 0.f;
    const auto take = [&](float& x) {
        const float shifted = x - base;
        total += shifted;
        x = power(shifted);
        sum += x;
    };
    for (int i = 0; i < VECTORS; ++i)
        if (lane + 32 * i < layout.vectors)
            for (int j = 0; j < WIDTH; ++j) take(x[i][j]);
    if (has_edge) take(edge[0]);
    sum = warp_reduce(sum, Sum{});
    if (goal.u > 0.f) total = warp_reduce(total, Sum{});

    const float log_sum = logf(sum), lse = base + log_sum;
    float loss = log_sum - (goal.q - goal.u) * (at_label - base) + goal.z * lse * lse;
    if (goal.u > 0.f) loss -= goal.u * total;  // 0 * -inf is not a number
    if (lane == 0) {
        losses[number] = counts ? loss : 0.f;
        if (statistics) statistics[2 * number] = peak, statistics[2 * number + 1] = sum;
    }
    if (counts && at_label == peak && loss == loss) {
        const int start = layout.start(target);
        const int first = __reduce_min_sync(~0u, mine == peak ? where : 0x7fffffff);
        bool leads = first == start;
        for (int j = start; j < target; ++j) leads = leads && (float)row[j] != at_label;
        if (lane == 0 && leads) atomicAdd(&summary->right, 1);
        __syncwarp();
    }
    if (!with_gradient) return;

    const float weight = scale / divisor.get();
    const Slope slope(peak, sum, weight, goal, target);
    for (int i = 0; i < VECTORS; ++i) {
        const int column = layout.vector(lane + 32 * i);
        if (lane + 32 * i >= layout.vectors) continue;
        if (counts) slope.finish(x[i], column), bits[i] = pack(x[i]);
        else bits[i] = {0, 0, 0, 0};
        store_vector(row + column, bits[i]);
    }
    if (has_edge) {
        slope.finish(edge, layout.edge(lane));
        row[layout.edge(lane)] = (scalar)(counts ? edge[0] : 0.f);
    }
    for (int j = vocab + lane; j < cols; j += 32) row[j] = (scalar)0.f;
}
