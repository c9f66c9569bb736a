#pragma once
// Programmatic dependent launch (sm_90 and up): blocks of a kernel whose first statement is grid_dependency_wait() may start
// before the previous kernel in the stream has ended (gpuattn/cuda/driver_launch.py).

// Waits until the previous kernels have ended and their writes are visible. No memory may be accessed before it: previous
// kernels may still write any input, and may still read what this kernel overwrites. The exceptions load what no kernel that
// may still run writes, as their headers say: linear/row_linear.cu weights, attention/cache/projected_attention.cu weights and
// a memory, attention/cache/step_attention.cu and step_attention_hopper.cu old keys with SETTLED, the first also a memory with
// MEMORY, sampling/beam_step_block.cu scores and bans, sampling/beam_update.cu and sampling/text_update.cu their state with
// SETTLED. Inputs of a kernel that waits are not `const __restrict__` and are not read by __ldg: ptxas moves those loads
// (ld.global.nc) above the wait.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks of this kernel have called this or ended, blocks of the next kernel may start and run up to its wait. Call
// it near the end: if blocks of this kernel are still waiting for a multiprocessor, the next ones are placed unevenly.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
