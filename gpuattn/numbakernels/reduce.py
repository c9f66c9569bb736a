"""Reductions over a block of threads, a multiple of 32. ``partial``: 32 float32, shared."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn.numbakernels.device import SIMULATED, cuda, jit
from gpuattn.typing import Array

THREADS = 32 if SIMULATED else 128  # of a block that reduces one row
TEAMS = 32, 64, 128, 256, 512  # threads that can share a row: a warp, or a block
MAX_VECTORS = 4  # of a row that a thread keeps in registers
ALL = 0xFFFFFFFF
ZERO = np.float32(0)
NEG_INF = np.float32(-np.inf)


@jit(device=True)
def block_max(value: Any, partial: Array) -> Any:
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
def block_sum(value: Any, partial: Array) -> Any:
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


def layout(vectors: int) -> tuple[int, int]:
    """Return (threads of a team, vectors that each holds) for rows of so many vectors.

    The fewest threads that the row fills, else the fewest that keep it in registers. A longer row
    takes several steps of the largest team.
    """
    enough = [team for team in TEAMS if vectors <= team * MAX_VECTORS] or TEAMS[-1:]
    filled = [team for team in enough if vectors % team == 0 and vectors <= team * MAX_VECTORS]
    return (filled[0], vectors // filled[0]) if filled else (enough[0], MAX_VECTORS)


def teams_of_a_block(team: int) -> int:
    """Return the teams of a block: several of one warp, or one larger, which uses the barrier."""
    return (2 if SIMULATED else 4) if team == 32 else 1


@functools.cache
def reductions(team: int) -> tuple[Callable, Callable]:
    """Return functions (maximum, sum) of a value and ``partial`` over the threads of a team.

    Every thread gets the result. The next call needs another ``partial``: slower threads may still
    read this one.
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
