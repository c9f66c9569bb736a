"""LayerNorm over rows, a block of threads for each: ``rawkernels/layer_norm.cu`` to read.

A row is read once, 16 bytes at a time, and stays in registers. Matrices are (rows, cols) of one
dtype, as ``vectors.numbers`` gives them, with room for whole vectors at the end of a row;
``weight`` and ``bias`` are (1, cols), ``mean`` and ``rstd`` (rows,), float32. ``mean`` is that of
the row less its first element, which loses nothing to a large mean.
"""

import math

import numpy as np

from gpuattn.numbakernels.device import cuda, jit
from gpuattn.numbakernels.reduce import ZERO, block_sum
from gpuattn.numbakernels.vectors import gather, load, store

ONE = np.float32(1)
LANES = 8  # numbers of a vector at most
FORWARD, BACKWARD = 4, 2  # vectors of a row that a thread holds
HELD, HELD_BACK = FORWARD * LANES, BACKWARD * LANES


@jit
def layer_norm_forward(x, weight, bias, y, mean, rstd, cols, eps):
    """Write y = normalized * weight + bias.

    Launch: grid = (rows,); so many threads, in warps, as hold a row.
    """
    partial = cuda.shared.array(32, np.float32)
    values = cuda.local.array(HELD, np.float32)
    row, me, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    pivot = load(x, row, 0)[0]
    width = len(gather(x, values, 0))
    count = np.float32(cols)

    total = ZERO
    for i in range(FORWARD):
        column = (i * threads + me) * width
        if column < cols:
            part = load(x, row, column)
            for k in range(width):
                values[i * LANES + k] = part[k] - pivot
                if column + k < cols:
                    total += part[k] - pivot
    centre = block_sum(total, partial) / count

    total = ZERO
    for i in range(FORWARD):
        column = (i * threads + me) * width
        for k in range(width):
            if column + k < cols:
                deviation = values[i * LANES + k] - centre
                total += deviation * deviation
    scale = ONE / math.sqrt(block_sum(total, partial) / count + eps)

    for i in range(FORWARD):
        column = (i * threads + me) * width
        if column < cols:
            w, b = load(weight, 0, column), load(bias, 0, column)
            for k in range(width):
                normalized = (values[i * LANES + k] - centre) * scale
                values[i * LANES + k] = normalized * w[k] + b[k]
            store(y, row, column, gather(y, values, i * LANES))
    if me == 0:
        mean[row] = centre
        rstd[row] = scale


@jit
def layer_norm_backward(x, weight, dy, mean, rstd, dx, dweight, dbias, cols):
    """Write dx = rstd * (g - mean(g) - normalized * mean(g * normalized)), g = weight * dy.

    ``dweight``, ``dbias``: (blocks, cols), the sums of dy * normalized and of dy over the rows of
    each block. Launch: grid = (blocks,); so many threads, in warps, as hold a row.
    """
    partial = cuda.shared.array(32, np.float32)
    g = cuda.local.array(HELD_BACK, np.float32)
    normalized = cuda.local.array(HELD_BACK, np.float32)
    weight_sums = cuda.local.array(HELD_BACK, np.float32)
    bias_sums = cuda.local.array(HELD_BACK, np.float32)
    me, threads = cuda.threadIdx.x, cuda.blockDim.x
    width = len(gather(x, g, 0))
    count = np.float32(cols)
    for i in range(HELD_BACK):
        weight_sums[i] = ZERO
        bias_sums[i] = ZERO

    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):
        pivot, centre, scale = load(x, row, 0)[0], mean[row], rstd[row]
        total, dot = ZERO, ZERO
        for i in range(BACKWARD):
            column = (i * threads + me) * width
            if column < cols:
                part, d, w = load(x, row, column), load(dy, row, column), load(weight, 0, column)
                for k in range(width):
                    n = i * LANES + k
                    normalized[n] = (part[k] - pivot - centre) * scale
                    g[n] = d[k] * w[k]
                    weight_sums[n] += d[k] * normalized[n]
                    bias_sums[n] += d[k]
                    if column + k < cols:
                        total += g[n]
                        dot += g[n] * normalized[n]
        total = block_sum(total, partial) / count
        dot = block_sum(dot, partial) / count

        for i in range(BACKWARD):
            column = (i * threads + me) * width
            if column < cols:
                for k in range(width):
                    n = i * LANES + k
                    g[n] = scale * (g[n] - total - normalized[n] * dot)
                store(dx, row, column, gather(dx, g, i * LANES))

    for i in range(BACKWARD):
        column = (i * threads + me) * width
        for k in range(width):
            if column + k < cols:
                dweight[cuda.blockIdx.x, column + k] = weight_sums[i * LANES + k]
                dbias[cuda.blockIdx.x, column + k] = bias_sums[i * LANES + k]
