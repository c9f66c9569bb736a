// Softmax of long rows and its gradient (see softmax.cu). A row is distributed over the shared memory of a cluster of blocks.
// Longer rows are read twice.
// Constants: scalar = float, bf16; MASK = 0; DROPOUT = false; EDGES = false; LANES = 512; VECTORS = 2; CLUSTER = 1, 8;
//    STAGED = true
// Constants: scalar = f16; MASK = 2; DROPOUT = true; EDGES = true; LANES = 256; VECTORS = 2; CLUSTER = 8;
//    STAGED = false, true
// Launch:    grid = (rows * CLUSTER,), block = (LANES,), shared if STAGED: 16 bytes, and a share and two vectors for x,
//            or for each of y and dy
//            dependent: softmax_forward, softmax_backward
// Arch: sm_90 sm_100
constexpr int BLOCKS = CLUSTER;
constexpr bool LONG = true;
#include "common/grid_dependency.cuh"
#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(LANES) __cluster_dims__(CLUSTER, 1, 1) softmax_forward(const Softmax a) {
    grid_dependency_wait();
    forward(a);
}

extern "C" __global__ void __launch_bounds__(LANES) __cluster_dims__(CLUSTER, 1, 1) softmax_backward(const Softmax a) {
    grid_dependency_wait();
    backward(a);
}
