"""Reductions over a block of threads, a multiple of 32. ``partial``: 32 float32, shared."""

import functools

import numpy as np

from gpuattn.numbakernels.device import SIMULATED, cuda, jit

THREADS = 32 if SIMULATED else 128  # of a block that reduces one row
TEAMS = 32, 64, 128, 256, 512  # threads that may share a row: a warp, or a block
HELD = 4  # vectors of a row that a thread holds, at most
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


# ---- rows that fit into registers ----------------------------------------------------------------


def layout(vectors):
    """Return (threads of a team, vectors that each holds) for rows of so many vectors.

    The fewest threads that the row fills, else the fewest that hold it. A longer row takes several
    steps of the most.
    """
    enough = [team for team in TEAMS if vectors <= team * HELD] or TEAMS[-1:]
    filled = [team for team in enough if vectors % team == 0 and vectors <= team * HELD]
    return (filled[0], vectors // filled[0]) if filled else (enough[0], HELD)


def teams_of_a_block(team):
    """Return how many: several warps, or one team of several, for which the block's barrier is."""
    return (2 if SIMULATED else 4) if team == 32 else 1


@functools.cache
def reductions(team):
    """Return the maximum and the sum over a team, functions of a value and ``partial``.

    Every thread gets the result. The next call wants another ``partial``: this one is still read.
    """
    warps = team // 32

    @jit(device=True)
    def team_max(value, partial):
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
    def team_sum(value, partial):
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

    return team_max, team_sum
