#pragma once
// Programmatic dependent launch (sm_90 and up): a kernel whose first statement is grid_dependency_wait() is launched so that
// its blocks may begin before the kernel before it in the stream has ended (gpuattn/cuda/dependent_launch.py).

// Until the kernels before have ended and what they wrote is seen. Before it no memory may be read or written: of nothing
// that lies there is it known that they do not write it, and they may still read what this kernel overwrites. No input is
// `const __restrict__` in such a kernel, and none read by __ldg: ptxas moves those loads (ld.global.nc) over the wait.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Blocks of the next kernel may come, up to its wait, as soon as all blocks of this one were here or have ended. For the
// last lines of a kernel: blocks that come while others still wait for a place spread unevenly.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
