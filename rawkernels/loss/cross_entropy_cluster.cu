// Softmax cross entropy and its gradient (see cross_entropy.cu) for long rows, one cluster of blocks per row.
// Constants: scalar = float, f16, bf16; CLUSTER = 6; BLOCK = 192; CHECKED = false, true
// Constants: scalar = float, f16, bf16; CLUSTER = 2, 8; BLOCK = 512; CHECKED = false, true
// Launch:    grid = (rows * CLUSTER,), block = (BLOCK,), 16 * room bytes of shared memory; the rest of a block's share of
//            the row is read twice.
// Arch: sm_90 sm_100
#include "loss/cross_entropy.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) __cluster_dims__(CLUSTER, 1, 1) cross_entropy_rows_cluster(
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
    cross_entropy_row<BLOCK, CLUSTER>(logits, given, losses, statistics, summary, stride, vocab, cols, room, terms,
                                      with_gradient);
}
