// Softmax cross entropy and its gradient (see cross_entropy.cu) of long rows, each on a cluster of blocks.
// Constants: scalar = float, f16, bf16; CLUSTER = 6; BLOCK = 192
// Constants: scalar = float, f16, bf16; CLUSTER = 2, 8; BLOCK = 512
// Launch:    grid = (rows * CLUSTER,), block = (BLOCK,), 16 * room bytes of shared memory: what of a block's share of a row
//            does not fit is read twice.
// Arch: sm_90 sm_100
#include "loss/cross_entropy.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) __cluster_dims__(CLUSTER, 1, 1) cross_entropy_rows_cluster(
    scalar* logits,         // (rows, cols >= vocab), rows `stride` apart
    const int* targets,     // (rows,)
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
    const Goal goal{label_share, other_share, z_loss};
    cross_entropy_row<BLOCK, CLUSTER>(logits, targets, losses, statistics, summary, stride, vocab, cols, room, goal, with_gradient);
}
