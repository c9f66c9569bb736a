"""Reductions over a block of threads, a multiple of 32. ``partial``: 32 float32, shared."""

import functools

import numpy as np

from gpuattn.numbakernels.device import SIMULATED, cuda, jit

THREADS = 32 if SIMULATED else 128  # of a block that reduces one row
ALL = 0xFFFFFFFF
ZERO = np.float32(0)
NEG_INF = np.float32(-np.inf)


@jit(device=True)
def block_max(value, partial):
    """Return the largest ``value`` of the block to every thread."""
    for lane in (16, 8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(ALL, value, lane))
    cuda.syncthreads()  # `partial` may still be read by the previous call
    if cuda.threadIdx.x % 32 == 0:
        partial[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    value = NEG_INF
    for warp in range(cuda.blockDim.x // 32):
        value = max(value, partial[warp])
    return value


@jit(device=True)
def block_sum(value, partial):
    """Return the sum of ``value`` over the block to every thread, in a fixed order."""
    for lane in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(ALL, value, lane)
    cuda.syncthreads()  # `partial` may still be read by the previous call
    if cuda.threadIdx.x % 32 == 0:
        partial[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    value = ZERO
    for warp in range(cuda.blockDim.x // 32):
        value += partial[warp]
    return value


@functools.cache
def reductions(team):
    """Return (max, sum) over ``team`` threads of a block: a warp, or several that are the block.

    Both take a value and ``partial``, which no other reduction before the next barrier may use.
    """
    warps = team // 32

    @jit(device=True)
    def row_max(value, partial):
        for lane in (16, 8, 4, 2, 1):
            value = max(value, cuda.shfl_xor_sync(ALL, value, lane))
        if warps > 1:
            if cuda.threadIdx.x % 32 == 0:
                partial[cuda.threadIdx.x // 32] = value
            cuda.syncthreads()
            for warp in range(warps):
                value = max(value, partial[warp])
        return value

    @jit(device=True)
    def row_sum(value, partial):
        for lane in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(ALL, value, lane)
        if warps > 1:
            if cuda.threadIdx.x % 32 == 0:
                partial[cuda.threadIdx.x // 32] = value
            cuda.syncthreads()
            value = ZERO
            for warp in range(warps):
                value += partial[warp]
        return value

    return row_max, row_sum
