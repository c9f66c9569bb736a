// The states that a decoding step begins with, of all its rows: for the first step of texts. Those of later steps come with the
// update of the step before (sampling/beam_update.cu, sampling/text_update.cu).
// Constants: scalar = f16, bf16; PACKS = 1, 2, 3; POSITIONS = false, true
// Launch:    grid = (ceil(rows / WARPS),), block = (32 * WARPS,). A warp per row; a lane has PACKS packs of it, PACKS the least
//            that suffices.
//            dependent: row_embedding
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
//
// The next launch may start at once: it loads its weights while this one runs. It starts when this one has waited, so all that
// came before is over then.
#include "common/grid_dependency.cuh"
#include "embedding_row.cuh"

constexpr int WARPS = 4;  // rows of a block

extern "C" __global__ void __launch_bounds__(32 * WARPS) row_embedding(
    const int* tokens,     // (rows,)
    const int* positions,  // (rows,)
    const __grid_constant__ Embedding embedding,
    int rows) {
    grid_dependency_wait();
    grid_launch_dependents();
    const int i = blockIdx.x * WARPS + threadIdx.x / 32;
    if (i < rows) embed_row<scalar, PACKS, POSITIONS>(embedding, i, tokens[i], POSITIONS ? positions[i] : 0, threadIdx.x % 32);
}
