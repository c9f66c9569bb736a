#pragma once
// Warp-specialized pipelines on Hopper: the position in a ring of stages, and registers moved between warpgroups.
#include "common/barrier.cuh"

// A position in a ring of STAGES, with the parity of the current pass over the ring. Each stage has a full and an empty
// barrier: a consumer waits for the full one with `parity`, a producer for the empty one with `parity ^ 1`.
template <int STAGES> struct PipelineState {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ PipelineState() {}
    __device__ __forceinline__ explicit PipelineState(u32 count)  // after `count` stages
        : stage(count % STAGES), parity(count / STAGES & 1) {}
    __device__ __forceinline__ void next() { if (++stage == STAGES) stage = 0, parity ^= 1; }
    __device__ __forceinline__ u32 previous() const { return (stage ? stage : STAGES) - 1; }
};

// Called by all warps of a warpgroup: sets the registers of each thread to a multiple of 8. An increase waits until other
// warpgroups have released enough; a launch gives every thread the same number.
template <int REGISTERS> __device__ __forceinline__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
