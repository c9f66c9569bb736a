#pragma once
// Programmatic dependent launch (sm_90 and up): a kernel whose first statement is grid_dependency_wait() is launched so that
// its blocks may begin while the kernels before it in the stream still run (gpuattn/launch.py).

// Until those kernels have ended and what they wrote is seen. Before it no memory may be read or written: of nothing on the
// device it is known that they do not write it, and they may still read what this kernel overwrites.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
