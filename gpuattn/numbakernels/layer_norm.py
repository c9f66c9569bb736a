"""LayerNorm, one team of threads per row: the readable form of ``rawkernels/norm/layer_norm.cu``.

A row is read once, 16 bytes at a time, and stays in registers. Matrices are (rows, cols) of one
dtype, from ``vectors.numbers``, with rows padded to whole vectors (inputs with zeros). ``weight``
and ``bias`` are such matrices of one row; ``mean`` and ``rstd`` are (rows,) float32. ``mean`` is
that of the row minus its first element, which keeps its precision for any mean. The sizes in
``reduce.layout`` are compile-time constants.
"""

import functools
import math
from collections.abc import Callable

import numpy as np

from gpuattn.numbakernels.device import SIMULATED, cuda, jit
from gpuattn.numbakernels.reduce import ALL, ZERO, reductions, teams_of_a_block
from gpuattn.numbakernels.vectors import fetch, floats, gather, load, store
from gpuattn.typing import Array

ONE = np.float32(1)
NOTHING = np.uint32(0)
SUMMING = 4 if SIMULATED else 32  # warps of a block that add the teams' sums


@functools.cache
def layer_norm_forward(team: int, vectors: int, width: int, edges: bool) -> Callable:
    """Return the kernel in which each thread of a team keeps ``vectors`` vectors of a row.

    ``width``: numbers of a vector. ``edges``: some vectors are outside of the row.
    """
    held, teams = vectors * width, teams_of_a_block(team)
    _, team_sum = reductions(team)

    @jit(device=True)
    def clear_beyond(values, first, cols):
        """Write zeros after the end of the row."""
        if edges:
            for i in range(vectors):
                column = first + i * team * width
                if column + width > cols:
                    for k in range(width):
                        if column + k >= cols:
                            values[i * width + k] = ZERO

    @jit
    def forward(x, weight, bias, y, mean, rstd, cols, eps):
        """Write y = normalized * weight + bias.

        Launch: grid = (rows / teams of a block,), block = (team * teams of a block,).
        """
        partial = cuda.shared.array((2, 32), np.float32)
        values = cuda.local.array(held, np.float32)
        row = cuda.blockIdx.x * teams + cuda.threadIdx.x // team
        if row >= x.shape[0]:
            return
        first = cuda.threadIdx.x % team * width
        pivot, share = load(x, row, 0)[0], ONE / np.float32(cols)

        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < cols:
                part = load(x, row, column)
                for k in range(width):
                    values[i * width + k] = part[k] - pivot
        clear_beyond(values, first, cols)
        total = ZERO
        for n in range(held):
            total += values[n]
        centre = team_sum(total, partial[0]) * share

        for n in range(held):
            values[n] -= centre
        clear_beyond(values, first, cols)
        total = ZERO
        for n in range(held):
            total += values[n] * values[n]
        scale = ONE / math.sqrt(team_sum(total, partial[1]) * share + eps)

        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < cols:
                w, b = load(weight, 0, column), load(bias, 0, column)
                for k in range(width):
                    values[i * width + k] = values[i * width + k] * scale * w[k] + b[k]
                store(y, row, column, gather(y, values, i * width))
        if cuda.threadIdx.x % team == 0:
            mean[row] = centre
            rstd[row] = scale

    return forward


@functools.cache
def layer_norm_backward(team: int, vectors: int, width: int, edges: bool) -> Callable:
    """Return the kernel of the gradient; arguments as in ``layer_norm_forward``."""
    held, words, both_words = vectors * width, 4 * vectors, 8 * vectors
    teams = teams_of_a_block(team)
    _, team_sum = reductions(team)

    @jit(device=True)
    def read_ahead(x, dy, row, first, ahead):
        """Load this thread's vectors of the rows of x and dy to ``ahead``, alternating."""
        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < x.shape[1]:
                fetch(x, row, column, ahead, 8 * i)
                fetch(dy, row, column, ahead, 8 * i + 4)

    @jit
    def backward(x, weight, dy, mean, rstd, dx, dweight, dbias, cols):
        """Write dx = rstd * (g - mean(g) - normalized * mean(g * normalized)), g = weight * dy.

        ``dweight``, ``dbias``: (all teams, cols), the sums of dy * normalized and of dy over the
        rows of each team, which strides over the rows. Launch: grid = (all teams / teams of a
        block,), block = (team * teams of a block,). The next row is loaded while the current one
        is processed: few threads, each with many bytes in flight.
        """
        partial = cuda.shared.array((2, 2, 32), np.float32)
        ahead = cuda.local.array(both_words, np.uint32)
        weights = cuda.local.array(words, np.uint32)
        g = cuda.local.array(held, np.float32)
        normalized = cuda.local.array(held, np.float32)
        weight_sums = cuda.local.array(held, np.float32)
        bias_sums = cuda.local.array(held, np.float32)
        me = cuda.blockIdx.x * teams + cuda.threadIdx.x // team
        first, last = cuda.threadIdx.x % team * width, x.shape[0] - 1
        share = ONE / np.float32(cols)

        for n in range(held):
            weight_sums[n], bias_sums[n] = ZERO, ZERO
        for n in range(both_words):
            ahead[n] = NOTHING
        for i in range(vectors):
            for n in range(4):
                weights[4 * i + n] = NOTHING
            if not edges or first + i * team * width < x.shape[1]:
                fetch(weight, 0, first + i * team * width, weights, 4 * i)
        turn, following = 0, min(me, last)
        read_ahead(x, dy, following, first, ahead)
        pivot, centre, scale = load(x, following, 0)[0], mean[following], rstd[following]

        for row in range(me, x.shape[0], dweight.shape[0]):
            total, dot = ZERO, ZERO
            for i in range(vectors):
                part, d = floats(x, ahead, 8 * i), floats(dy, ahead, 8 * i + 4)
                w = floats(weight, weights, 4 * i)
                for k in range(width):
                    n = i * width + k
                    normalized[n] = (part[k] - pivot - centre) * scale
                    g[n] = d[k] * w[k]
                    weight_sums[n] += d[k] * normalized[n]
                    bias_sums[n] += d[k]
                    total += g[n]
                    dot += g[n] * normalized[n]
            rstd_of_row = scale
            following = min(row + dweight.shape[0], last)
            read_ahead(x, dy, following, first, ahead)
            pivot, centre, scale = load(x, following, 0)[0], mean[following], rstd[following]

            turn = 1 - turn  # a slow warp may still read the sums of the previous row
            total = team_sum(total, partial[turn, 0]) * share
            dot = team_sum(dot, partial[turn, 1]) * share
            for i in range(vectors):
                column = first + i * team * width
                if not edges or column < dx.shape[1]:
                    for n in range(i * width, (i + 1) * width):
                        g[n] = rstd_of_row * (g[n] - total - normalized[n] * dot)
                    store(dx, row, column, gather(dx, g, i * width))

        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < dweight.shape[1]:
                for k in range(0, width, 4):
                    n = i * width + k
                    store(dweight, me, column + k, gather(dweight, weight_sums, n))
                    store(dbias, me, column + k, gather(dbias, bias_sums, n))

    return backward


@jit
def column_sums(parts: Array, total: Array) -> None:
    """Write the sums over each half of the rows of ``parts`` (2 * teams, cols) to ``total``.

    ``total``: (2, cols). Launch: grid = (cols / 32, 2), block = (32 * SUMMING,). A warp reads 128
    bytes of four rows at a time.
    """
    partial = cuda.shared.array((SUMMING, 32), np.float32)
    sums = cuda.local.array(4, np.float32)
    lane, warp, half = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32, cuda.blockIdx.y
    begin, four, teams = cuda.blockIdx.x * 32, lane % 8 * 4, parts.shape[0] // 2
    for k in range(4):
        sums[k] = ZERO
    if begin + four < parts.shape[1]:
        for part in range(4 * warp + lane // 8, teams, 4 * SUMMING):
            numbers = load(parts, half * teams + part, begin + four)
            for k in range(4):
                sums[k] += numbers[k]
    for k in range(4):
        for apart in (8, 16):
            sums[k] += cuda.shfl_xor_sync(ALL, sums[k], apart)
        partial[warp, four + k] = sums[k]
    cuda.syncthreads()
    if warp == 0 and begin + lane < total.shape[1]:
        value = ZERO
        for other in range(SUMMING):
            value += partial[other, lane]
        total[half, begin + lane] = value
