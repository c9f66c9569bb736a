// Softmax cross entropy with label smoothing and z-loss, and its gradient. With donated logits, one pass computes both.
// Constants: scalar = float, f16, bf16; BLOCK = 32, 128, 512; CHECKED = false, true (labels are the targets of prepare)
// Launch:    prepare: grid = (32,), block = (256,). sum: grid = (1,), block = (1024,).
//            rows: grid = (rows,), block = (BLOCK,), 16 * room bytes of shared memory; the rest of a row is read twice.
//            gradient: grid = (rows,), block = (BLOCK,). rescale: grid = (up to rows,), block = (BLOCK,).
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
#include "loss/cross_entropy.cuh"

constexpr int THREADS = 256, ALONE = 1024;  // threads of a block of prepare, and of the single block of sum

extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_prepare(
    const void* labels,     // (rows,), int64 where `wide`, else int32
    bool wide,
    long long ignore_index,
    long long* flag,        // of a label out of range
    int* __restrict__ targets,  // (rows,): the label, or -1 for a row that does not count
    Summary* summary,
    const float* dloss,     // () or null: the factor of the gradient
    long long rows,
    int vocab,
    bool mean) {
    const Labels<false> given{labels, wide, ignore_index, flag};
    constexpr int STEP = COUNTERS * THREADS, BATCH = 8;  // labels are loaded before the first is checked
    float count = 0.f;
    for (long long first = blockIdx.x * THREADS + threadIdx.x; first < rows; first += BATCH * STEP) {
        long long label[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) label[i] = given[min(first + i * STEP, rows - 1)];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i * STEP >= rows) break;
            const int target = given.target(label[i], vocab);
            targets[first + i * STEP] = target;
            count += target < 0 ? 0.f : 1.f;
        }
    }
    count = block_reduce<THREADS>(count, Sum{}, 0.f);
    if (threadIdx.x > 0) return;
    summary->counts[blockIdx.x] = mean ? count : 0.f;
    if (blockIdx.x == 0) summary->scale = dloss ? *dloss : 1.f, summary->right = 0;
}

constexpr int TOGETHER = BY_REGISTERS && BLOCK == 512 ? 3 : 0;  // blocks of a multiprocessor, by their registers; 0: any

extern "C" __global__ void __launch_bounds__(BLOCK, TOGETHER) cross_entropy_rows(
    scalar* logits,         // (rows, cols >= vocab), rows `stride` apart
    const void* labels,     // (rows,), int64 where `wide`, else int32
    bool wide,
    long long ignore_index,
    long long* flag,        // of a label out of range
    float* losses,          // (rows,)
    float* statistics,      // (rows, 2) or null: maximum, and sum of exp(x - maximum)
    Summary* summary,
    long long stride,
    int vocab,
    int cols,
    int room,
    float label_share,
    float other_share,
    float z_loss,
    bool with_gradient) {
    const LossTerms terms{label_share, other_share, z_loss};
    const Labels<CHECKED> given{labels, wide, ignore_index, flag};
    cross_entropy_row<BLOCK, 1>(logits, given, losses, statistics, summary, stride, vocab, cols, room, terms,
                                with_gradient);
}

extern "C" __global__ void __launch_bounds__(ALONE) cross_entropy_sum(
    const float* __restrict__ losses,  // (rows,), aligned to 16 bytes
    Summary* summary,
    const void* labels,     // (rows,), int64 where `wide`, else int32; or null
    bool wide,
    long long ignore_index,
    long long* flag,
    long long rows,
    bool mean) {            // over the rows that count: by the labels, or without them by the summary
    float sum = 0.f, count = 0.f;
#pragma unroll 8
    for (long long i = threadIdx.x; i < rows / 4; i += ALONE) {
        const float4 x = ((const float4*)losses)[i];
        sum += (x.x + x.y) + (x.z + x.w);
    }
    if (threadIdx.x < rows % 4) sum += losses[rows - 1 - threadIdx.x];
    if (mean && labels) {
        const Labels<false> given{labels, wide, ignore_index, flag};
#pragma unroll 8
        for (long long i = threadIdx.x; i < rows; i += ALONE) count += given[i] == ignore_index ? 0.f : 1.f;
    }
    sum = block_reduce<ALONE>(sum, Sum{}, 0.f);
    float divisor = 1.f;
    if (mean) divisor = labels ? fmaxf(block_reduce<ALONE>(count, Sum{}, 0.f), 1.f) : Divisor(summary).get();
    if (threadIdx.x == 0) summary->loss = sum / divisor;
}

// The gradient, if it is computed after the gradient of the loss is known.
extern "C" __global__ void __launch_bounds__(BLOCK) cross_entropy_gradient(
    const scalar* logits,      // (rows, cols), rows `stride` apart
    scalar* dlogits,           // (rows, cols), rows `out_stride` apart; may be logits
    const int* targets,        // (rows,)
    const float* statistics,   // (rows, 2)
    const Summary* summary,
    const float* dloss,        // (), or (rows,) where `each`
    bool each,
    long long stride,
    long long out_stride,
    int vocab,
    int cols,
    float label_share,
    float other_share,
    float z_loss) {
    const long long number = blockIdx.x;
    const scalar* row = logits + number * stride;
    scalar* out = dlogits + number * out_stride;
    const int target = targets[number];
    const float weight = dloss[each ? number : 0] / Divisor(summary).get();
    if (target < 0) {
        for (int j = threadIdx.x; j < cols; j += BLOCK) out[j] = (scalar)0.f;
        return;
    }
    for (int j = vocab + threadIdx.x; j < cols; j += BLOCK) out[j] = (scalar)0.f;
    const LossTerms terms{label_share, other_share, z_loss};
    const Gradient gradient(statistics[2 * number], statistics[2 * number + 1], weight, terms, target);
    const bool aligned = ((u64)row - (u64)out) % 16 == 0;
    const Layout layout(row, aligned ? vocab : 0);
    for (int v = threadIdx.x; v < layout.vectors; v += BLOCK) {
        const int column = layout.vector(v);
        store_vector(out + column, gradient_of(load_vector(row + column), column, gradient));
    }
    for (int i = threadIdx.x; i < vocab - layout.vectors * WIDTH; i += BLOCK) {
        const int column = layout.edge(i);
        out[column] = gradient_of(row[column], column, gradient);
    }
}

// x *= wanted / done; x is not read where the ratio is 1.
extern "C" __global__ void __launch_bounds__(BLOCK) cross_entropy_rescale(
    scalar* x,             // (rows, cols), rows `stride` apart
    const float* done,     // () or null for 1
    const float* wanted,   // ()
    long long stride,
    long long rows,
    int cols) {
    const float ratio = *wanted / (done ? *done : 1.f);
    if (ratio == 1.f) return;
    for (long long number = blockIdx.x; number < rows; number += gridDim.x) {
        scalar* row = x + number * stride;
        for (int j = threadIdx.x; j < cols; j += BLOCK) row[j] = (scalar)((float)row[j] * ratio);
    }
}
