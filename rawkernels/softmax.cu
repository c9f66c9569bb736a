// Softmax over the last axis of scale * x + mask, with dropout, and its gradient. A row is read once and written once: it
// stays in the registers of the threads that share it. Longer rows are read twice.
// Constants: scalar = float, bf16; MASK = 0, 1, 2 (none, keep where true, add); DROPOUT = true; EDGES = true; LANES = 64;
//    VECTORS = 3; LONG = false
// Constants: scalar = float, bf16; MASK = 0; DROPOUT = false; EDGES = false; LANES = 8, 512; VECTORS = 2; LONG = false
// Constants: scalar = f16; MASK = 2; DROPOUT = true; EDGES = true; LANES = 512; VECTORS = 2; LONG = true
// Launch:    grid = (ceil(rows / (BLOCK / LANES)),), block = (BLOCK,) = (max(LANES, 128),)
//            dependent: softmax_forward, softmax_backward
// Arch: sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121
constexpr int BLOCKS = 1;
constexpr bool STAGED = false;
#include "common/grid_dependency.cuh"
#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) softmax_forward(const Softmax a) {
    grid_dependency_wait();
    forward(a);
}
extern "C" __global__ void __launch_bounds__(BLOCK) softmax_backward(const Softmax a) {
    grid_dependency_wait();
    backward(a);
}
