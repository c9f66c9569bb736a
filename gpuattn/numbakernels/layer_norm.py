"""LayerNorm over rows, a team of threads for each: ``rawkernels/layer_norm.cu`` to read.

A row is read once, 16 bytes at a time, and stays in registers. Matrices are (rows, cols) of one
dtype, as ``vectors.numbers`` gives them, with room for whole vectors at the end of a row;
``weight`` and ``bias`` are (1, cols), ``mean`` and ``rstd`` (rows,), float32. ``mean`` is that of
the row less its first element, which loses nothing to a large mean. A team is a warp, of several
in a block, or a block. What is known of the rows before the launch is known to the compiler.
"""

import functools
import math

import numpy as np

from gpuattn.numbakernels.device import cuda, jit
from gpuattn.numbakernels.reduce import THREADS, ZERO, reductions
from gpuattn.numbakernels.vectors import fetch, floats, gather, load, store

ONE = np.float32(1)
WARPS = 16  # of a block that adds the teams' sums


@functools.cache
def layer_norm_forward(team, vectors, width, edges, early=True):
    """Return the kernel for rows of which each thread of a team holds so many vectors.

    ``width``: numbers of a vector. ``edges``: not every vector is inside the row.
    """
    held, words, words_ahead = vectors * width, 4 * vectors, 8 * vectors
    _, row_sum = reductions(team)
    here = max(THREADS // team, 1)  # rows of a block

    @jit
    def forward(x, weight, bias, y, mean, rstd, cols, eps):
        """Write y = normalized * weight + bias. Launch: grid = (rows / rows of a block,)."""
        partial = cuda.shared.array((2, 32), np.float32)
        values = cuda.local.array(held, np.float32)
        scales = cuda.local.array(words, np.uint32)
        shifts = cuda.local.array(words, np.uint32)
        row = cuda.blockIdx.x * here + cuda.threadIdx.x // team
        if row >= x.shape[0]:
            return
        first = cuda.threadIdx.x % team * width
        pivot = load(x, row, 0)[0]
        share = ONE / np.float32(cols)

        total = ZERO
        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < cols:
                part = load(x, row, column)
                for k in range(width):
                    values[i * width + k] = part[k] - pivot
        if early:
            for i in range(vectors):
                column = first + i * team * width
                if not edges or column < cols:
                    fetch(weight, 0, column, scales, 4 * i)
                    fetch(bias, 0, column, shifts, 4 * i)
        for i in range(vectors):
            column = first + i * team * width
            for k in range(width):
                if not edges or column + k < cols:
                    total += values[i * width + k]
        centre = row_sum(total, partial[0]) * share

        total = ZERO
        for i in range(vectors):
            column = first + i * team * width
            for k in range(width):
                if not edges or column + k < cols:
                    deviation = values[i * width + k] - centre
                    total += deviation * deviation
        scale = ONE / math.sqrt(row_sum(total, partial[1]) * share + eps)

        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < cols:
                if not early:
                    fetch(weight, 0, column, scales, 4 * i)
                    fetch(bias, 0, column, shifts, 4 * i)
                w, b = floats(weight, scales, 4 * i), floats(bias, shifts, 4 * i)
                for k in range(width):
                    normalized = (values[i * width + k] - centre) * scale
                    values[i * width + k] = normalized * w[k] + b[k]
                store(y, row, column, gather(y, values, i * width))
        if cuda.threadIdx.x % team == 0:
            mean[row] = centre
            rstd[row] = scale

    return forward


@functools.cache
def layer_norm_backward(team, vectors, width, edges, ahead=True, max_registers=None):
    """Return the gradient's kernel, for what ``layer_norm_forward`` takes."""
    held, words, words_ahead = vectors * width, 4 * vectors, 8 * vectors
    _, row_sum = reductions(team)
    here = max(THREADS // team, 1)

    @jit(max_registers=max_registers)
    def backward(x, weight, dy, mean, rstd, dx, dweight, dbias, cols):
        """Write dx = rstd * (g - mean(g) - normalized * mean(g * normalized)), g = weight * dy.

        ``dweight``, ``dbias``: (teams, cols), the sums of dy * normalized and of dy over the rows
        of each team. Launch: grid = (teams / teams of a block,); each takes rows a grid apart.
        """
        partial = cuda.shared.array((2, 2, 32), np.float32)
        rows_ahead = cuda.local.array(words_ahead, np.uint32)
        weights = cuda.local.array(words, np.uint32)
        g = cuda.local.array(held, np.float32)
        normalized = cuda.local.array(held, np.float32)
        weight_sums = cuda.local.array(held, np.float32)
        bias_sums = cuda.local.array(held, np.float32)
        rows = x.shape[0]
        first = cuda.threadIdx.x % team * width
        begin = cuda.blockIdx.x * here + cuda.threadIdx.x // team
        step = cuda.gridDim.x * here
        share = ONE / np.float32(cols)
        for i in range(held):
            weight_sums[i] = ZERO
            bias_sums[i] = ZERO
        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < cols:
                fetch(weight, 0, column, weights, 4 * i)
                if ahead:
                    fetch(x, min(begin, rows - 1), column, rows_ahead, 8 * i)
                    fetch(dy, min(begin, rows - 1), column, rows_ahead, 8 * i + 4)
        turn, now = 0, min(begin, rows - 1)
        next_pivot, next_centre, next_scale = load(x, now, 0)[0], mean[now], rstd[now]
        for row in range(begin, rows, step):
            pivot, centre, scale = next_pivot, next_centre, next_scale
            turn = 1 - turn
            total, dot = ZERO, ZERO
            if not ahead:
                for i in range(vectors):
                    column = first + i * team * width
                    if not edges or column < cols:
                        fetch(x, row, column, rows_ahead, 8 * i)
                        fetch(dy, row, column, rows_ahead, 8 * i + 4)
            for i in range(vectors):
                column = first + i * team * width
                if not edges or column < cols:
                    part, d = floats(x, rows_ahead, 8 * i), floats(dy, rows_ahead, 8 * i + 4)
                    w = floats(weight, weights, 4 * i)
                    for k in range(width):
                        n = i * width + k
                        normalized[n] = (part[k] - pivot - centre) * scale
                        g[n] = d[k] * w[k]
                        weight_sums[n] += d[k] * normalized[n]
                        bias_sums[n] += d[k]
                        if not edges or column + k < cols:
                            total += g[n]
                            dot += g[n] * normalized[n]
            following = min(row + step, rows - 1)
            next_pivot, next_centre, next_scale = (
                load(x, following, 0)[0], mean[following], rstd[following]
            )
            if ahead:
                for i in range(vectors):
                    column = first + i * team * width
                    if not edges or column < cols:
                        fetch(x, following, column, rows_ahead, 8 * i)
                        fetch(dy, following, column, rows_ahead, 8 * i + 4)
            total = row_sum(total, partial[turn, 0]) * share
            dot = row_sum(dot, partial[turn, 1]) * share

            for i in range(vectors):
                column = first + i * team * width
                if not edges or column < cols:
                    for k in range(width):
                        n = i * width + k
                        g[n] = scale * (g[n] - total - normalized[n] * dot)
                    store(dx, row, column, gather(dx, g, i * width))

        for i in range(vectors):
            column = first + i * team * width
            if not edges or column < cols:
                for k in range(0, width, 4):
                    n = i * width + k
                    store(dweight, begin, column + k, gather(dweight, weight_sums, n))
                    store(dbias, begin, column + k, gather(dbias, bias_sums, n))

    return backward


@jit
def column_sums(parts, total):
    """Write the sums over the second axis of ``parts`` (2, parts, cols) to ``total`` (2, cols).

    Launch: grid = (cols / 32, 2), block = (32 * WARPS,).
    """
    partial = cuda.shared.array((WARPS, 32), np.float32)
    lane, warp, which = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32, cuda.blockIdx.y
    column = min(cuda.blockIdx.x * 32 + lane, parts.shape[2] - 1)
    value = ZERO
    for part in range(warp, parts.shape[1], WARPS):
        value += parts[which, part, column]
    partial[warp, lane] = value
    cuda.syncthreads()
    if warp == 0:
        value = ZERO
        for other in range(WARPS):
            value += partial[other, lane]
        total[which, column] = value
